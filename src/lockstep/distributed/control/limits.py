"""Limits of the waits for other workers, in seconds, and their defaults."""

from dataclasses import dataclass

from lockstep._errors import OptionError
from lockstep.distributed.control.heartbeat import HEARTBEAT_SECONDS

TIMEOUT_SECONDS = 60.0  # of a wait, where a strategy is given no other
LONG_SECONDS = 1800.0  # of compiling, of what a worker does alone at its end, and of a wait without progress


@dataclass(frozen=True)
class Limits:
    """Limits of waits, in seconds.

    Args:
        timeout: limit of a wait, and of the silence of a worker.
        long: limit of an activity of ``MAY_TAKE_LONG``, and of a step of all workers.
        start: limit of the wait for all workers at the start; None: ``timeout``.

    Raises:
        OptionError: a limit is so low that late heartbeats would exceed it, or ``long`` is below ``timeout``.
    """

    timeout: float
    long: float
    start: float | None = None

    @property
    def start_timeout(self) -> float:
        """Limit of the wait at the start."""
        return self.timeout if self.start is None else self.start

    def __post_init__(self) -> None:
        least = 3 * HEARTBEAT_SECONDS
        if not least <= self.timeout <= self.long:
            raise OptionError(
                f"timeout_seconds, long_seconds: expected {least:g} or more, and the second no less than the first, as "
                f"heartbeats come each {HEARTBEAT_SECONDS:g} s; got {self.timeout:g} and {self.long:g}."
            )
        if not self.start_timeout >= 0:
            raise OptionError(f"start_seconds: expected 0 or more, got {self.start_timeout:g}.")
