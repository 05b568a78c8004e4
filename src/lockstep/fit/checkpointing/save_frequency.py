"""When a checkpoint is due: ``save_freq`` of ``BackupAndRestore`` and of ``strategy.checkpoint``.

``FitCheckpoint.batch_ended`` asks after each step. Of several workers the chief's clock decides (``preemption``), as all write at the same step.
"""

import re
import time
from collections.abc import Callable

from lockstep._errors import OptionError, seconds, shown, whole_number

_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class SaveFrequency:
    """The schedule that ``save_freq`` describes.

    Args:
        save_freq: ``"epoch"``, a number of steps, or a time such as ``"30 s"``, ``"10min"`` or ``"2h"``.
        clock: gives seconds; monotonic.
        has_epochs: whether ``"epoch"`` is allowed.

    Raises:
        OptionError: ``save_freq`` is something else.

    Example:
        >>> every = SaveFrequency(100)
        >>> every.is_due_by_steps(199, 201), every.is_due_by_steps(201, 203)
        (True, False)
    """

    def __init__(
        self, save_freq: str | int, clock: Callable[[], float] = time.monotonic, has_epochs: bool = True
    ) -> None:
        self.steps, self.seconds = _frequency(save_freq, has_epochs)
        self._clock = clock
        self.saved()

    def is_due_by_steps(self, before: int, now: int) -> bool:
        """Return whether to save after a number of steps, given the number of steps at the last call and now."""
        return self.steps is not None and now // self.steps > before // self.steps

    def is_due_by_time(self) -> bool:
        """Return whether so many seconds have passed since the last save."""
        return self.seconds is not None and self._clock() - self._saved_at >= self.seconds

    def saved(self) -> None:
        """Restart the clock after a save."""
        self._saved_at = self._clock()


def _frequency(save_freq: str | int, has_epochs: bool) -> tuple[int | None, float | None]:
    """Return steps and seconds from one checkpoint to the next; both None: only at the end of epochs."""
    if not isinstance(save_freq, str):
        return whole_number("save_freq", save_freq), None
    if save_freq == "epoch" and has_epochs:
        return None, None
    match = _DURATION.fullmatch(save_freq)
    if match is None:
        allowed = ['"epoch"'] * has_epochs + ["a number of steps", 'or a time such as "30 s", "10min" or "2h"']
        raise OptionError(f"save_freq: expected {', '.join(allowed)}, got {shown(save_freq)}.")
    return None, seconds("save_freq", float(match[1]) * _SECONDS[match[2]], above=None)
