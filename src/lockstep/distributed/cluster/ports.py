"""Port and address of worker 0, and the two environment variables with which a user sets them.

=====================  ============================================================================================
port                   used by
=====================  ============================================================================================
as written             ``TF_CONFIG``, ``SimpleClusterResolver``, ``JAX_COORDINATOR_ADDRESS``
``DEFAULT_PORT``       if each process has a host of its own: Kubernetes
``JOB_PORTS``          if jobs may share a host: Slurm, torchrun, Open MPI, Ray Train; 16 ports a job
=====================  ============================================================================================

All are below the range from which Linux takes ports for outgoing connections (32768 and up), any of which could be in use.
"""

from collections.abc import Callable, Mapping
from zlib import crc32

from lockstep.distributed.cluster.addresses import join_address, split_address
from lockstep.distributed.cluster.env_reader import EnvReader

__all__ = [
    "COORDINATOR",
    "DEFAULT_PORT",
    "JOB_PORTS",
    "PORT",
    "chosen_coordinator",
    "port_of_job",
    "resolve_coordinator",
]

DEFAULT_PORT = 12421
JOB_PORTS = range(16384, 32768)
COORDINATOR = "LOCKSTEP_COORDINATOR"  # host:port of worker 0, instead of the scheduler's
PORT = "LOCKSTEP_PORT"  # its port only
_PORTS_PER_JOB = 16


def port_of_job(job: int | str) -> int:
    """Return the first port of a job: the same in all its processes, and another one for other recent jobs.

    Args:
        job: its number if the scheduler counts jobs; 1024 consecutive jobs have different ports. Else its name.

    Example:
        >>> from lockstep.distributed.cluster.ports import port_of_job
        >>> port_of_job(41), port_of_job(42)
        (17040, 17056)
    """
    number = job if isinstance(job, int) else crc32(job.encode())
    return JOB_PORTS[number * _PORTS_PER_JOB % len(JOB_PORTS)]


def chosen_coordinator(environ: Mapping[str, str]) -> str | None:
    """Return the address that the user has set for worker 0, if any."""
    address = environ.get(COORDINATOR)
    if address is not None:
        split_address(COORDINATOR, address)
    return address


def chosen_port(environ: Mapping[str, str], port: int) -> int:
    """Return the port that the user has set for worker 0, else ``port``."""
    own = EnvReader("Lockstep", environ, "Set it to a free port, or leave it out.")
    return own.integer(PORT, "the port of worker 0", least=1, most=65535) if PORT in environ else port


def resolve_coordinator(environ: Mapping[str, str], find: Callable[[], tuple[str, int]]) -> str:
    """Return ``host:port`` of worker 0: as the user has set it, else from the scheduler.

    Args:
        environ: may have ``LOCKSTEP_COORDINATOR`` or ``LOCKSTEP_PORT``.
        find: returns the scheduler's host and port; not called if the user has set both.

    Raises:
        ClusterError: the user has set no valid address or port.
    """
    chosen = chosen_coordinator(environ)
    if chosen is not None:
        return chosen
    host, port = find()
    return join_address(host, chosen_port(environ, port))
