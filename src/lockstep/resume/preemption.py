"""Being asked to stop: by a signal to any process of the job, which all leave after the same step.

Schedulers send SIGTERM before they take a machine away; Slurm sends SIGUSR1, where it was asked to, some time before that.
"""

import math
import signal
import threading
from types import FrameType
from typing import Any

from lockstep.data.calls import Together

__all__ = ["Preemption"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Notices signals while it is open, and finds the step after which all processes stop.

    A handler that somebody else has set stays, and so do all where this is not the main thread. The same signal once more ends the
    process at once, as it does without us.

    Args:
        together: the processes.
    """

    def __init__(self, together: Together) -> None:
        self._together = together
        self._noticed: str | None = None
        self._boundaries = 0
        self._last: float | None = None  # the boundary at which all stop; infinite: where they come to their end
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is threading.main_thread():
            free = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
            self._before = {number: signal.signal(number, self._notice) for number in free}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._notice:
                signal.signal(number, handler)

    @property
    def reason(self) -> str | None:
        """Why the job should stop, as far as this process knows by now."""
        return self._noticed or self._together.reason_to_stop

    def is_now(self) -> bool:
        """Whether all processes stop here; each asks after the same steps.

        Raises:
            ClusterError: another one does not come to where it could stop.
        """
        self._boundaries += 1
        if self._last is None and self.reason:
            if self._noticed:
                self._together.ask_to_stop(self._noticed)
            self._meet(self._boundaries)
        return self._last == self._boundaries

    def is_at_end(self) -> bool:
        """Whether a process was asked to stop and found no step for it any more; each asks once, where there are no more steps."""
        return self._last is not None or self._meet(math.inf)

    def _meet(self, boundary: float) -> bool:
        """Agree on the boundary to stop at: the furthest to which a process has come; gives whether one was asked to stop."""
        found = self._together.gathered("the step to stop after", [boundary, self.reason is not None])
        self._last = max(boundary for boundary, _ in found)
        return any(is_asked for _, is_asked in found)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._noticed = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
