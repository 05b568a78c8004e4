"""Checks of the network between the processes of a cluster: names, ports and connections, tried in parallel within seconds."""

import errno
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.addresses import host_of, is_loopback, split_address
from lockstep.distributed.cluster.membership import Membership
from lockstep.distributed.control.listener import open_listener
from lockstep.doctor.finding import Finding

__all__ = ["ClusterPeer", "check_network", "peers_of"]

LIMIT = 4.0  # seconds for all connections
_NOT_LISTENING = "nothing listens there yet"


@dataclass(frozen=True)
class ClusterPeer:
    """A process of the cluster.

    Args:
        name: for messages.
        address: ``host:port``.
        is_own: whether it is this process.
        listens: whether other processes connect to it at that port.
    """

    name: str
    address: str
    is_own: bool
    listens: bool


def peers_of(membership: Membership) -> list[ClusterPeer]:
    """Return all processes whose address is known.

    Workers that train in step connect to worker 0 only; with parameter servers, all processes except the workers accept connections.
    """
    spec, group = membership.spec, membership.group
    has_servers = "ps" in spec.jobs and spec.num_tasks("ps") > 0
    found = []
    for job in spec.jobs:
        for index in spec.task_indices(job):
            address = spec.task_address(job, index)
            first = address == group.coordinator if group else job == "chief"
            listens = job in ("chief", "ps") if has_servers else first
            found.append(
                ClusterPeer(
                    f"{job} {index}", address, (job, index) == (membership.task_type, membership.task_id), listens
                )
            )
    return found


def check_network(peers: Sequence[ClusterPeer], limit: float = LIMIT) -> Iterator[Finding]:
    """Find addresses that cannot be reached, or that are wrong.

    Args:
        peers: processes of the cluster.
        limit: seconds for all connections.
    """
    others = [peer for peer in peers if not peer.is_own]
    remote = [peer for peer in peers if not is_loopback(host_of(peer.address))]
    for peer in peers:
        if remote and is_loopback(host_of(peer.address)):
            yield _loopback(peer, remote[0])
        if peer.is_own and peer.listens:
            yield from _own_port(peer)
    for peer, failure in zip(others, _connect_all(others, limit), strict=True):
        yield from _unreachable(peer, failure, limit)


def _loopback(peer: ClusterPeer, other: ClusterPeer) -> Finding:
    return Finding(
        "loopback-in-cluster",
        f"{peer.name} is at {peer.address}, and {other.name} at {other.address}, on another machine",
        "the cluster",
        "on every machine a loopback address means that machine itself",
        f"Use the name or address that the machine of {peer.name} has in the network",
    )


def _own_port(peer: ClusterPeer) -> Iterator[Finding]:
    try:
        open_listener(peer.address, None, lambda _: None, peer.name).close()
    except (ClusterError, OSError) as error:
        yield Finding(
            "port-not-free",
            f"{peer.name}, which is this process, cannot listen at {peer.address}",
            "the cluster",
            str(error).rstrip("."),
            "Stop the process that uses the port, or use another port in all processes of the job",
        )


def _unreachable(peer: ClusterPeer, failure: str | None, limit: float) -> Iterator[Finding]:
    """Explain a failed connection; a refusal shows that the machine is reachable, and is normal for processes that do not listen."""
    if failure is None or (failure == _NOT_LISTENING and not peer.listens):
        return
    if failure == _NOT_LISTENING:
        what = f"{peer.name} at {peer.address} refused: {_NOT_LISTENING}"
        why = (
            "that is normal if it has not been started; otherwise something between the machines refuses the connection"
        )
        cure = "Start it and run the check again; if it runs, check that it listens at this address and that no firewall blocks the port"
    elif failure.startswith("name"):
        what = f"{peer.name}: the name {host_of(peer.address)!r} has no address"
        why, cure = failure, "Add it to DNS or to /etc/hosts of this machine, or use addresses in the cluster"
    else:
        what = f"{peer.name} at {peer.address}: {failure}"
        why = "its machine is off or has another address, or a firewall drops the packets"
        cure = "Check the address, and open the ports of the job between the machines"
    yield Finding("worker-not-reached", what, f"from this machine, within {limit:g} s", why, cure)


def _connect_all(peers: Sequence[ClusterPeer], limit: float) -> list[str | None]:
    """Try to connect to all peers; return for each why it failed, or None."""
    deadline = time.monotonic() + limit
    found: queue.Queue[tuple[int, str | None]] = queue.Queue()

    def connect(number: int, address: str) -> None:
        found.put((number, _connect(address, max(0.1, deadline - time.monotonic()))))

    for number, peer in enumerate(peers):  # Daemon threads, because a name lookup has no timeout.
        threading.Thread(target=connect, args=(number, peer.address), daemon=True).start()
    failures: list[str | None] = [f"no answer within {limit:g} s"] * len(peers)
    for _ in peers:
        try:
            number, failure = found.get(timeout=max(0.05, deadline + 0.2 - time.monotonic()))
        except queue.Empty:
            break
        failures[number] = failure
    return failures


def _connect(address: str, limit: float) -> str | None:
    """Try to connect; return why it failed, or None."""
    try:
        socket.create_connection(split_address("the cluster", address), timeout=limit).close()
    except socket.gaierror as error:
        return f"name lookup: {error.strerror}"
    except TimeoutError:
        return f"no answer within {limit:.0f} s"
    except OSError as error:
        return _NOT_LISTENING if error.errno == errno.ECONNREFUSED else str(error.strerror)
    return None
