"""Ranks of the processes of a job on its nodes, and their names in messages, prefixes and log files."""

import contextlib
import errno
import itertools
import json
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep._errors import OptionError
from lockstep._logging import listed
from lockstep.distributed.cluster.addresses import COORDINATOR, split_address
from lockstep.distributed.cluster.env_reader import GENERATION, JOB_GENERATION
from lockstep.distributed.cluster.membership import SINGLE_JOBS
from lockstep.launch.launch_config import LaunchConfig

_PLURALS = {"worker": "workers"}
_FIRST_COLOURS = {"worker": 0, "ps": 2, "chief": 3, "evaluator": 5}


@dataclass(frozen=True)
class ProcessName:
    """One process of a job: a ``"chief"``, ``"worker"``, ``"ps"`` or ``"evaluator"``, as in ``TF_CONFIG``, and its number there, from 0.

    Example:
        >>> ProcessName("ps", 1).name, ProcessName("ps", 1).file_name, ProcessName("chief", 0).name
        ('ps 1', 'ps-1.log', 'chief')
    """

    job: str
    index: int

    @property
    def name(self) -> str:
        """Name in messages."""
        return self.job if self.job in SINGLE_JOBS else f"{self.job} {self.index}"

    @property
    def file_name(self) -> str:
        """Name of its log file."""
        return f"{self.name.replace(' ', '-')}.log"

    @property
    def colour(self) -> int:
        """Index of the colour of its prefix, modulo the number of colours; neighbours differ."""
        return _FIRST_COLOURS[self.job] + self.index


@dataclass(frozen=True)
class NodeProcesses:
    """The processes of this node in one generation, in the order of their start.

    The job can lose those that are ``expendable``. It is done when ``leader`` is; None: when all are.
    """

    all: Sequence[ProcessName]
    expendable: frozenset[ProcessName] = frozenset()
    leader: ProcessName | None = None

    @property
    def workers(self) -> list[ProcessName]:
        """The processes that compute and share the GPUs."""
        return [process for process in self.all if process.job == "worker"]


def format_counts(counts: Mapping[str, int]) -> str:
    """Format the number of processes of each kind for a sentence.

    Example:
        >>> format_counts({"worker": 1}), format_counts({"chief": 1, "worker": 2, "ps": 3})
        ('1 worker', '1 chief, 2 workers and 3 ps')
    """
    return listed(f"{count} {job if count == 1 else _PLURALS.get(job, job)}" for job, count in counts.items())


def format_names(processes: Iterable[ProcessName]) -> str:
    """Format several processes for a sentence.

    Example:
        >>> format_names([ProcessName("chief", 0), ProcessName("worker", 0), ProcessName("worker", 2)])
        'chief and workers 0, 2'
    """
    jobs: dict[str, list[ProcessName]] = {}
    for process in processes:
        jobs.setdefault(process.job, []).append(process)
    return listed(_format_job(job, members) for job, members in jobs.items())


def _format_job(job: str, processes: Sequence[ProcessName]) -> str:
    if len(processes) == 1:
        return processes[0].name
    return f"{_PLURALS.get(job, job)} {', '.join(str(process.index) for process in processes)}"


_LOOPBACK = "127.0.0.1"
_AT_LIMIT = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
_MAX_VARIABLE = 2**17  # bytes of NAME=value and a zero, in which Linux starts a process


@dataclass(frozen=True)
class RankAssignment:
    """Ranks and addresses of the workers of this node in one generation.

    Args:
        generation: how many times the workers were started before.
        node: rank of this node.
        nodes: number of nodes.
        workers: number of workers on this node.
        first: rank of the first of them.
        all_workers: number of workers on all nodes.
        coordinator: ``host:port`` of worker 0.
        addresses: addresses of all workers; None if they are not known.
        is_counted_here: whether this node counts its generations by itself, so that other nodes may be at another one.
    """

    generation: int
    node: int
    nodes: int
    workers: int
    first: int
    all_workers: int
    coordinator: str
    addresses: Sequence[str] | None
    is_counted_here: bool = False

    @property
    def processes(self) -> NodeProcesses:
        """The workers of this node; the job can lose none of them."""
        return NodeProcesses([ProcessName("worker", self.first + local) for local in range(self.workers)])

    def variables(self, local: int) -> Mapping[str, str]:
        """Return the environment variables of a worker, given its number on this node: those of torchrun, and ``TF_CONFIG`` or else the address
        of worker 0.

        ``TF_CONFIG`` has all addresses, if they are known and fit: those of some 3,700 workers may not.

        Example:
            >>> RankAssignment(0, 0, 1, 2, 0, 2, "h:1", ("h:1", "h:2")).variables(1)["TF_CONFIG"]
            '{"cluster": {"worker": ["h:1", "h:2"]}, "task": {"type": "worker", "index": 1}}'
        """
        rank = self.first + local
        host, port = split_address("coordinator", self.coordinator)
        variables = {
            "RANK": rank,
            "WORLD_SIZE": self.all_workers,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": self.workers,
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": self.nodes,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            GENERATION: self.generation,
            JOB_GENERATION: 0 if self.is_counted_here else self.generation,
        }
        task = {"type": "worker", "index": rank}
        config = json.dumps({"cluster": {"worker": list(self.addresses or ())}, "task": task})
        if self.addresses is None or len(f"TF_CONFIG={config}\0") > _MAX_VARIABLE:
            # Without it, MASTER_PORT would be taken for the port of torchrun itself.
            variables[COORDINATOR] = self.coordinator
        else:
            variables["TF_CONFIG"] = config
        return {name: str(value) for name, value in variables.items()}


@dataclass(frozen=True)
class ServerRankAssignment:
    """Addresses ``host:port`` of the processes of each kind in one generation of a job with variable servers; all are on this machine."""

    generation: int
    cluster: Mapping[str, Sequence[str]]

    @classmethod
    def at(cls, generation: int, processes: Mapping[str, int], addresses: Iterable[str]) -> "ServerRankAssignment":
        """Give each kind of process its number of addresses, in order."""
        rest = iter(addresses)
        return cls(generation, {job: list(itertools.islice(rest, count)) for job, count in processes.items()})

    @property
    def processes(self) -> NodeProcesses:
        """All processes; the job can lose workers, and is done when its chief is."""
        every = [ProcessName(job, index) for job, addresses in self.cluster.items() for index in range(len(addresses))]
        return NodeProcesses(every, frozenset(one for one in every if one.job == "worker"), ProcessName("chief", 0))

    def variables(self, local: int) -> Mapping[str, str]:
        """Return the environment variables of a process, given its index in ``processes``; those of torchrun are omitted, as they assume
        identical workers.

        Example:
            >>> ServerRankAssignment(0, {"chief": ["h:1"], "worker": ["h:2"], "ps": ["h:3"]}).variables(2)["TF_CONFIG"]
            '{"cluster": {"chief": ["h:1"], "worker": ["h:2"], "ps": ["h:3"]}, "task": {"type": "ps", "index": 0}}'
        """
        process = self.processes.all[local]
        config = {"cluster": self.cluster, "task": {"type": process.job, "index": process.index}}
        return {"TF_CONFIG": json.dumps(config), GENERATION: str(self.generation)}


AnyRankAssignment = RankAssignment | ServerRankAssignment


def cannot_start(what: str, error: OSError | RuntimeError) -> OptionError:
    """Return the error that the system does not let this process start ``what``; a RuntimeError is one about a thread."""
    is_at_limit = isinstance(error, RuntimeError) or error.errno in _AT_LIMIT
    fix = "check that this user may run it here"
    if is_at_limit:
        fix = "start fewer processes on this machine, or raise its limits of open files (ulimit -n) and of processes (ulimit -u)"
    return OptionError(f"{what} cannot be started: {error}. Fix: {fix}.")


def find_node_rank(job: LaunchConfig) -> int | None:
    """Return this node's rank from ``--node-rank`` or ``--hosts``; None if the rendezvous assigns it.

    Raises:
        OptionError: the options do not determine it.
    """
    if job.coordinator_address is None and (job.nodes > 1 or job.is_elastic):
        raise OptionError(
            f"--nnodes {job.nnodes}: the address of worker 0 is missing. Fix: give --coordinator HOST:PORT, or --hosts with all nodes."
        )
    if job.node_rank is not None:
        return job.node_rank
    if job.hosts is not None and job.nodes > 1:
        return _find_among_hosts(job)
    if job.nodes > 1 and not job.is_elastic:
        raise OptionError(
            f"--nnodes {job.nodes}: the rank of this node is missing. Fix: give --node-rank 0 to {job.nodes - 1}."
        )
    return None if job.is_elastic else 0


def _find_among_hosts(job: LaunchConfig) -> int:
    first_workers = (job.addresses or ())[:: job.workers]
    here = [rank for rank, address in enumerate(first_workers) if is_local_host(split_address("--hosts", address)[0])]
    if len(here) != 1:
        found = "none of the hosts is" if not here else f"{len(here)} of the hosts are"
        raise OptionError(
            f"--hosts: {found} this machine ({socket.gethostname()}). Fix: give its rank with --node-rank."
        )
    return here[0]


def is_local_host(host: str) -> bool:
    """Whether a host is this machine: only then can a socket be bound to its address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def reserved_addresses(count: int) -> Iterator[tuple[str, ...]]:
    """Reserve loopback addresses until the end of the block.

    The sockets stay bound, but do not listen: Linux then gives their ports only to a process that asks for them by number and
    with SO_REUSEADDR, as servers do. Other systems refuse that, so the ports are released at once there.

    Raises:
        OptionError: this process may not open so many sockets.
    """
    with contextlib.ExitStack() as held:
        try:
            sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        except OSError as error:
            raise cannot_start(f"{count} processes", error) from None
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((_LOOPBACK, 0))
        addresses = tuple(f"{_LOOPBACK}:{one.getsockname()[1]}" for one in sockets)
        if sys.platform != "linux":
            held.close()
        yield addresses
