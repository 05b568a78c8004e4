"""State machine of the rendezvous: admission, quorum, generations and the end of the job. No sockets; the clock is an argument."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep._errors import DONE, PEER_LOST, OptionError, whole_number
from lockstep._logging import counted, listed
from lockstep.distributed.cluster.addresses import MAX_PORT, join_address, split_address
from lockstep.distributed.control.admission import JoinRejection
from lockstep.distributed.control.failure_detector import SuspendDetector
from lockstep.distributed.control.handshake import Peer
from lockstep.distributed.control.value_differences import first_difference
from lockstep.launch.launch_config import MAX_WORKERS, LaunchConfig
from lockstep.launch.rank_assignment import RankAssignment
from lockstep.launch.restart_policy import backoff_seconds
from lockstep.launch.worker_process import USAGE


def identity_of(job: LaunchConfig) -> dict[str, Any]:
    """Return the options that must be the same on all nodes, for the handshake and for a message that names the option that differs."""
    names = ("max_restarts", "join_seconds", "start_seconds", "grace")
    options = {f"--{name.replace('_', '-')}": vars(job)[name] for name in names}
    return {"--nnodes": job.nnodes, "--hosts": list(job.hosts or ()), **options}


@dataclass(frozen=True)
class NodeInfo:
    """A supervisor that has joined the rendezvous.

    Args:
        process: its machine and process.
        rank: its node rank as given by the user; None: not given.
        workers: number of workers on it.
        host: where its workers are reached.
        port: their ports are those above it.
        is_server: whether it runs the rendezvous server.
    """

    process: str
    rank: int | None
    workers: int
    host: str
    port: int
    is_server: bool = False

    @classmethod
    def of(cls, peer: Peer, address: str, is_server: bool = False) -> "NodeInfo":
        """Return the description that a supervisor sent; ``address`` replaces its host if it sent none.

        Raises:
            OptionError: a number is invalid or out of its range.
            ClusterError: host and port are not a valid address.
        """
        fields = peer.information
        rank = None if fields["rank"] is None else whole_number("rank", fields["rank"], 0)
        workers = whole_number("workers", peer.workers, maximum=MAX_WORKERS)
        host, port = split_address(
            "address", join_address(str(fields["host"] or address), whole_number("port", fields["port"]))
        )
        return cls(peer.process, rank, workers, host, port, is_server)


@dataclass(frozen=True)
class GenerationOutcome:
    """How a generation has ended on one node.

    Args:
        code: the exit code of the job if this outcome is the cause of its end.
        sentence: for the user.
        is_consequence: whether another node is the cause.
        is_final: whether the job ends with it, regardless of the other nodes.
        leaves: whether the node leaves the job.
    """

    code: int
    sentence: str
    is_consequence: bool = False
    is_final: bool = False
    leaves: bool = False

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "GenerationOutcome":
        """Decode the result of ``asdict``; raise KeyError or ValueError if it is not one."""
        flags = (bool(message[name]) for name in ("is_consequence", "is_final", "leaves"))
        return cls(int(message["code"]), str(message["sentence"]), *flags)


SILENT_SECONDS = 60.0  # Without a message, after which a node is lost; each sends a heartbeat each second.
_NOTICE_SECONDS = 1.0  # For workers to detect and report the loss of another worker.
_END_SECONDS = 15.0  # For a supervisor, beyond the grace, to kill what is left and to report that all have exited.
Outbound = tuple[int, dict[str, Any]]  # the key of a node, and a message to it


@dataclass
class QuorumWait:
    """Wait for enough nodes before a generation, which does not start before ``not_before``."""

    job: LaunchConfig
    opened_at: float
    not_before: float
    _count: int = field(default=0, init=False)
    _quorum_since: float | None = field(default=None, init=False)

    def update(self, count: int, now: float) -> None:
        """Record that ``count`` nodes are connected now."""
        self._count = count
        if count < self.job.least_nodes:
            self._quorum_since = None
        elif self._quorum_since is None:
            self._quorum_since = now

    def is_ready(self, now: float) -> bool:
        """Whether the connected nodes start now."""
        if self._quorum_since is None or now < self.not_before:
            return False
        return self._count >= self.job.nodes or now >= self._quorum_since + self.job.join_seconds

    def has_timed_out(self, now: float) -> bool:
        """Whether the limit of the wait has passed without enough nodes."""
        return self._quorum_since is None and now >= self.opened_at + self.job.start_seconds

    def describe_missing(self, nodes: Collection[NodeInfo]) -> str:
        """Return the number and, if known, the names of the nodes that this waits for."""
        job = self.job
        more = (job.least_nodes if len(nodes) < job.least_nodes else job.nodes) - len(nodes)
        if more <= 0:
            return f"the end of the pause before the restart ({len(nodes)} of {job.nnodes} here)"
        names = _absent_hosts(job, nodes)
        which = f" of {listed(names)}" if names and len(names) > more else f", {listed(names)}" if names else ""
        number = counted(more, "more node")
        return f"{number}{which} ({len(nodes)} of {job.nnodes} here)"

    def describe_timeout(self, nodes: Collection[NodeInfo], lost: Mapping[str, str]) -> str:
        """Return the message that too few nodes have joined: which are here, which are absent, and which were lost."""
        job, absent = self.job, _absent_hosts(self.job, nodes)
        here = listed([node.process for node in nodes])
        losses = "".join(f" {name}: {why}." for name, why in lost.items())
        return (
            f"rendezvous: expected at least {job.least_nodes} nodes within {job.start_seconds:g} s, got {len(nodes)} ({here})"
            f"{f'; absent: {listed(absent)}' if absent else ''}.{losses} Fix: start the same command on each node, and check that "
            f"they can reach {job.coordinator_address}"
        )


def _absent_hosts(job: LaunchConfig, nodes: Collection[NodeInfo]) -> list[str]:
    """Hosts of ``--hosts`` that have not joined."""
    ranks = {node.rank for node in nodes}
    return [host for rank, host in enumerate(job.hosts or ()) if rank not in ranks]


@dataclass
class GenerationState:
    """Progress of one generation on its nodes. Times are of the caller's clock.

    Args:
        members: name of each node, by its key.
        grace: seconds that workers have to exit after SIGTERM.

    Attributes:
        outcomes: outcomes of the nodes on which it has ended.
        stop_sent: whether the remaining nodes were sent the request to stop.
    """

    members: Mapping[int, str]
    grace: float
    outcomes: dict[int, GenerationOutcome] = field(default_factory=dict, init=False)
    stop_sent: bool = field(default=False, init=False)
    _failed_at: float | None = field(default=None, init=False)

    @property
    def running(self) -> list[int]:
        """Keys of the nodes on which workers may still run."""
        return [key for key in self.members if key not in self.outcomes]

    @property
    def running_names(self) -> list[str]:
        """Names of the nodes on which workers may still run."""
        return [self.members[key] for key in self.running]

    def record(self, key: int, outcome: GenerationOutcome, now: float) -> None:
        """Record the outcome on one node."""
        self.outcomes[key] = outcome
        if outcome.code and self._failed_at is None:
            self._failed_at = now

    def cause(self) -> tuple[int, GenerationOutcome] | None:
        """Return the first failure that is not a consequence of another, with its node; None if all succeeded."""
        failed = [(key, outcome) for key, outcome in self.outcomes.items() if outcome.code]
        return min(failed, key=lambda item: item[1].is_consequence) if failed else None

    def reason(self) -> str:
        """Return the cause as a sentence; empty if there is none."""
        cause = self.cause()
        return f"{self.members[cause[0]]}: {cause[1].sentence}" if cause else ""

    def nodes_to_stop(self, now: float) -> list[int]:
        """Keys of the nodes that must now be sent the request to stop, because another one has failed."""
        if self._failed_at is None or self.stop_sent or now < self._failed_at + _NOTICE_SECONDS:
            return []
        return self.running

    def overdue(self, now: float) -> list[int]:
        """Keys of the nodes that were sent the request to stop and have not ended in time."""
        limit = _NOTICE_SECONDS + self.grace + _END_SECONDS
        return [] if self._failed_at is None or now < self._failed_at + limit else self.running


class RendezvousState:
    """The connected nodes, and the generation of node 0's job that they run or wait for.

    Attributes:
        nodes: all connected nodes, by a key that grows with each new node.
        is_over: whether the job has ended.
    """

    def __init__(self, job: LaunchConfig, clock: Callable[[], float]) -> None:
        self._job, self._clock = job, clock
        self.nodes: dict[int, NodeInfo] = {}
        self.is_over = False
        self._heard: dict[int, float] = {}  # Time of the last message of each node.
        self._suspends = SuspendDetector(clock)
        self._lost: dict[str, str] = {}
        self._number = -1
        self._generation: GenerationState | None = None  # None: the nodes wait for a quorum.
        self._quorum = QuorumWait(job, clock(), clock())

    def validate(self, peer: Peer) -> JoinRejection | None:
        """Return why a supervisor may not join; None if it may."""
        if self.is_over:  # It may be of the next job at this address.
            return JoinRejection("the job of node 0 is ending", again=True)
        if set(peer.information) != {"rank", "host", "port"}:
            return JoinRejection(
                f"{peer.process} is not a supervisor: this address is the rendezvous of lockstep run --nnodes MIN:MAX. Fix: start its "
                "script with the same lockstep run on that machine, or give another job its own port."
            )
        found = first_difference(peer.identity, identity_of(self._job))
        if found is not None:
            option, theirs, ours = found
            return JoinRejection(
                f"{peer.process} was started with {option} {theirs}, node 0 with {ours}. Fix: start all nodes with the same options."
            )
        twin = [node for node in self.nodes.values() if node.rank == peer.information["rank"] is not None]
        if twin:
            return JoinRejection(
                f"another node {twin[0].rank} has joined ({twin[0].process}): each needs its own --node-rank",
                again=True,
            )
        return None

    def add(self, key: int, node: NodeInfo) -> list[Outbound]:
        """Add a node that has joined."""
        self.nodes[key] = node
        self.hear(key)
        return self.advance()

    def hear(self, key: int) -> None:
        """Note that a node has sent something."""
        self._heard[key] = self._clock()

    def remove(self, key: int, why: str) -> list[Outbound]:
        """Remove a node whose connection was lost."""
        node = self.nodes.pop(key, None)
        if node is None or self.is_over:
            return []
        outcome, name = GenerationOutcome(PEER_LOST, f"lost, {why}"), node.process
        if self._generation is not None and key in self._generation.running:
            self._generation.record(key, outcome, self._clock())
            name = self._generation.members[key]
        self._lost[name] = outcome.sentence
        return self.advance()

    def record(self, key: int, outcome: GenerationOutcome) -> list[Outbound]:
        """Record how the generation has ended on a node."""
        if self._generation is None or key not in self._generation.running:
            return []
        name = self._generation.members[key]
        self._generation.record(key, outcome, self._clock())
        if outcome.leaves:
            del self.nodes[key]
            self._lost[name] = outcome.sentence
        if outcome.is_final:
            return list(self.finish(outcome.code, f"{name}: {outcome.sentence}", key))
        return self.advance()

    def advance(self) -> list[Outbound]:
        """Apply what is due by now, and return the messages to send; to be called periodically, too."""
        silent = [] if self.is_over else self._remove_silent()
        if self.is_over:
            return silent
        due = self._check_quorum() if self._generation is None else self._check_generation(self._generation)
        return [*silent, *due]

    def finish(self, code: int, sentence: str, cause: int | None = None) -> Iterator[Outbound]:
        """End the job; the node ``cause`` gets no sentence, as it has printed the reason itself."""
        self.is_over = True
        for key in self.nodes:
            yield key, {"kind": "end", "code": code, "sentence": "" if key == cause else sentence}

    def idle_nodes(self) -> list[int]:
        """Keys of the nodes on which no workers run."""
        return [key for key in self.nodes if self._generation is None or key not in self._generation.running]

    def describe_wait(self) -> str:
        """Return what the idle nodes wait for."""
        if self._generation is None:
            return self._quorum.describe_missing(self.nodes.values())
        return f"{listed(self._generation.running_names or ['no node'])} to end"

    def _remove_silent(self) -> list[Outbound]:
        """Remove a node that is stopped or cut off, unless this process was suspended itself and has not read its messages."""
        now = self._suspends.tick()
        for key, node in self.nodes.items():
            if not node.is_server and now - max(self._heard[key], self._suspends.since) > SILENT_SECONDS:
                sentence = f"this node sent nothing for {SILENT_SECONDS:g} s, and the job continues without it"
                end: Outbound = (key, {"kind": "end", "code": PEER_LOST, "sentence": sentence})
                return [end, *self.remove(key, f"it sent nothing for {SILENT_SECONDS:g} s (stopped, or cut off)")]
        return []

    def _check_quorum(self) -> Iterator[Outbound]:
        now = self._clock()
        self._quorum.update(len(self.nodes), now)
        if self._quorum.has_timed_out(now):
            yield from self.finish(PEER_LOST, self._quorum.describe_timeout(self.nodes.values(), self._lost))
        elif self._quorum.is_ready(now):
            yield from self._start_generation(order_by_rank(self.nodes, self._job.nodes))

    def _start_generation(self, keys: Iterable[int]) -> Iterator[Outbound]:
        chosen = [(key, self.nodes[key]) for key in keys]
        taken: set[str] = set()
        try:
            addresses = [_free_addresses(node, taken) for _, node in chosen]
        except OptionError as error:
            yield from self.finish(USAGE, str(error))
            return
        flat = tuple(address for node_addresses in addresses for address in node_addresses)
        self._number += 1
        self._lost.clear()
        self._generation = GenerationState(
            {key: f"node {rank} ({node.process})" for rank, (key, node) in enumerate(chosen)}, self._job.grace
        )
        for rank, (key, node) in enumerate(chosen):
            first = sum(map(len, addresses[:rank]))
            assignment = RankAssignment(self._number, rank, len(chosen), node.workers, first, len(flat), flat[0], flat)
            yield key, {"kind": "start", "assignment": asdict(assignment)}

    def _check_generation(self, generation: GenerationState) -> Iterator[Outbound]:
        now = self._clock()
        for key in generation.nodes_to_stop(now):
            generation.stop_sent = True
            yield key, {"kind": "stop_generation", "sentence": generation.reason()}
        for key in generation.overdue(now):
            generation.record(key, GenerationOutcome(PEER_LOST, "it did not end in time"), now)
            self._lost[generation.members[key]] = "it did not end in time"
            if self.nodes.pop(key, None):
                yield key, {"kind": "end", "code": PEER_LOST, "sentence": "this node did not end in time"}
        if not generation.running:
            yield from self._end_generation(generation)

    def _end_generation(self, generation: GenerationState) -> Iterator[Outbound]:
        cause = generation.cause()
        if cause is None:
            yield from self.finish(DONE, "")
        elif self._number == self._job.max_restarts:
            yield from self.finish(cause[1].code, generation.reason(), cause[0])
        else:
            restart, now = self._number + 1, self._clock()
            seconds = backoff_seconds(restart)
            self._generation, self._quorum = None, QuorumWait(self._job, now, now + seconds)
            sentence = f"restart {restart} of {self._job.max_restarts} in {seconds:g} s or later: {generation.reason()}"
            for key in self.nodes:
                yield key, {"kind": "generation_failed", "sentence": sentence}


def order_by_rank(nodes: Mapping[int, NodeInfo], most: int) -> Sequence[int]:
    """Return the keys of at most ``most`` nodes by rank: the server's first, then by the given ranks, then in order of arrival.

    Example:
        >>> a, b = NodeInfo("a", None, 1, "a", 1, is_server=True), NodeInfo("b", None, 1, "b", 1)
        >>> c = NodeInfo("c", 1, 1, "c", 1)
        >>> order_by_rank({5: b, 6: c, 7: a}, 3), order_by_rank({5: b, 6: c, 7: a}, 2)
        ([7, 6, 5], [7, 6])
    """

    def order(key: int) -> tuple[bool, float, int]:
        rank = nodes[key].rank
        return not nodes[key].is_server, float("inf") if rank is None else rank, key

    return sorted(nodes, key=order)[:most]


def _free_addresses(node: NodeInfo, taken: set[str]) -> list[str]:
    """Take the next free addresses of a node's host for its workers; several nodes may be on one machine."""
    candidates = (join_address(node.host, port) for port in range(node.port + 1, MAX_PORT + 1))
    addresses = list(itertools.islice((address for address in candidates if address not in taken), node.workers))
    if len(addresses) < node.workers:
        raise OptionError(
            f"{node.process}: expected {node.workers} free ports from {node.port + 1} to {MAX_PORT} for its workers, got "
            f"{len(addresses)}: other nodes on {node.host} have the rest. Fix: give --coordinator or --hosts a lower port"
        )
    taken.update(addresses)
    return addresses
