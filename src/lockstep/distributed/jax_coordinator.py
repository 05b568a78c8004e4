"""Where JAX's own service is, at the chief, and whether all workers can reach it.

JAX aborts a process that cannot open or reach that port. So the chief opens it first and the others try it, and all learn who cannot.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.addresses import host_of, is_loopback, join_address, split_address
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.control.control_client import ControlClient
from lockstep.distributed.control.listener import open_listener

__all__ = ["JAX_PORT", "address_of_jax"]

JAX_PORT = "LOCKSTEP_JAX_PORT"  # port of JAX's service at worker 0; by default any free one
_REACH_SECONDS = 10.0


def address_of_jax(session: ControlClient, environ: Mapping[str, str], announce: Callable[[str], None]) -> str:
    """``host:port`` of JAX's service, at which nothing listens any more.

    Args:
        session: the workers, who all call it.
        environ: may fix the port.
        announce: takes a line.

    Raises:
        ClusterError: on all workers, where the chief cannot listen there, or a worker cannot reach it.
    """
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(_tried(session, environ, announce)) if session.group.is_chief else None
        address, error = session.broadcast("the address of JAX's service", mine)
        if error is None:
            ways = session.gather("the way to JAX's service", None if session.group.is_chief else _reached(address))
            lost = [(peer, way) for peer, way in zip(session.peers, ways, strict=True) if way is not None]
            error = _unreached(address, *lost[0]) if lost else None
    if error is not None:
        raise ClusterError(error)
    return str(address)


@contextlib.contextmanager
def _tried(
    session: ControlClient, environ: Mapping[str, str], announce: Callable[[str], None]
) -> Iterator[tuple[str, str | None]]:
    """The address while the chief listens there, and why it cannot."""
    host = host_of(session.group.coordinator)
    address = join_address(host, _fixed_port(environ) or _free_port(host))
    try:
        listener = open_listener(address, None, announce)
    except ClusterError as error:
        yield address, f"{session.peers[0]}: JAX's service ({JAX_PORT}): {error}"
    else:
        with listener:
            yield address, None


def _fixed_port(environ: Mapping[str, str]) -> int | None:
    own = EnvReader("Lockstep", environ, "Set it to a free port, or leave it out.")
    return own.whole(JAX_PORT, "the port of JAX's service", least=1, most=65535) if JAX_PORT in environ else None


def _free_port(host: str) -> int:
    with socket.create_server(("127.0.0.1" if is_loopback(host) else "", 0)) as free:
        return int(free.getsockname()[1])


def _reached(address: str) -> str | None:
    """Why it cannot be reached from here."""
    try:
        socket.create_connection(split_address("the address of JAX's service", address), _REACH_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _unreached(address: str, peer: object, reason: str) -> str:
    return (
        f"{peer} does not reach port {split_address('JAX', address)[1]} of worker 0, where JAX's service will be, at {address}: {reason}. "
        f"Open a port for it between the machines, and set {JAX_PORT} to it on worker 0."
    )
