"""Which generations of workers there are on this node, and when: decided here alone, or with other nodes (``meeting/``)."""

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lockstep.cluster.exit_codes import DONE
from lockstep.launch.failures import USAGE
from lockstep.launch.generation import ENDING, Generation, News
from lockstep.launch.job import Job
from lockstep.launch.places import Place, reserved_addresses
from lockstep.launch.signals import Signals

__all__ = ["Course", "OwnCourse", "is_final", "pause_before"]

_LONGEST_PAUSE = 30.0  # seconds between two generations; the first is 1 s, each further one twice as long


class Course(Protocol):
    """One generation after the other."""

    @property
    def code(self) -> int:
        """What the job ends with on this node."""

    @property
    def news(self) -> News | None:
        """Where others say that a generation must end."""

    def places(self) -> Generator[Place, None, None]:
        """The place of this node in each generation; the next one is asked for when the workers of one have ended."""

    def note(self, ended: Generation) -> None:
        """How a generation has ended here."""

    def close(self) -> None:
        """Give back what is held."""


def is_final(ended: Generation) -> bool:
    """Whether starting again is not wanted or would not help."""
    return ended.code == USAGE or ended.is_late or ended.is_unwanted


def pause_before(restart: int) -> float:
    """Seconds to wait before a restart, of which 1 is the first.

    Example:
        >>> [pause_before(restart) for restart in (1, 2, 3, 9)]
        [1.0, 2.0, 4.0, 30.0]
    """
    return min(_LONGEST_PAUSE, 2.0 ** (restart - 1))


@dataclass
class OwnCourse:
    """That of a node which starts its workers again by itself.

    Args:
        job: what runs.
        node: rank of this node.
        received: the signals of the supervisor.
        say: takes lines for the user.
    """

    job: Job
    node: int
    received: Signals
    say: Callable[[str], None]
    news: None = None
    code: int = field(default=DONE, init=False)
    _is_over: bool = field(default=False, init=False)

    def places(self) -> Generator[Place, None, None]:
        """As long as workers fail and may be started again."""
        workers = self.job.workers
        for generation in range(self.job.max_restarts + 1):
            if generation and not self._pause(generation):
                return
            with self._addresses() as (meeting, addresses):
                first, number = self.node * workers, self.job.nodes
                yield Place(generation, self.node, number, workers, first, number * workers, meeting, addresses)
            if self._is_over:
                return

    def note(self, ended: Generation) -> None:
        """How a generation has ended here."""
        self.code, self._is_over = ended.code, ended.code == DONE or is_final(ended)

    def close(self) -> None:
        """Nothing is held."""

    @contextlib.contextmanager
    def _addresses(self) -> Iterator[tuple[str, Sequence[str] | None]]:
        """Where worker 0 is reached, and all workers if that is known; ports of our choice are new in each generation."""
        if self.job.meeting_address is not None:
            yield self.job.meeting_address, self.job.addresses
        else:
            with reserved_addresses(self.job.workers) as addresses:
                yield addresses[0], addresses

    def _pause(self, restart: int) -> bool:
        """Wait before the next generation; whether it is still wanted then."""
        seconds = pause_before(restart)
        self.say(f"restart {restart} of {self.job.max_restarts} in {seconds:g} s.")
        start_at = time.monotonic() + seconds
        while (left := start_at - time.monotonic()) > 0:
            numbers, _ = self.received.wait(left)
            if set(numbers) & set(ENDING):
                return False
        return True
