"""Preemption: after a stop signal to any process of a job, all processes exit after the same step.

Schedulers send SIGTERM before they take a machine away; Slurm, if asked to, sends SIGUSR1 some time before that.

Several processes exchange whether they were signalled, and whether it is time for a checkpoint, about once a second, each after the same
step. A signalled process cannot simply wait at its current step: the other processes may be in the next step, which does not end without
it.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lockstep._errors import PEER_LOST, CheckpointError, ClusterError, summary_of
from lockstep._logging import log_info
from lockstep.checkpoint.async_writer import AsyncWriter
from lockstep.data.process_group import ProcessGroup

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_INTERVAL = 1.0  # seconds from one exchange to the next
_ONE_REQUEST = 5.0  # seconds in which a signal that is repeated is the same request

_ignored: set[signal.Signals] = set()  # by this process, which ends as it was asked to


class Preemption:
    """Notices stop signals while it is open, and finds the step after which all processes stop.

    A handler that other code has set is kept, and outside the main thread all handlers are. A signal that comes again within some seconds is
    the same request: Slurm signals each process of a step, and ``lockstep run`` forwards what it gets. Later, a signal of the same kind ends
    the process at once, as without a handler. A signal after which the processes did not stop together ends this process at the end of the
    block, also if an exception ended it, which the program may catch.

    Args:
        process_group: all processes.
        is_save_due: returns whether it is time for a checkpoint; the first process decides for all.
        clock: gives seconds; monotonic.

    Attributes:
        process_group: all processes.
        reason: why to stop; None if no process was signalled.
        is_save_due: whether all processes save after this step, because it is time to.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        is_save_due: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.process_group, self._is_save_due, self._clock = process_group, is_save_due, clock
        self.reason: str | None = None
        self.is_save_due = False
        self._signal_name: str | None = None  # of the signal that this process got
        self._signalled_at: dict[int, float] = {}  # by number
        self._steps, self._last_exchange, self._next_exchange = 0, 0, 1
        self._last_time = clock()
        self._handlers: dict[signal.Signals, Any] = {}  # those before

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is threading.main_thread():
            free = [number for number in SIGNALS if _has_no_handler(number)]
            self._handlers = {number: signal.signal(number, self._notice) for number in free}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        has_stopped = self.reason is not None and isinstance(error, SystemExit)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._notice:
                signal.signal(number, handler)
        if has_stopped:
            self._ignore_signals()
        if self._signal_name is None or has_stopped:
            return
        if error is not None:
            log_info(f"{self._signal_name} came before {summary_of(error).rstrip('.')}: this process ends.")
        if isinstance(error, ClusterError) and error.exit_code == PEER_LOST:
            raise SystemExit(PEER_LOST) from error  # The other processes have stopped, and the job can resume.
        signal.raise_signal(signal.Signals[self._signal_name])

    def _ignore_signals(self) -> None:
        """Ignore further signals to a process that ends as it was asked to: srun sends one when the process of another node has ended."""
        for number in self._handlers:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)
                _ignored.add(number)

    @property
    def seconds_signalled(self) -> float:
        """Seconds since the first signal to this process; 0 if there was none."""
        return self._clock() - min(self._signalled_at.values()) if self._signalled_at else 0.0

    def exit_alone(self) -> NoReturn:
        """Exit with code 75 because of a signal to this process, without which the others continue."""
        self.reason = self._signal_name
        log_info(f"{self.reason}: the other processes continue, and this one ends with code {PEER_LOST}.")
        raise SystemExit(PEER_LOST)

    def end_step(self) -> bool:
        """Exchange signals after a step, if it is time to; return whether all processes stop now. Each calls this after the same steps.

        Raises:
            ClusterError: another process does not call this.
        """
        self._steps += 1
        self.is_save_due = False
        if self._steps < self._next_exchange:
            return False
        steps, now = self._steps - self._last_exchange, self._clock()
        slowest = self._exchange((now - self._last_time) / steps)
        if self.process_group.processes > 1:
            steps = max(1, min(2 * steps, int(_INTERVAL / max(slowest, 1e-6))))
            self._last_exchange, self._last_time, self._next_exchange = self._steps, now, self._steps + steps
        return self.reason is not None

    def end_training(self) -> bool:
        """Exchange signals after the last step, and return whether a process was signalled."""
        self._exchange(0.0)
        return self.reason is not None

    def _exchange(self, seconds: float) -> float:
        """Find out whether a process was signalled and whether to save, and return the largest ``seconds`` of all processes."""
        found = self.process_group.all_gather("whether to stop", [self._signal_name, seconds, self._is_save_due()])
        self.is_save_due = found[0][2]
        for process, (signal_name, _, _) in enumerate(found):
            if signal_name and self.reason is None:
                worker = "" if len(found) == 1 else f"worker {process} of {len(found)}: "
                self.reason = f"{worker}{signal_name}"
        return max(seconds for _, seconds, _ in found)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        first = self._signalled_at.setdefault(number, self._clock())
        self._signal_name = signal.Signals(number).name
        if self._clock() - first > _ONE_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _has_no_handler(number: signal.Signals) -> bool:
    """Return whether a signal would end the process, unless this module has it ignored: the program has caught the exit of an earlier call."""
    handler = signal.getsignal(number)
    if handler is signal.SIG_IGN and number in _ignored:
        _ignored.discard(number)
        signal.signal(number, signal.SIG_DFL)
        return True
    return handler is signal.SIG_DFL


def exit_after_checkpoint(
    preemption: Preemption, step: int, directory: Path, writer: AsyncWriter | None, log: Callable[[str], None]
) -> None:
    """Exit when the last checkpoint of this process, if it writes one, is written, or the limit of the writer has passed; the process ends with
    all others.

    What has started the processes may stop all of them soon after the first has ended.

    Raises:
        SystemExit: always, with code 75.
    """
    kept = f"the checkpoints are in {directory}"
    if writer:
        with preemption.process_group.saving():
            late = "" if writer.wait() else "the last checkpoint was not written in time; "
        with contextlib.suppress(CheckpointError):  # The directory cannot be read now; what counts is the exit code.
            steps = writer.store.steps()
            newest = f"the checkpoint of step {steps[-1]}" if steps else "no checkpoint"
            kept = f"{late}{newest} is in {directory}"
    log(
        f"{preemption.reason}: stopped after step {step}; {kept}, and the same program resumes from it. This process ends with "
        f"code {PEER_LOST}."
    )
    preemption.process_group.end_together()
    raise SystemExit(PEER_LOST)
