"""Cluster resolver for torchrun's variables, and for those with which Kubeflow configures torchrun."""

from collections.abc import Mapping

from lockstep._errors import ClusterError, is_decimal
from lockstep.distributed.cluster.addresses import DEFAULT_PORT, port_of_job, resolve_coordinator
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.cluster.membership import Membership, WorkerGroup, check_reachable, membership_of_group
from lockstep.distributed.resolvers.base import EnvironmentResolver

_PROCESS_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


class TorchrunClusterResolver(EnvironmentResolver):
    """Processes that torchrun, a Kubeflow ``PyTorchJob`` or Ray's ``TorchTrainer`` started.

    Reads ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``, and ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` if they
    are set. If they are not, but Kubeflow has set ``PET_NNODES``, ``PET_NODE_RANK``, ``PET_MASTER_ADDR``,
    ``PET_MASTER_PORT`` for a torchrun that was not started, this process is the only one of its machine.

    The store of PyTorch listens on ``MASTER_PORT``, in torchrun itself or in worker 0. So Lockstep uses another port, which is
    computed from it (``lockstep.distributed.cluster.addresses``).

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
        *(*_PROCESS_VARIABLES, "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NPROC_PER_NODE"),
    )
    hint_variables = (
        *(("RANK", None), ("WORLD_SIZE", "1"), ("MASTER_ADDR", None)),
        *(("PET_NODE_RANK", None), ("PET_MASTER_ADDR", None)),
    )
    number_variables = ("RANK", "PET_NODE_RANK")
    fix = "start the script with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process, or none of them."

    @classmethod
    def is_present(cls, environ: Mapping[str, str]) -> bool:
        """True if two of ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` are set, as one alone may mean anything."""
        return "PET_NNODES" in environ or sum(name in environ for name in _PROCESS_VARIABLES) >= 2

    def _read(self, variables: EnvReader) -> Membership:
        is_configured_only = "PET_NNODES" in variables.environ and "WORLD_SIZE" not in variables.environ
        return membership_of_group(_group_of_machine(variables) if is_configured_only else _group_of_process(variables))


def _group_of_process(variables: EnvReader) -> WorkerGroup:
    index, workers = variables.index_and_count("RANK", "WORLD_SIZE")
    is_known = "LOCAL_WORLD_SIZE" in variables.environ
    local = variables.index_and_count("LOCAL_RANK", "LOCAL_WORLD_SIZE", "processes here") if is_known else (0, 1)
    coordinator = _find_coordinator(variables, "MASTER_ADDR", "MASTER_PORT", workers)
    group = WorkerGroup(
        workers, index, coordinator, local_index=local[0], local_workers=local[1], source=variables.source
    )
    if is_known and group.local_workers < group.workers:
        check_reachable(group)
    return group


def _group_of_machine(variables: EnvReader) -> WorkerGroup:
    """Return the group if torchrun was not started, so that each machine has one process."""
    nodes = variables.text("PET_NNODES", "the number of machines")
    if ":" in nodes:
        raise ClusterError(
            f"{variables.source}: PET_NNODES is {nodes!r}, a range that torchrun decides on: expected one number. Fix: start the "
            "script with torchrun, or fix the number of machines."
        )
    index, workers = variables.index_and_count("PET_NODE_RANK", "PET_NNODES", "machines")
    per_machine = variables.environ.get("PET_NPROC_PER_NODE", "1")
    note = (
        f"{variables.source}: PET_NPROC_PER_NODE is {per_machine}, but nothing has started more than this process here: it "
        "uses all devices of its machine. Fix: start the script with torchrun, or lockstep run, for one process a device."
    )
    notes = (note,) if is_decimal(per_machine) and int(per_machine) > 1 else ()
    coordinator = _find_coordinator(variables, "PET_MASTER_ADDR", "PET_MASTER_PORT", workers)
    group = WorkerGroup(workers, index, coordinator, source=variables.source, notes=notes)
    if workers > 1:
        check_reachable(group)
    return group


def _find_coordinator(variables: EnvReader, address: str, port: str, workers: int) -> str:
    """Return the address of worker 0; a process that trains alone needs none."""

    def find() -> tuple[str, int]:
        if workers == 1 and address not in variables.environ:
            return "127.0.0.1", DEFAULT_PORT
        taken = variables.integer(port, "the port of PyTorch's store", minimum=1, maximum=65535)
        own = port_of_job(taken)
        return variables.text(address, "the host of worker 0"), own + (own == taken)

    return resolve_coordinator(variables.environ, find)
