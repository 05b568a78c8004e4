"""Listening socket of the chief and of parameter servers; names the process that uses the port already."""

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.addresses import is_loopback, split_address
from lockstep.distributed.control.handshake import hello, new_nonce
from lockstep.distributed.control.transport import FramedSocket

__all__ = ["open_listener"]

_PROBE_SECONDS = 1.0
_ALL_ADDRESSES = ""


def open_listener(
    coordinator: str, bind_host: str | None, log: Callable[[str], None], who: str = "the chief"
) -> socket.socket:
    """Return a socket that listens for the other processes of the job.

    It listens on the coordinator's host if that is a loopback address or another address of this machine. If it is a name, which
    may have another address on this machine (often 127.0.1.1), or an address of a NAT, it listens on all addresses.

    Args:
        coordinator: ``host:port`` that the other processes connect to.
        bind_host: address to listen on instead.
        log: takes a line.
        who: the process that listens, for messages.

    Raises:
        ClusterError: the port is in use, or the host is not an address of this machine.
    """
    named, port = split_address("the coordinator", coordinator)
    host = bind_host if bind_host is not None else _host_to_bind(named)
    try:
        return _listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ClusterError(_port_in_use(named if host == _ALL_ADDRESSES else host, port, who)) from None
        if bind_host is None and host != _ALL_ADDRESSES and error.errno == errno.EADDRNOTAVAIL:
            log(f"{host} is no address of this machine: {who} listens on port {port} of all its addresses")
            return open_listener(coordinator, _ALL_ADDRESSES, log, who)
        place = f"port {port} of {host or 'this machine'}"
        raise ClusterError(f"{_capitalize(who)} cannot listen on {place}: {error}.") from None


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
    process = _find_process(host, port)
    other = f"another Lockstep job ({process})" if process else "something that is no Lockstep job"
    return (
        f"{_capitalize(who)} cannot listen on port {port} of {host}: {other} uses it. End that, or give all workers of this job another "
        f"port, where this one comes from: TF_CONFIG, --hosts, --coordinator or LOCKSTEP_PORT."
    )


def _capitalize(who: str) -> str:
    return who[0].upper() + who[1:]


def _find_process(host: str, port: int) -> str | None:
    """Return which process of Lockstep listens at an address, from its challenge; None if it is another program."""
    with contextlib.suppress(OSError):
        connection = FramedSocket(socket.create_connection((host, port), timeout=_PROBE_SECONDS))
        with contextlib.closing(connection):
            connection.send(hello(new_nonce()))
            deadline = time.monotonic() + _PROBE_SECONDS
            while connection.ended is None and time.monotonic() < deadline:
                message = connection.wait(deadline - time.monotonic())
                if message is not None:
                    return str(message.get("process")) if message["kind"] == "challenge" else None
    return None
