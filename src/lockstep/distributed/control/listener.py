"""Where the chief listens, and who is there already if it cannot."""

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.addresses import is_loopback, split_address
from lockstep.distributed.control.framed_socket import FramedSocket
from lockstep.distributed.control.handshake_server import hello
from lockstep.distributed.control.protocol import new_nonce

__all__ = ["open_listener"]

_ASK_SECONDS = 1.0
_EVERYWHERE = ""


def open_listener(
    coordinator: str, bind_host: str | None, announce: Callable[[str], None], who: str = "the chief"
) -> socket.socket:
    """A socket that listens for other processes.

    It listens on the coordinator's host where that is a loopback or another address of this machine. A name may mean
    something else here than elsewhere (127.0.1.1, often), and an address may be translated on the way: then it listens on all.

    Args:
        coordinator: ``host:port`` that the others connect to.
        bind_host: where to listen instead.
        announce: takes a line.
        who: listens, for messages.

    Raises:
        ClusterError: the port is in use, or the host is none of this machine.
    """
    named, port = split_address("the coordinator", coordinator)
    host = bind_host if bind_host is not None else _host_to_bind(named)
    try:
        return _listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ClusterError(_in_use(named if host == _EVERYWHERE else host, port, who)) from None
        if bind_host is None and host != _EVERYWHERE and error.errno == errno.EADDRNOTAVAIL:
            announce(f"{host} is no address of this machine: {who} listens on port {port} of all its addresses")
            return open_listener(coordinator, _EVERYWHERE, announce, who)
        place = f"port {port} of {host or 'this machine'}"
        raise ClusterError(f"{_capital(who)} cannot listen on {place}: {error}.") from None


def _host_to_bind(host: str) -> str:
    if is_loopback(host):
        return host
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return host
    return _EVERYWHERE


def _listen(host: str, port: int) -> socket.socket:
    if host == _EVERYWHERE:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
        return socket.create_server(("0.0.0.0", port), backlog=128)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=128)


def _in_use(host: str, port: int, who: str) -> str:
    there = _who_is_there(host, port)
    other = f"another Lockstep job ({there})" if there else "something that is no Lockstep job"
    return (
        f"{_capital(who)} cannot listen on port {port} of {host}: {other} uses it. End that, or give all workers of this job another "
        f"port, where this one comes from: TF_CONFIG, --hosts, --coordinator or LOCKSTEP_PORT."
    )


def _capital(who: str) -> str:
    return who[0].upper() + who[1:]


def _who_is_there(host: str, port: int) -> str | None:
    """Which process of Lockstep listens there, by its own words; None where it is something else."""
    with contextlib.suppress(OSError):
        connection = FramedSocket(socket.create_connection((host, port), timeout=_ASK_SECONDS))
        with contextlib.closing(connection):
            connection.send(hello(new_nonce()))
            deadline = time.monotonic() + _ASK_SECONDS
            while connection.ended is None and time.monotonic() < deadline:
                message = connection.wait(deadline - time.monotonic())
                if message is not None:
                    return str(message.get("process")) if message["kind"] == "challenge" else None
    return None
