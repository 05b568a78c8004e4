"""One generation, as the meeting sees it: how it has ended on each node, and who is waited for. Times are of the caller's clock."""

from collections.abc import Mapping

from lockstep.launch.rendezvous.node_messages import GenerationOutcome

__all__ = ["GenerationState"]

_NOTICE_SECONDS = 1.0  # For workers to find out by themselves that another one is lost, and to say so.
_END_SECONDS = 15.0  # A supervisor needs, beyond the grace, to kill what is left and to say that all have ended.


class GenerationState:
    """The members of a generation.

    Args:
        members: name of each, by its key.
        grace: seconds that workers have to end.
    """

    def __init__(self, members: Mapping[int, str], grace: float) -> None:
        self.members = members
        self.outcomes: dict[int, GenerationOutcome] = {}
        self._grace = grace
        self._failed_at: float | None = None
        self._is_called_off = False

    @property
    def running(self) -> list[int]:
        """On which nodes workers may still run."""
        return [key for key in self.members if key not in self.outcomes]

    @property
    def names(self) -> list[str]:
        """Of those nodes."""
        return [self.members[key] for key in self.running]

    def note(self, key: int, outcome: GenerationOutcome, now: float) -> None:
        """How it has ended on one node."""
        self.outcomes[key] = outcome
        if outcome.code and self._failed_at is None:
            self._failed_at = now

    def cause(self) -> tuple[int, GenerationOutcome] | None:
        """Why it was no success, and on which node: the first that is not a consequence of another."""
        failed = [(key, outcome) for key, outcome in self.outcomes.items() if outcome.code]
        return min(failed, key=lambda item: item[1].is_consequence) if failed else None

    def to_call_off(self, now: float) -> list[int]:
        """The nodes that must be told, now and once, that the others cannot go on."""
        if self._failed_at is None or self._is_called_off or now < self._failed_at + _NOTICE_SECONDS:
            return []
        self._is_called_off = True
        return self.running

    def overdue(self, now: float) -> list[int]:
        """The nodes that were told so and have not ended in time."""
        limit = _NOTICE_SECONDS + self._grace + _END_SECONDS
        return [] if self._failed_at is None or now < self._failed_at + limit else self.running
