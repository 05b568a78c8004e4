"""Whether the processes of a cluster can find each other: names, ports and machines, all asked at once and within a few seconds."""

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

__all__ = ["ClusterPeer", "about_network", "peers_of"]

LIMIT = 4.0  # seconds for all of them together
_NOT_YET = "nothing listens there yet"


@dataclass(frozen=True)
class ClusterPeer:
    """A process of the cluster.

    Args:
        name: for messages.
        address: ``host:port``.
        is_own: whether it is this one.
        listens: whether others connect to it at that port.
    """

    name: str
    address: str
    is_own: bool
    listens: bool


def peers_of(membership: Membership) -> list[ClusterPeer]:
    """All processes whose address is known.

    Workers that train in step meet at worker 0 alone; where there are servers of variables, every process but the workers is called.
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


def about_network(peers: Sequence[ClusterPeer], limit: float = LIMIT) -> Iterator[Finding]:
    """About addresses that lead nowhere, or not to where they should.

    Args:
        peers: of the cluster.
        limit: seconds for all.
    """
    others = [peer for peer in peers if not peer.is_own]
    remote = [peer for peer in peers if not is_loopback(host_of(peer.address))]
    for peer in peers:
        if remote and is_loopback(host_of(peer.address)):
            yield _loopback(peer, remote[0])
        if peer.is_own and peer.listens:
            yield from _own_port(peer)
    for peer, answer in zip(others, _answers(others, limit), strict=True):
        yield from _reached(peer, answer, limit)


def _loopback(peer: ClusterPeer, other: ClusterPeer) -> Finding:
    return Finding(
        "loopback-in-cluster",
        f"{peer.name} is at {peer.address}, and {other.name} at {other.address}, on another machine",
        "the cluster",
        "on every machine a loopback address is that machine itself",
        f"Give {peer.name} the name or address that its machine has in the network",
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
            "End what uses the port, or give all processes of the job another one",
        )


def _reached(peer: ClusterPeer, answer: str | None, limit: float) -> Iterator[Finding]:
    """What an answer means: None is a connection, a refusal comes from a machine that is there."""
    if answer is None or (answer == _NOT_YET and not peer.listens):
        return
    if answer == _NOT_YET:
        what = f"{peer.name} at {peer.address} refused: {_NOT_YET}"
        why = "that is as it should be where it has not been started; else something on the way refuses in its place"
        cure = "Start it and look again; if it runs, see that it listens at this address, and what a firewall does with the port"
    elif answer.startswith("name"):
        what = f"{peer.name}: the name {host_of(peer.address)!r} leads to no address"
        why, cure = answer, "Write it into DNS or /etc/hosts of this machine, or give the cluster addresses"
    else:
        what = f"{peer.name} at {peer.address}: {answer}"
        why = "its machine is off or elsewhere, or a firewall drops what goes there"
        cure = "See that the address is right, and open the ports of the job between the machines"
    yield Finding("worker-not-reached", what, f"from this machine, within {limit:g} s", why, cure)


def _answers(peers: Sequence[ClusterPeer], limit: float) -> list[str | None]:
    """For each the outcome of a connection."""
    deadline = time.monotonic() + limit
    found: queue.Queue[tuple[int, str | None]] = queue.Queue()

    def ask(number: int, address: str) -> None:
        found.put((number, _answer(address, max(0.1, deadline - time.monotonic()))))

    for number, peer in enumerate(peers):  # Daemons, because looking up a name has no limit.
        threading.Thread(target=ask, args=(number, peer.address), daemon=True).start()
    answers: list[str | None] = [f"no answer within {limit:g} s"] * len(peers)
    for _ in peers:
        try:
            number, answer = found.get(timeout=max(0.05, deadline + 0.2 - time.monotonic()))
        except queue.Empty:
            break
        answers[number] = answer
    return answers


def _answer(address: str, limit: float) -> str | None:
    try:
        socket.create_connection(split_address("the cluster", address), timeout=limit).close()
    except socket.gaierror as error:
        return f"name lookup: {error.strerror}"
    except TimeoutError:
        return f"no answer within {limit:.0f} s"
    except OSError as error:
        return _NOT_YET if error.errno == errno.ECONNREFUSED else str(error.strerror)
    return None
