"""How often processes may be started again, and how long to wait before."""

from dataclasses import dataclass, field

__all__ = ["RestartBudget", "pause_before"]

_LONGEST_PAUSE = 30.0  # seconds; the first pause is 1 s, each further one twice as long


def pause_before(restart: int) -> float:
    """Seconds to wait before a restart, of which 1 is the first.

    Example:
        >>> [pause_before(restart) for restart in (1, 2, 3, 9)]
        [1.0, 2.0, 4.0, 30.0]
    """
    return min(_LONGEST_PAUSE, 2.0 ** (restart - 1))


@dataclass
class RestartBudget:
    """What is left of the restarts of a job, whether all of its processes start again or one.

    Args:
        most: number of all.

    Example:
        >>> restarts = RestartBudget(1)
        >>> restarts.take(), restarts.take()
        (1, None)
    """

    most: int
    _taken: int = field(default=0, init=False)

    def take(self) -> int | None:
        """The number of the next one, from 1; None where all are used up."""
        if self._taken == self.most:
            return None
        self._taken += 1
        return self._taken
