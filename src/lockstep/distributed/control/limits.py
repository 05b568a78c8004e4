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

    Raises:
        OptionError: a limit is so low that late heartbeats would exceed it, or ``long`` is below ``timeout``.
    """

    timeout: float
    long: float

    def __post_init__(self) -> None:
        least = 3 * HEARTBEAT_SECONDS
        if not least <= self.timeout <= self.long:
            raise OptionError(
                f"timeout_seconds, long_seconds: expected {least:g} or more, and the second no less than the first, as "
                f"heartbeats come each {HEARTBEAT_SECONDS:g} s; got {self.timeout:g} and {self.long:g}. Fix: raise them."
            )
