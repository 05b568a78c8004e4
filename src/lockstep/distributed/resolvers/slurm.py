"""Cluster resolver for Slurm: the variables that ``srun`` sets for each task of a step, and Slurm's node lists."""

import re
from collections.abc import Callable, Mapping
from itertools import product, zip_longest
from math import prod
from typing import TypeVar

from lockstep._errors import ClusterError, is_decimal
from lockstep.distributed.cluster.addresses import (
    DEFAULT_PORT,
    join_address,
    port_of_job,
    resolve_coordinator,
    split_address,
)
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.cluster.membership import Membership, WorkerGroup, membership_of_group
from lockstep.distributed.resolvers.base import EnvironmentResolver

_TASKS = "SLURM_STEP_NUM_TASKS"
_NODES = "SLURM_STEP_NODELIST"
_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_ALLOCATED = (("SLURM_NTASKS", "tasks"), ("SLURM_JOB_NUM_NODES", "nodes"))  # Of the job, not of this process.
_SPECIAL_STEPS = 0xFFFFFFF0  # Larger numbers of steps mean the batch script, the interactive shell and so on.
_STEPS_APART = 521  # So that a step has other ports than the first step of the next job.
_NODE = re.compile(r"(?:[^\s,\[\]]|\[[^\s\[\]]+\])+")
_LIST = re.compile(rf"{_NODE.pattern}(?:,{_NODE.pattern})*")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_COUNT = re.compile(r"(\d{1,18})(?:\(x(\d{1,18})\))?", re.ASCII)
_FIX = "start the script with srun, which sets the variables of its tasks."
_MAX_HOSTS = 65536  # Slurm's own limit for a range.
Value = TypeVar("Value")
Place = tuple[int, int]  # Number of the node in the step, number of the task on the node.


class SlurmClusterResolver(EnvironmentResolver):
    """The tasks of a Slurm step: ``srun python train.py``.

    Counterpart of ``tf.distribute.cluster_resolver.SlurmClusterResolver``. The step counts, not the allocation: in a
    batch script or an interactive shell without ``srun`` there is one process, for any number of allocated tasks, and a
    note says so. The port of worker 0 is computed from the numbers of job and step (``lockstep.distributed.cluster.addresses``).

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
        *("SLURM_DISTRIBUTION", *(name for name, _ in _ALLOCATED)),
    )
    hint_variables = (
        ("SLURM_PROCID", None),
        (_TASKS, "1"),
        ("SLURM_NODEID", None),
        *((name, "1") for name, _ in _ALLOCATED),
    )
    fix = _FIX

    @classmethod
    def is_present(cls, environ: Mapping[str, str]) -> bool:
        """True in any job, also if this process is none of its tasks."""
        return "SLURM_JOB_ID" in environ

    def _read(self, variables: EnvReader) -> Membership:
        step = variables.environ.get("SLURM_STEP_ID", "0")
        # If it is numbered, the step has other tasks.
        is_numbered = variables.environ.get("SLURM_PROCID", "0").strip() not in ("", "0")
        is_special = is_decimal(step) and int(step) >= _SPECIAL_STEPS
        is_task = (_TASKS in variables.environ or is_numbered) and not is_special
        return membership_of_group(_task_of_step(variables) if is_task else _single_process(variables))


def _single_process(variables: EnvReader) -> WorkerGroup:
    environ = variables.environ
    allocated = [f"{environ[name]} {what}" for name, what in _ALLOCATED if environ.get(name, "1") != "1"]
    note = (
        f"{variables.source}: the job has {' and '.join(allocated)}, but this process is none of its tasks, as srun did not start "
        "it, and trains alone. Fix: start the script with srun to train on all."
    )
    coordinator = resolve_coordinator(environ, lambda: ("127.0.0.1", DEFAULT_PORT))
    return WorkerGroup(1, 0, coordinator, source=variables.source, notes=(note,) if allocated else ())


def _task_of_step(variables: EnvReader) -> WorkerGroup:
    index, workers = variables.index_and_count("SLURM_PROCID", _TASKS, "tasks")
    hosts = _expanded(variables, _NODES, "the nodes of the step", expand_node_list)
    tasks = _expanded(variables, _PER_NODE, "the number of tasks on each node", expand_counts)
    if len(hosts) != len(tasks) or sum(tasks) != workers:
        raise ClusterError(
            f"{variables.source}: {_TASKS} is {workers}, but {_PER_NODE} has {sum(tasks)} tasks on {len(tasks)} nodes and "
            f"{_NODES} has {len(hosts)} nodes: expected the same numbers. Fix: {variables.fix}"
        )
    node = variables.integer("SLURM_NODEID", "the number of this node", maximum=len(hosts) - 1)
    local = variables.integer("SLURM_LOCALID", "the number of this task on its node", maximum=tasks[node] - 1)
    coordinator = resolve_coordinator(variables.environ, lambda: _find_coordinator(variables, hosts, index, node))
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
    text = variables.text(name, meaning)
    try:
        return expand(text)
    except ClusterError as error:
        raise ClusterError(f"{variables.source}: {name}, {meaning}: {error}") from None


def _find_coordinator(variables: EnvReader, hosts: tuple[str, ...], index: int, node: int) -> tuple[str, int]:
    """Return host and port of worker 0, which is on the first node unless the tasks were distributed by hand."""
    if index == 0 and node != 0:
        raise ClusterError(
            f"{variables.source}: task 0 runs on {hosts[node]}, but the others look for it on {hosts[0]}, the first node of "
            f"the step. Fix: distribute tasks by block or cyclic, or set LOCKSTEP_COORDINATOR={hosts[node]}:PORT for all."
        )
    job = variables.integer("SLURM_JOB_ID", "the number of the job")
    step = variables.integer("SLURM_STEP_ID", "the number of the step") if "SLURM_STEP_ID" in variables.environ else 0
    return hosts[0], port_of_job(job + _STEPS_APART * step)


def _addresses(
    variables: EnvReader, hosts: tuple[str, ...], tasks: tuple[int, ...], port: int, index: int, own: Place
) -> tuple[str, ...] | None:
    """Return the addresses of all tasks, by number; None if it is not known which task is on which node."""
    layouts = {"block": _by_block, "*": _by_block, "cyclic": _cyclic}
    layout = variables.environ.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0]
    places = layouts[layout](tasks) if layout in layouts else None
    if places is None or places[index] != own:
        return None
    return tuple(join_address(hosts[node], port + local) for node, local in places)


def _by_block(tasks: tuple[int, ...]) -> list[Place]:
    """Return the places if one node is filled after the other."""
    return [(node, local) for node, count in enumerate(tasks) for local in range(count)]


def _cyclic(tasks: tuple[int, ...]) -> list[Place]:
    """Return the places if tasks go to the nodes in turn until each is full."""
    rounds = zip_longest(*([(node, local) for local in range(count)] for node, count in enumerate(tasks)))
    return [place for turn in rounds for place in turn if place is not None]


# Node lists such as n[1-3,07],login and counts such as 2(x3),1.


def expand_node_list(text: str) -> tuple[str, ...]:
    """Return the hosts of a node list, in its order: names with any number of ``[ranges]``, separated by commas.

    A range is a number, or two with a hyphen between them; its numbers are as wide as the first. If a name has
    several ranges, the last one changes fastest, then the first, the second and so on, as in ``scontrol show hostnames``;
    the numbers of nodes follow that order.

    Raises:
        ClusterError: it is no node list, or has more than 65536 hosts.

    Example:
        >>> from lockstep.distributed.resolvers.slurm import expand_node_list
        >>> expand_node_list("a[1-2,007],b,c[08-10]")
        ('a1', 'a2', 'a007', 'b', 'c08', 'c09', 'c10')
    """
    if not _LIST.fullmatch(text):
        raise ClusterError(f"expected a node list such as 'n[1-3,07],login', got {text!r}. Fix: {_FIX}")
    hosts: list[str] = []
    for node in _NODE.findall(text):
        pieces = re.findall(r"\[[^\]]+\]|[^\[]+", node)
        choices = [_expand_ranges(piece[1:-1], text) if piece.startswith("[") else [piece] for piece in pieces]
        _check_count(len(hosts) + prod(map(len, choices)), text)
        hosts += ["".join((*reversed(before), last)) for *before, last in product(*reversed(choices[:-1]), choices[-1])]
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the numbers in ``2(x3),1``: 2, 2, 2, 1.

    Raises:
        ClusterError: it is no such list.
    """
    matches = [_COUNT.fullmatch(piece) for piece in text.split(",")]
    found: list[int] = []
    for match in matches:
        if match is None:
            raise ClusterError(f"expected numbers such as '2(x3),1', got {text!r}. Fix: {_FIX}")
        repeated = int(match[2] or 1)
        _check_count(len(found) + repeated, text)
        found += [int(match[1])] * repeated
    return tuple(found)


def _expand_ranges(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for piece in ranges.split(","):
        match = _RANGE.fullmatch(piece)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or first > last:
            raise ClusterError(
                f"expected a range that rises, such as '1-3', got {piece!r} in the node list {text!r}. Fix: {_FIX}"
            )
        _check_count(len(found) + last - first + 1, text)
        found += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return found


def _check_count(count: int, text: str) -> None:
    if count > _MAX_HOSTS:
        raise ClusterError(f"expected at most {_MAX_HOSTS} nodes, got {count} or more in {text!r}. Fix: {_FIX}")
