"""The variables that ``srun`` sets for each task of a step."""

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import TypeVar

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.addresses import join_address, split_address
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.cluster.membership import Membership, membership_of
from lockstep.distributed.cluster.ports import DEFAULT_PORT, coordinator_at, port_of_job
from lockstep.distributed.cluster.worker_group import WorkerGroup
from lockstep.distributed.resolvers.base import EnvironmentResolver
from lockstep.distributed.resolvers.slurm_hostlist import expand_counts, expand_node_list

__all__ = ["SlurmClusterResolver"]

_TASKS = "SLURM_STEP_NUM_TASKS"
_NODES = "SLURM_STEP_NODELIST"
_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_GIVEN = (("SLURM_NTASKS", "tasks"), ("SLURM_JOB_NUM_NODES", "nodes"))  # to the job, not to this process
_SPECIAL_STEPS = 0xFFFFFFF0  # From here on numbers of steps mean the batch script, the interactive shell and the like.
_STEPS_APART = 521  # So that the ports of a step are not those of the next job's first one.
Value = TypeVar("Value")
Place = tuple[int, int]  # number of the node in the step, number of the task on the node


class SlurmClusterResolver(EnvironmentResolver):
    """The tasks of a Slurm step: ``srun python train.py``.

    Counterpart of ``tf.distribute.cluster_resolver.SlurmClusterResolver``. What counts is the step, not the allocation: in a
    batch script or an interactive shell without ``srun`` there is one process, however many tasks were asked for, and a
    note says so. The port of worker 0 is computed from the numbers of job and step (``lockstep.distributed.cluster.ports``).

    Args:
        environ: has the variables ``SLURM_*``.

    Raises:
        ClusterError: one is missing, has a value that it cannot have, or contradicts another.

    Example:
        >>> from lockstep.cluster_resolver import SlurmClusterResolver
        >>> environ = {"SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}
        >>> environ |= {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
        >>> environ |= {"SLURM_PROCID": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
        >>> SlurmClusterResolver(environ)
        <SlurmClusterResolver: worker 2 of 3 (n2:17040), worker 0 at n1:17040, from Slurm>
    """

    source = "Slurm"
    variables = (
        *("SLURM_JOB_ID", "SLURM_STEP_ID", _TASKS, _NODES, _PER_NODE, "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"),
        *("SLURM_DISTRIBUTION", *(name for name, _ in _GIVEN)),
    )
    cure = "Start the script with srun, which sets the variables of its tasks."

    @classmethod
    def is_present(cls, environ: Mapping[str, str]) -> bool:
        """True in any job, also where this process is none of its tasks."""
        return "SLURM_JOB_ID" in environ

    def _read(self, variables: EnvReader) -> Membership:
        step = variables.environ.get("SLURM_STEP_ID", "0")
        is_task = _TASKS in variables.environ and not (step.isdecimal() and int(step) >= _SPECIAL_STEPS)
        return membership_of(_task_of_step(variables) if is_task else _alone(variables))


def _alone(variables: EnvReader) -> WorkerGroup:
    environ = variables.environ
    given = [f"{environ[name]} {what}" for name, what in _GIVEN if environ.get(name, "1") != "1"]
    note = (
        f"{variables.source}: the job has {' and '.join(given)}, but this process is none of its tasks, as srun did not start "
        "it, and trains alone. Start the script with srun to train on all."
    )
    coordinator = coordinator_at(environ, lambda: ("127.0.0.1", DEFAULT_PORT))
    return WorkerGroup(1, 0, coordinator, source=variables.source, notes=(note,) if given else ())


def _task_of_step(variables: EnvReader) -> WorkerGroup:
    index, workers = variables.index_and_count("SLURM_PROCID", _TASKS, "tasks")
    hosts = _expanded(variables, _NODES, "the nodes of the step", expand_node_list)
    tasks = _expanded(variables, _PER_NODE, "the number of tasks on each node", expand_counts)
    if len(hosts) != len(tasks) or sum(tasks) != workers:
        raise ClusterError(
            f"{variables.source}: {_TASKS} is {workers}, but {_PER_NODE} has {sum(tasks)} tasks on {len(tasks)} nodes and "
            f"{_NODES} has {len(hosts)} nodes: expected the same numbers. {variables.cure}"
        )
    node = variables.whole("SLURM_NODEID", "the number of this node", most=len(hosts) - 1)
    local = variables.whole("SLURM_LOCALID", "the number of this task on its node", most=tasks[node] - 1)
    coordinator = coordinator_at(variables.environ, lambda: _found(variables, hosts, index, node))
    _, port = split_address("worker 0", coordinator)
    addresses = _addresses(variables, hosts, tasks, port, index, (node, local))
    return WorkerGroup(
        workers=workers,
        index=index,
        coordinator=coordinator,
        addresses=None if addresses is None else (coordinator, *addresses[1:]),
        local_index=local,
        local_workers=tasks[node],
        source=variables.source,
    )


def _expanded(
    variables: EnvReader, name: str, meaning: str, expand: Callable[[str], tuple[Value, ...]]
) -> tuple[Value, ...]:
    try:
        return expand(variables.text(name, meaning))
    except ClusterError as error:
        raise ClusterError(f"{variables.source}: {name}, {meaning}: {error}") from None


def _found(variables: EnvReader, hosts: tuple[str, ...], index: int, node: int) -> tuple[str, int]:
    """Host and port of worker 0, who is on the first node unless the tasks were distributed by hand."""
    if index == 0 and node != 0:
        raise ClusterError(
            f"{variables.source}: task 0 runs on {hosts[node]}, but the others look for it on {hosts[0]}, the first node of "
            f"the step. Distribute tasks by block or cyclic, or set LOCKSTEP_COORDINATOR={hosts[node]}:PORT for all."
        )
    job = variables.whole("SLURM_JOB_ID", "the number of the job")
    step = variables.whole("SLURM_STEP_ID", "the number of the step") if "SLURM_STEP_ID" in variables.environ else 0
    return hosts[0], port_of_job(job + _STEPS_APART * step)


def _addresses(
    variables: EnvReader, hosts: tuple[str, ...], tasks: tuple[int, ...], port: int, index: int, own: Place
) -> tuple[str, ...] | None:
    """Addresses of all tasks, by number; None where it is not known which task is on which node."""
    ways = {"block": _by_block, "*": _by_block, "cyclic": _in_turn}
    way = variables.environ.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0]
    places = ways[way](tasks) if way in ways else None
    if places is None or places[index] != own:
        return None
    return tuple(join_address(hosts[node], port + local) for node, local in places)


def _by_block(tasks: tuple[int, ...]) -> list[Place]:
    """One node is filled after the other."""
    return [(node, local) for node, count in enumerate(tasks) for local in range(count)]


def _in_turn(tasks: tuple[int, ...]) -> list[Place]:
    """The nodes take turns until each is full."""
    rounds = zip_longest(*([(node, local) for local in range(count)] for node, count in enumerate(tasks)))
    return [place for turn in rounds for place in turn if place is not None]
