"""Cluster resolver for Open MPI: the variables that ``mpirun`` sets for each process."""

import re
from collections.abc import Mapping

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.addresses import COORDINATOR, DEFAULT_PORT, port_of_job, resolve_coordinator
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.cluster.membership import Membership, WorkerGroup, check_reachable, membership_of_group
from lockstep.distributed.resolvers.base import EnvironmentResolver

# Up to Open MPI 4, the address at which mpirun listens: 447676416.0;tcp://10.0.0.1,10.1.0.1:49085;tcp6://[fd00::1]:39533
_LAUNCHER = "OMPI_MCA_orte_hnp_uri"
_DAEMON = "OMPI_MCA_orte_local_daemon_uri"  # The same for the daemon of this machine, which is mpirun itself on mpirun's machine.
_NAMESPACE = "PMIX_NAMESPACE"  # Since Open MPI 5: prterun-HOST-29270@1.
_HOST = "PMIX_HOSTNAME"
_URI = re.compile(r"tcp://([^,:;]+)|tcp6://\[([^\],]+)")
_NAME = re.compile(r"prte(?:run)?-(.+)-\d+@\d+")


class OpenMpiClusterResolver(EnvironmentResolver):
    """Processes that Open MPI's ``mpirun`` started.

    Reads ``OMPI_COMM_WORLD_RANK``, ``…_SIZE``, ``…_LOCAL_RANK``, ``…_LOCAL_SIZE``. Open MPI does not provide the machine of
    worker 0, but that of ``mpirun``, which is usually the same; if it is not, worker 0 raises an error, and
    ``LOCKSTEP_COORDINATOR`` has to name it. Its port is computed from the name of the job (``lockstep.distributed.cluster.addresses``).

    Args:
        environ: has these variables.

    Raises:
        ClusterError: one is missing, has a value that it cannot have, or contradicts another.

    Example:
        >>> from lockstep.cluster_resolver import OpenMpiClusterResolver
        >>> environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "LOCKSTEP_COORDINATOR": "a:12421"}
        >>> environ |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
        >>> OpenMpiClusterResolver(environ)
        <OpenMpiClusterResolver: worker 1 of 2, worker 0 at a:12421, from Open MPI>
    """

    source = "Open MPI"
    variables = (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        *(_LAUNCHER, _DAEMON, _NAMESPACE, _HOST),
    )
    hint_variables = (("OMPI_COMM_WORLD_LOCAL_RANK", None), ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    fix = "start the script with mpirun, which sets it."

    @classmethod
    def is_present(cls, environ: Mapping[str, str]) -> bool:
        """True if ``mpirun`` numbered the process."""
        return "OMPI_COMM_WORLD_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ

    def _read(self, variables: EnvReader) -> Membership:
        index, workers = variables.index_and_count("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        local, here = variables.index_and_count(
            "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "processes here"
        )
        coordinator = resolve_coordinator(
            variables.environ, lambda: _find_coordinator(variables, index, here == workers)
        )
        group = WorkerGroup(workers, index, coordinator, None, local, here, self.source)
        if here < workers:
            check_reachable(group)
        return membership_of_group(group)


def _find_coordinator(variables: EnvReader, index: int, is_one_machine: bool) -> tuple[str, int]:
    """Return host and port of worker 0, on the machine of mpirun."""
    environ = variables.environ
    port = port_of_job(environ[_NAMESPACE]) if _NAMESPACE in environ else DEFAULT_PORT
    if is_one_machine:
        return "127.0.0.1", port
    host = _launcher_host(environ)
    if host is None:
        raise ClusterError(
            f"{variables.source}: the workers are on several machines, and neither {_LAUNCHER} nor {_NAMESPACE} says which. "
            f"Fix: start them with mpirun -x {COORDINATOR}=HOST:{port}, with the host of worker 0."
        )
    if index == 0 and not _is_at_launcher(environ, host):
        raise ClusterError(
            f"{variables.source}: the others look for worker 0 on {host}, where mpirun runs, but it runs on "
            f"{environ.get(_HOST, 'another machine')}. Fix: start mpirun on the machine of worker 0, or with "
            f"-x {COORDINATOR}=HOST:{port}."
        )
    return host, port


def _launcher_host(environ: Mapping[str, str]) -> str | None:
    uri = _URI.search(environ.get(_LAUNCHER, ""))
    name = _NAME.fullmatch(environ.get(_NAMESPACE, ""))
    if uri is not None:
        return uri[1] or uri[2]
    return name[1] if name is not None else None


def _is_at_launcher(environ: Mapping[str, str], host: str) -> bool:
    """Return whether this process is on mpirun's machine, as far as the variables say."""
    if _LAUNCHER in environ:
        return environ.get(_DAEMON, environ[_LAUNCHER]) == environ[_LAUNCHER]
    return environ.get(_HOST, host).split(".")[0] == host.split(".")[0]
