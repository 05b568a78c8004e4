"""Being asked to stop: by a signal to any process of the job, which all leave after the same step.

Schedulers send SIGTERM before they take a machine away; Slurm sends SIGUSR1, where it was asked to, some time before that.

Several processes ask each other about once a second, each after the same step. One of them cannot simply wait for the others where it
was signalled: they may be in the next step by then, which does not end without it.
"""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.checkpoint.async_writer import BackgroundWriter
from lockstep.data.fit_entry import ProcessGroup
from lockstep.distributed.cluster.exit_codes import PEER_LOST

__all__ = ["Preemption", "leave"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_INTERVAL = 1.0  # seconds from one question to the next


class Preemption:
    """Notices signals while it is open, and finds the step after which all processes stop.

    A handler that somebody else has set stays, and so do all where this is not the main thread. The same signal once more ends the
    process at once, as it does without us.

    Args:
        process_group: the processes.
        clock: gives seconds, and is not set back.

    Attributes:
        reason: why to stop; None where nobody was asked to.
    """

    def __init__(self, process_group: ProcessGroup, clock: Callable[[], float] = time.monotonic) -> None:
        self._process_group, self._clock = process_group, clock
        self.reason: str | None = None
        self._noticed: str | None = None
        self._steps, self._asked_at, self._ask_at = 0, 0, 1
        self._asked_when = clock()
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
        if self._noticed and self.reason is None and error[0] is None:
            signal.raise_signal(signal.Signals[self._noticed])  # Nobody has asked since: it takes effect now.

    def is_now(self) -> bool:
        """Whether all processes stop here; each calls this after the same steps.

        Raises:
            ClusterError: another one does not come here.
        """
        self._steps += 1
        if self._steps < self._ask_at:
            return False
        steps, now = self._steps - self._asked_at, self._clock()
        slowest = self._ask((now - self._asked_when) / steps)
        if self._process_group.processes > 1:
            steps = max(1, min(2 * steps, int(_INTERVAL / max(slowest, 1e-6))))
            self._asked_at, self._asked_when, self._ask_at = self._steps, now, self._steps + steps
        return self.reason is not None

    def is_at_end(self) -> bool:
        """As :meth:`is_now`, where there are no more steps."""
        self._ask(0.0)
        return self.reason is not None

    def _ask(self, seconds: float) -> float:
        """Find out whether a process was asked to stop; gives the longest of their ``seconds``."""
        found = self._process_group.all_gather("whether to stop", [self._noticed, seconds])
        for process, (signal_name, _) in enumerate(found):
            if signal_name and self.reason is None:
                who = "" if len(found) == 1 else f"worker {process} of {len(found)}: "
                self.reason = f"{who}{signal_name}"
        return max(seconds for _, seconds in found)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._noticed = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)


def leave(
    preemption: Preemption, step: int, directory: Path, writer: BackgroundWriter | None, announce: Callable[[str], None]
) -> None:
    """End the process when its last checkpoint is written.

    Args:
        preemption: says why.
        step: the last one.
        directory: of the checkpoints.
        writer: writes that checkpoint; None on workers that do not.
        announce: takes the line that says so.
    """
    kept = f"the checkpoints are in {directory}"
    if writer:
        writer.wait()
        steps = writer.store.steps()
        kept = f"the checkpoint of step {steps[-1]} is in {directory}" if steps else f"no checkpoint is in {directory}"
    announce(
        f"{preemption.reason}: stopped after step {step}; {kept}, and the same program goes on from it. This process ends with "
        f"code {PEER_LOST}."
    )
    raise SystemExit(PEER_LOST)
