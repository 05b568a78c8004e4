"""When to save a checkpoint: every n steps, every n seconds, or only at the end of each epoch."""

import re
import time
from collections.abc import Callable

from lockstep._errors import OptionError, whole_number

__all__ = ["SaveFrequency"]

_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class SaveFrequency:
    """The schedule that ``save_freq`` describes.

    Args:
        save_freq: ``"epoch"``, a number of steps, or a time such as ``"30 s"``, ``"10min"`` or ``"2h"``.
        clock: gives seconds; monotonic.

    Raises:
        OptionError: ``save_freq`` is something else.

    Example:
        >>> every = SaveFrequency(100)
        >>> every.is_due(199, 201), every.is_due(201, 203)
        (True, False)
    """

    def __init__(self, save_freq: str | int, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps, self.seconds = _frequency(save_freq)
        self._clock = clock
        self.saved()

    def is_due(self, before: int, now: int) -> bool:
        """Return whether to save now, given the number of steps before the last call and now."""
        is_late = self.seconds is not None and self._clock() - self._saved_at >= self.seconds
        return is_late or (self.steps is not None and now // self.steps > before // self.steps)

    def saved(self) -> None:
        """Restart the clock after a save."""
        self._saved_at = self._clock()


def _frequency(save_freq: str | int) -> tuple[int | None, float | None]:
    """Return steps and seconds from one checkpoint to the next; both None: only at the end of epochs."""
    if save_freq == "epoch":
        return None, None
    if not isinstance(save_freq, str):
        return whole_number("save_freq", save_freq), None
    match = _DURATION.fullmatch(save_freq)
    if match is None:
        raise OptionError(
            f'save_freq: expected "epoch", a number of steps, or a time such as "30 s", "10min" or "2h", got {save_freq!r}.'
        )
    return None, float(match[1]) * _SECONDS[match[2]]
