"""Network addresses ``host:port``, with an IPv6 host in brackets."""

import re

from lockstep._errors import ClusterError

__all__ = ["host_of", "is_loopback", "join_address", "split_address"]

_ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?)\]|(?P<host>[^\s:/\[\],]+)):(?P<port>\d+)"
)
_LARGEST_PORT = 65535


def split_address(where: str, address: object) -> tuple[str, int]:
    """Return the host, without brackets, and the port of an address.

    Args:
        where: the argument or variable that has the address, for the error.
        address: ``"host:port"`` or ``"[IPv6]:port"``.

    Raises:
        ClusterError: it is no address, or the port is not 1 to 65535.
    """
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 0 < int(match["port"]) <= _LARGEST_PORT:
        raise ClusterError(
            f"{where}: expected an address such as 'worker-0:12421' or '[fd00::7]:12421', with a port of 1 to "
            f"{_LARGEST_PORT}, got {address!r}."
        )
    return match["six"] or match["host"], int(match["port"])


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Return the host of a valid address."""
    return split_address("address", address)[0]


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback name or address, which another machine cannot reach."""
    return host.lower() in ("localhost", "::1") or host.lower().endswith(".localhost") or host.startswith("127.")
