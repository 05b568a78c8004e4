"""Which generations of workers there are on this node, and when: decided here alone, or with other nodes (``meeting/``)."""

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lockstep.distributed.cluster.exit_codes import DONE
from lockstep.launch.failure_report import USAGE
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.local_workers import ENDING, LocalWorkers, RemoteStop
from lockstep.launch.rank_assignment import AnyPlace, RankAssignment, ServerRankAssignment, reserved_addresses
from lockstep.launch.restart_budget import RestartBudget, pause_before
from lockstep.launch.signal_pipe import SignalPipe

__all__ = ["LocalRestartLoop", "RestartLoop", "is_final"]


class RestartLoop(Protocol):
    """One generation after the other."""

    @property
    def code(self) -> int:
        """What the job ends with on this node."""

    @property
    def news(self) -> RemoteStop | None:
        """Where others say that a generation must end."""

    def places(self) -> Generator[AnyPlace, None, None]:
        """The place of this node in each generation; the next one is asked for when the workers of one have ended."""

    def note(self, ended: LocalWorkers) -> None:
        """How a generation has ended here."""

    def close(self) -> None:
        """Give back what is held."""


def is_final(ended: LocalWorkers) -> bool:
    """Whether starting again is not wanted or would not help."""
    return ended.code == USAGE or ended.is_late or ended.is_unwanted


@dataclass
class LocalRestartLoop:
    """That of a node which starts its workers again by itself.

    Args:
        job: what runs.
        node: rank of this node.
        restarts: those that are left.
        received: the signals of the supervisor.
        say: takes lines for the user.
    """

    job: LaunchConfig
    node: int
    restarts: RestartBudget
    received: SignalPipe
    say: Callable[[str], None]
    news: None = None
    code: int = field(default=DONE, init=False)
    _is_over: bool = field(default=False, init=False)

    def places(self) -> Generator[AnyPlace, None, None]:
        """As long as workers fail and may be started again."""
        for generation in itertools.count():
            if generation and not self._may_start_again():
                return
            with self._place(generation) as place:
                yield place
            if self._is_over:
                return

    def note(self, ended: LocalWorkers) -> None:
        """How a generation has ended here."""
        self.code, self._is_over = ended.code, ended.code == DONE or is_final(ended)

    def close(self) -> None:
        """Nothing is held."""

    @contextlib.contextmanager
    def _place(self, generation: int) -> Iterator[AnyPlace]:
        workers, number = self.job.workers, self.job.nodes
        if self.job.servers is not None:
            with reserved_addresses(sum(self.job.processes.values())) as own:
                yield ServerRankAssignment.at(generation, self.job.processes, own)
        else:
            with self._addresses() as (meeting, addresses):
                first = self.node * workers
                yield RankAssignment(
                    generation, self.node, number, workers, first, number * workers, meeting, addresses
                )

    @contextlib.contextmanager
    def _addresses(self) -> Iterator[tuple[str, Sequence[str] | None]]:
        """Where worker 0 is reached, and all workers if that is known; ports of our choice are new in each generation."""
        if self.job.meeting_address is not None:
            yield self.job.meeting_address, self.job.addresses
        else:
            with reserved_addresses(self.job.workers) as addresses:
                yield addresses[0], addresses

    def _may_start_again(self) -> bool:
        """Wait before the next generation; whether there is one, and it is still wanted then."""
        restart = self.restarts.take()
        return restart is not None and self._pause(restart)

    def _pause(self, restart: int) -> bool:
        seconds = pause_before(restart)
        self.say(f"restart {restart} of {self.job.max_restarts} in {seconds:g} s.")
        start_at = time.monotonic() + seconds
        while (left := start_at - time.monotonic()) > 0:
            numbers, _ = self.received.wait(left)
            if set(numbers) & set(ENDING):
                return False
        return True
