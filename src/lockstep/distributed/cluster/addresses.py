"""Addresses of processes, and the port of worker 0 with the variables that set it.

=====================  ============================================================================================
port                   used by
=====================  ============================================================================================
as written             ``TF_CONFIG``, ``SimpleClusterResolver``, ``JAX_COORDINATOR_ADDRESS``
``DEFAULT_PORT``       if each process has a host of its own: Kubernetes, LeaderWorkerSet, TPU pods
``JOB_PORTS``          if jobs may share a host: Slurm, torchrun, Open MPI, Ray Train; 16 ports a job
=====================  ============================================================================================

All are below the range from which Linux takes ports for outgoing connections (32768 and up), any of which could be in use.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from zlib import crc32

from lockstep._errors import ClusterError, shown
from lockstep.distributed.cluster.env_reader import EnvReader

_ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?)\]|(?P<host>[^\s:/\[\],]+)):(?P<port>\d{1,9})"
)
MAX_PORT = 65535
_MAX_LABEL = 63


def split_address(where: str, address: object) -> tuple[str, int]:
    """Return the host, without brackets, and the port of an address, ``"host:port"`` or ``"[IPv6]:port"``.

    Raises:
        ClusterError: it is no address, or the port is not 1 to 65535.
    """
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 0 < int(match["port"]) <= MAX_PORT or not _has_labels(match["host"]):
        raise ClusterError(
            f"{where}: expected an address such as 'worker-0:12421' or '[fd00::7]:12421', with a port of 1 to "
            f"{MAX_PORT}, got {shown(address)}. Fix: write it as host:port."
        )
    return match["six"] or match["host"], int(match["port"])


def _has_labels(host: str | None) -> bool:
    """Return whether the parts between the dots of a host name have the lengths that DNS allows; no lookup accepts others."""
    return host is None or all(1 <= len(label) <= _MAX_LABEL for label in host.removesuffix(".").split("."))


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Return the host of a valid address."""
    return split_address("address", address)[0]


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback name or address, which another machine cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


def unmapped(ip_address: str) -> str:
    """Return an IP address; an IPv4 address that a dual-stack socket shows as IPv6 is returned as IPv4."""
    address = ipaddress.ip_address(ip_address)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return ip_address if mapped is None else str(mapped)


DEFAULT_PORT = 12421
JOB_PORTS = range(16384, 32768)
COORDINATOR = "LOCKSTEP_COORDINATOR"  # host:port of worker 0, instead of the scheduler's
PORT = "LOCKSTEP_PORT"  # its port only
_PORTS_PER_JOB = 16
# In all pods of a namespace with a Service "lockstep", Kubernetes sets LOCKSTEP_PORT to the URL of that Service.
_SERVICE_URLS = ("tcp://", "udp://", "sctp://")


def port_of_job(job: int | str) -> int:
    """Return the first port of a job: the same in all its processes, and another one for other recent jobs.

    Args:
        job: its number if the scheduler counts jobs; 1024 consecutive jobs have different ports. Else its name.

    Example:
        >>> from lockstep.distributed.cluster.addresses import port_of_job
        >>> port_of_job(41), port_of_job(42)
        (17040, 17056)
    """
    number = job if isinstance(job, int) else crc32(job.encode())
    return JOB_PORTS[number * _PORTS_PER_JOB % len(JOB_PORTS)]


def chosen_port(environ: Mapping[str, str], name: str = PORT, meaning: str = "the port of worker 0") -> int | None:
    """Return the port that the user has set in a variable, if any."""
    if name not in environ or environ[name].startswith(_SERVICE_URLS):
        return None
    own = EnvReader("Lockstep", environ, "set it to a free port, or leave it out.")
    return own.integer(name, meaning, minimum=1, maximum=MAX_PORT)


def resolve_coordinator(environ: Mapping[str, str], find: Callable[[], tuple[str, int]]) -> str:
    """Return ``host:port`` of worker 0: as the user has set it, else from the scheduler.

    Args:
        environ: may have ``LOCKSTEP_COORDINATOR`` or ``LOCKSTEP_PORT``.
        find: returns the scheduler's host and port; not called if the user has set ``LOCKSTEP_COORDINATOR``.

    Raises:
        ClusterError: the user has set no valid address or port.
    """
    chosen = environ.get(COORDINATOR)
    if chosen is not None:
        split_address(COORDINATOR, chosen)
        return chosen
    host, port = find()
    return join_address(host, chosen_port(environ) or port)
