"""What the meeting decides: who may come, who starts, what is said to whom, and when the job is over. There is no socket here."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.distributed.cluster.addresses import join_address
from lockstep.distributed.cluster.exit_codes import DONE, PEER_LOST
from lockstep.distributed.control.admission import JoinRejection
from lockstep.distributed.control.consistency import first_difference
from lockstep.distributed.control.peer import Peer
from lockstep.distributed.control.wait_logger import listed
from lockstep.launch.rank_assignment import RankAssignment
from lockstep.launch.rendezvous.generation_state import GenerationState
from lockstep.launch.rendezvous.node_messages import GenerationOutcome, JobSpec, NodeInfo
from lockstep.launch.rendezvous.quorum_wait import QuorumWait, in_order
from lockstep.launch.restart_budget import pause_before

__all__ = ["Outbound", "RendezvousState"]


@dataclass(frozen=True)
class Outbound:
    """A message to one node.

    Args:
        to: its key.
        message: what is said.
    """

    to: int
    message: dict[str, Any]


class RendezvousState:
    """The nodes that are connected, and the generation that they run or wait for.

    Args:
        terms: of the host.
        clock: gives seconds, and is not set back.

    Attributes:
        nodes: all that are connected, by a key that grows with each that comes.
        is_over: whether the job has ended.
    """

    def __init__(self, terms: JobSpec, clock: Callable[[], float]) -> None:
        self._terms, self._clock = terms, clock
        self.nodes: dict[int, NodeInfo] = {}
        self.is_over = False
        self._end: dict[str, Any] = {}
        self._gone: dict[str, str] = {}
        self._generation = -1
        self._round: GenerationState | None = None
        self._gathering = QuorumWait(terms, clock(), clock())

    def judge(self, peer: Peer) -> JoinRejection | None:
        """Why a supervisor may not come; None where it may."""
        if set(peer.information) != {"rank", "host", "port"}:
            return JoinRejection(
                f"{peer.process} is no supervisor: this is where those of lockstep run --nnodes MIN:MAX meet. Start its script with the same "
                "lockstep run on that machine, or give a job of its own another port."
            )
        found = first_difference(peer.identity, self._terms.as_identity())
        if found is not None:
            option, theirs, ours = found
            return JoinRejection(
                f"{peer.process} was started with {option} {theirs}, the node where all meet with {ours}: start all with the same "
                "options."
            )
        twin = [node for node in self.nodes.values() if node.rank == peer.information["rank"] is not None]
        if twin:
            return JoinRejection(
                f"another node {twin[0].rank} is there ({twin[0].process}): each needs a --node-rank of its own",
                again=True,
            )
        return None

    def come(self, key: int, node: NodeInfo) -> list[Outbound]:
        """Somebody is there now."""
        self.nodes[key] = node
        return [Outbound(key, self._end)] if self.is_over else self.step()

    def go(self, key: int, why: str) -> list[Outbound]:
        """Somebody is not there any more."""
        node = self.nodes.pop(key, None)
        if node is None or self.is_over:
            return []
        outcome, name = GenerationOutcome(PEER_LOST, f"lost, {why}"), node.process
        if self._round is not None and key in self._round.running:
            self._round.note(key, outcome, self._clock())
            name = self._round.members[key]
        self._gone[name] = outcome.sentence
        return self.step()

    def note(self, key: int, outcome: GenerationOutcome) -> list[Outbound]:
        """How the generation has ended on a node."""
        if self._round is None or key not in self._round.running:
            return []
        name = self._round.members[key]
        self._round.note(key, outcome, self._clock())
        if outcome.leaves:
            del self.nodes[key]
            self._gone[name] = outcome.sentence
        if outcome.is_final:
            return list(self.finish(outcome.code, f"{name}: {outcome.sentence}", key))
        return self.step()

    def step(self) -> list[Outbound]:
        """What is to be said now; also to be called from time to time."""
        if self.is_over:
            return []
        return list(self._gather() if self._round is None else self._watch(self._round))

    def finish(self, code: int, sentence: str, cause: int | None = None) -> Iterator[Outbound]:
        """The job is over; the node that is the cause has said itself why."""
        self.is_over = True
        self._end = {"kind": "end", "code": code, "sentence": sentence}
        for key in self.nodes:
            yield Outbound(key, {**self._end, "sentence": ""} if key == cause else self._end)

    def waiting(self) -> list[int]:
        """The nodes that run nothing."""
        return [key for key in self.nodes if self._round is None or key not in self._round.running]

    def waits_for(self) -> str:
        """For whom these wait."""
        if self._round is None:
            return self._gathering.missing(self.nodes.values())
        return f"{listed(self._round.names or ['nobody'])} to end"

    def _gather(self) -> Iterator[Outbound]:
        now, here = self._clock(), len(self.nodes)
        if self._gathering.is_in_vain(here, now):
            yield from self.finish(PEER_LOST, self._gathering.complaint(self.nodes.values(), self._gone))
        elif self._gathering.may_begin(here, now):
            yield from self._begin(in_order(self.nodes, self._terms.most))

    def _begin(self, keys: Iterable[int]) -> Iterator[Outbound]:
        chosen = [(key, self.nodes[key]) for key in keys]
        taken: set[str] = set()
        addresses = [_addresses(node, taken) for _, node in chosen]
        flat = tuple(address for own in addresses for address in own)
        self._generation += 1
        self._gone.clear()
        self._round = GenerationState(
            {key: f"node {rank} ({node.process})" for rank, (key, node) in enumerate(chosen)}, self._terms.grace
        )
        for rank, (key, node) in enumerate(chosen):
            first = sum(map(len, addresses[:rank]))
            place = RankAssignment(self._generation, rank, len(chosen), node.workers, first, len(flat), flat[0], flat)
            yield Outbound(key, {"kind": "start", "place": asdict(place)})

    def _watch(self, round_: GenerationState) -> Iterator[Outbound]:
        now = self._clock()
        for key in round_.to_call_off(now):
            yield Outbound(key, {"kind": "call off", "sentence": self._why(round_)})
        for key in round_.overdue(now):
            round_.note(key, GenerationOutcome(PEER_LOST, "it did not end in time"), now)
            self._gone[round_.members[key]] = "it did not end in time"
            if self.nodes.pop(key, None):
                yield Outbound(key, {"kind": "end", "code": PEER_LOST, "sentence": "this node did not end in time"})
        if not round_.running:
            yield from self._decide(round_)

    def _decide(self, round_: GenerationState) -> Iterator[Outbound]:
        cause = round_.cause()
        if cause is None:
            yield from self.finish(DONE, "")
        elif self._generation == self._terms.max_restarts:
            yield from self.finish(cause[1].code, self._why(round_), cause[0])
        else:
            restart, now = self._generation + 1, self._clock()
            seconds = pause_before(restart)
            self._round, self._gathering = None, QuorumWait(self._terms, now, now + seconds)
            again = f"restart {restart} of {self._terms.max_restarts} in {seconds:g} s or later: "
            for key in self.nodes:
                yield Outbound(key, {"kind": "again", "sentence": again + self._why(round_)})

    def _why(self, round_: GenerationState) -> str:
        cause = round_.cause()
        return f"{round_.members[cause[0]]}: {cause[1].sentence}" if cause else ""


def _addresses(node: NodeInfo, taken: set[str]) -> list[str]:
    """The next free ones of a node's host: several nodes may be on one machine."""
    above = (join_address(node.host, port) for port in itertools.count(node.port + 1))
    own = list(itertools.islice((address for address in above if address not in taken), node.workers))
    taken.update(own)
    return own
