"""The variables that torchrun sets for each process, and those with which Kubeflow configures torchrun."""

from collections.abc import Mapping

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.cluster.membership import Membership, membership_of
from lockstep.distributed.cluster.ports import DEFAULT_PORT, coordinator_at, port_of_job
from lockstep.distributed.cluster.worker_group import WorkerGroup, check_reachable
from lockstep.distributed.resolvers.base import EnvironmentResolver

__all__ = ["TorchrunClusterResolver"]

_OF_PROCESS = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


class TorchrunClusterResolver(EnvironmentResolver):
    """Processes that torchrun, a Kubeflow ``PyTorchJob`` or Ray's ``TorchTrainer`` started.

    Reads ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``, and ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` where they
    are. Where they are not, but Kubeflow has set ``PET_NNODES``, ``PET_NODE_RANK``, ``PET_MASTER_ADDR``,
    ``PET_MASTER_PORT`` for a torchrun that nobody has started, this process is the only one of its machine.

    The store of PyTorch listens on ``MASTER_PORT``, in torchrun itself or in worker 0. So the port is another one, which is
    computed from it (``lockstep.distributed.cluster.ports``).

    Args:
        environ: has these variables.

    Raises:
        ClusterError: one is missing, has a value that it cannot have, or contradicts another.

    Example:
        >>> from lockstep.cluster_resolver import TorchrunClusterResolver
        >>> environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
        >>> TorchrunClusterResolver(environ)
        <TorchrunClusterResolver: worker 1 of 2, worker 0 at a:29632, from torchrun>
    """

    source = "torchrun"
    variables = (
        *(*_OF_PROCESS, "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NPROC_PER_NODE"),
    )
    cure = "Start the script with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process."

    @classmethod
    def is_present(cls, environ: Mapping[str, str]) -> bool:
        """True where two of ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` are set, as one alone may mean anything."""
        return "PET_NNODES" in environ or sum(name in environ for name in _OF_PROCESS) >= 2

    def _read(self, variables: EnvReader) -> Membership:
        is_configured_only = "PET_NNODES" in variables.environ and "WORLD_SIZE" not in variables.environ
        return membership_of(_of_machine(variables) if is_configured_only else _of_process(variables))


def _of_process(variables: EnvReader) -> WorkerGroup:
    index, workers = variables.index_and_count("RANK", "WORLD_SIZE")
    is_known = "LOCAL_WORLD_SIZE" in variables.environ
    local = variables.index_and_count("LOCAL_RANK", "LOCAL_WORLD_SIZE", "processes here") if is_known else (0, 1)
    coordinator = _coordinator(variables, "MASTER_ADDR", "MASTER_PORT", workers)
    group = WorkerGroup(
        workers, index, coordinator, local_index=local[0], local_workers=local[1], source=variables.source
    )
    if is_known and group.local_workers < group.workers:
        check_reachable(group)
    return group


def _of_machine(variables: EnvReader) -> WorkerGroup:
    """Nobody has started torchrun, so that its machine has one process."""
    nodes = variables.text("PET_NNODES", "the number of machines")
    if ":" in nodes:
        raise ClusterError(
            f"{variables.source}: PET_NNODES is {nodes!r}, a range that torchrun decides on: expected one number. Start the "
            "script with torchrun, or fix the number of machines."
        )
    index, workers = variables.index_and_count("PET_NODE_RANK", "PET_NNODES", "machines")
    per_machine = variables.environ.get("PET_NPROC_PER_NODE", "1")
    note = (
        f"{variables.source}: PET_NPROC_PER_NODE is {per_machine}, but nothing has started more than this process here: it "
        "uses all devices of its machine. Start the script with torchrun, or lockstep run, for one process a device."
    )
    notes = (note,) if per_machine.isdecimal() and int(per_machine) > 1 else ()
    coordinator = _coordinator(variables, "PET_MASTER_ADDR", "PET_MASTER_PORT", workers)
    group = WorkerGroup(workers, index, coordinator, source=variables.source, notes=notes)
    if workers > 1:
        check_reachable(group)
    return group


def _coordinator(variables: EnvReader, address: str, port: str, workers: int) -> str:
    """Where worker 0 is reached; a process that trains alone needs no address."""

    def find() -> tuple[str, int]:
        if workers == 1 and address not in variables.environ:
            return "127.0.0.1", DEFAULT_PORT
        taken = variables.whole(port, "the port of PyTorch's store", least=1, most=65535)
        own = port_of_job(taken)
        return variables.text(address, "the host of worker 0"), own + (own == taken)

    return coordinator_at(variables.environ, find)
