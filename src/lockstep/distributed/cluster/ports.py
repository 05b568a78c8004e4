"""Where worker 0 is reached: the ports, all of them, and the two variables with which a user fixes them.

=====================  ============================================================================================
port                   used by
=====================  ============================================================================================
as written             ``TF_CONFIG``, ``SimpleClusterResolver``, ``JAX_COORDINATOR_ADDRESS``
``DEFAULT_PORT``       where each process has a host of its own: Kubernetes
``JOB_PORTS``          where jobs may share a host: Slurm, torchrun, Open MPI, Ray Train; 16 ports a job
=====================  ============================================================================================

All lie below the range from which Linux takes ports for outgoing connections (32768 and up), where any of them could be in
use by chance.
"""

from collections.abc import Callable, Mapping
from zlib import crc32

from lockstep.distributed.cluster.addresses import join_address, split_address
from lockstep.distributed.cluster.env_reader import EnvReader

__all__ = ["COORDINATOR", "DEFAULT_PORT", "JOB_PORTS", "PORT", "chosen_coordinator", "coordinator_at", "port_of_job"]

DEFAULT_PORT = 12421
JOB_PORTS = range(16384, 32768)
COORDINATOR = "LOCKSTEP_COORDINATOR"  # host:port of worker 0, whatever the scheduler says
PORT = "LOCKSTEP_PORT"  # its port only
_PORTS_PER_JOB = 16


def port_of_job(job: int | str) -> int:
    """The first port of a job: the same in all its processes, and another one for other jobs that run about now.

    Args:
        job: its number, where the scheduler counts; 1024 that follow each other have different ports. Else its name.

    Example:
        >>> from lockstep.distributed.cluster.ports import port_of_job
        >>> port_of_job(41), port_of_job(42)
        (17040, 17056)
    """
    number = job if isinstance(job, int) else crc32(job.encode())
    return JOB_PORTS[number * _PORTS_PER_JOB % len(JOB_PORTS)]


def chosen_coordinator(environ: Mapping[str, str]) -> str | None:
    """The address that the user has fixed for worker 0, if so."""
    address = environ.get(COORDINATOR)
    if address is not None:
        split_address(COORDINATOR, address)
    return address


def chosen_port(environ: Mapping[str, str], port: int) -> int:
    """The port that the user has fixed for worker 0, else ``port``."""
    own = EnvReader("Lockstep", environ, "Set it to a free port, or leave it out.")
    return own.whole(PORT, "the port of worker 0", least=1, most=65535) if PORT in environ else port


def coordinator_at(environ: Mapping[str, str], find: Callable[[], tuple[str, int]]) -> str:
    """``host:port`` of worker 0: what the user has fixed, else what the scheduler says.

    Args:
        environ: has ``LOCKSTEP_COORDINATOR`` or ``LOCKSTEP_PORT``, maybe.
        find: says host and port; not asked where the user has fixed both.

    Raises:
        ClusterError: what the user has fixed is no address or no port.
    """
    chosen = chosen_coordinator(environ)
    if chosen is not None:
        return chosen
    host, port = find()
    return join_address(host, chosen_port(environ, port))
