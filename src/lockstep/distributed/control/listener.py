"""Listening socket of the chief and of parameter servers: who may reach it, and which program uses the port already."""

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from lockstep._errors import ClusterError
from lockstep._logging import capitalized
from lockstep.distributed.cluster.addresses import is_loopback, join_address, split_address
from lockstep.distributed.cluster.env_reader import BIND, OPEN, SECRET, SECRET_FILE, NetworkOptions
from lockstep.distributed.control.handshake import hello, new_nonce
from lockstep.distributed.control.transport import FramedSocket

_PROBE_SECONDS = 1.0
_ALL_ADDRESSES = ""


def open_listener(
    coordinator: str, network: NetworkOptions, log: Callable[[str], None], who: str = "the chief"
) -> socket.socket:
    """Return a socket that listens for the other processes of the job.

    It listens at ``network.bind_host``. Without one, it listens on the coordinator's host if that is a loopback address or another
    address of this machine. If it is a name, which may have another address on this machine (often 127.0.1.1), or an address of a
    NAT, it listens on all addresses.

    Args:
        coordinator: ``host:port`` that the other processes connect to.
        network: the address to listen on, and whether other machines may be talked to.
        log: takes a line.
        who: the process that listens, for messages.

    Raises:
        ClusterError: other machines can reach the socket and there is no secret, the port is in use, or the host is not an address of
            this machine.
    """
    named, port = split_address("the coordinator", coordinator)
    host = network.bind_host if network.bind_host is not None else _host_to_bind(named)
    check_closed(join_address(host or named, port), network, who)
    try:
        listener = _listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ClusterError(_port_in_use(named if host == _ALL_ADDRESSES else host, port, who)) from None
        if network.bind_host is None and host != _ALL_ADDRESSES and error.errno == errno.EADDRNOTAVAIL:
            log(f"{host} is no address of this machine: {who} listens on port {port} of all its addresses")
            return open_listener(coordinator, replace(network, bind_host=_ALL_ADDRESSES), log, who)
        place = f"port {port} of {host or 'this machine'}"
        variable = "" if network.bind_host is None else f" ({BIND})"
        raise ClusterError(f"{capitalized(who)} cannot listen on {place}{variable}: {error}.") from None
    if network.secret is None and not is_loopback(host):
        log(
            f"{OPEN}=1: {who} listens on port {port} of {host or 'all addresses'} without a secret. Each process that reaches that port can read "
            "and change this training."
        )
    return listener


def check_closed(address: str, network: NetworkOptions, who: str) -> None:
    """Check that a process needs no secret, or has one.

    Args:
        address: ``host:port`` at which the process listens, or to which it connects.
        network: has the secret.
        who: the process, for the error.

    Raises:
        ClusterError: the host is no loopback address, there is no secret, and the user has not said that none is needed.
    """
    if needs_secret(address, network):
        raise ClusterError(
            f"{capitalized(who)} uses {address}, which other machines may reach, and has no secret: anyone there could read and change "
            f"this training. Fix: give all processes of the job one secret: {SECRET}=$(openssl rand -hex 32), or {SECRET_FILE}=PATH of "
            f"a file that only you can read; or, on a network that no one else can use, set {OPEN}=1 (docs/security.md)."
        )


def needs_secret(address: str, network: NetworkOptions) -> bool:
    """Return whether a process at ``address`` (``host:port``) lacks a secret: it has none, and other machines may reach it."""
    host, _ = split_address("address", address)
    return network.secret is None and not network.is_open and not is_loopback(host)


def _host_to_bind(host: str) -> str:
    if is_loopback(host):
        return host
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return host
    return _ALL_ADDRESSES


def _listen(host: str, port: int) -> socket.socket:
    if host == _ALL_ADDRESSES:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
        return socket.create_server(("0.0.0.0", port), backlog=128)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=128)


def _port_in_use(host: str, port: int, who: str) -> str:
    other = "another Lockstep job" if _is_lockstep(host, port) else "something that is no Lockstep job"
    return (
        f"{capitalized(who)} cannot listen on port {port} of {host}: {other} uses it. End that ('ss -ltnp' shows its process), or give "
        f"all workers of this job another port, where this one comes from: TF_CONFIG, --hosts, --coordinator or LOCKSTEP_PORT."
    )


def _is_lockstep(host: str, port: int) -> bool:
    """Return whether a process of Lockstep listens at an address."""
    with contextlib.suppress(OSError):
        connection = FramedSocket(socket.create_connection((host, port), timeout=_PROBE_SECONDS))
        with contextlib.closing(connection):
            connection.send(hello(new_nonce()))
            deadline = time.monotonic() + _PROBE_SECONDS
            while connection.ended is None and time.monotonic() < deadline:
                message = connection.wait(deadline - time.monotonic())
                if message is not None:
                    return message["kind"] == "challenge"
    return False
