"""All local processes from one start to their common end: who is asked to end when, and who is killed."""

import signal
import time
from collections.abc import Callable, Iterator, Set
from typing import Protocol

from lockstep.distributed.cluster.exit_codes import DONE, NO_PROGRESS, PEER_LOST
from lockstep.launch.failure_report import ProcessFailure, first_of, job_code
from lockstep.launch.process_names import ProcessName, ProcessNames, names_of
from lockstep.launch.process_tree import end_children
from lockstep.launch.restart_budget import RestartBudget
from lockstep.launch.signal_pipe import SignalPipe
from lockstep.launch.worker_loss_policy import WorkerLossPolicy
from lockstep.launch.worker_process import WorkerProcess

__all__ = ["ENDING", "LocalWorkers", "RemoteStop"]

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
_DUMP_SECONDS = 0.5  # For each to print where it is, before it is asked to end.
_BURY_SECONDS = 5.0
_PRINT_SECONDS = 2.0  # For what was printed last to be written.


class RemoteStop(Protocol):
    """Where others may say that all workers must end."""

    def fileno(self) -> int:
        """What becomes readable when something is said."""

    def read(self) -> str | None:
        """Why all workers must end; None where that was not said."""


class LocalWorkers:
    """Starts processes and watches them until each has ended.

    Args:
        tasks: the processes of this node. They are called workers here, whatever they are.
        start: starts one.
        restarts: those that are left, for workers that the job can lose.
        received: the signals of the supervisor. SIGPIPE stands for an output that nobody reads any more.
        grace: seconds that a worker has to end when it is asked to.
        stop_at: when the run must be over, on the monotonic clock.
        spared: children of this process that are none of these.
        say: takes lines for the user.
        news: from other nodes, if there are any.
    """

    def __init__(
        self,
        tasks: ProcessNames,
        start: Callable[[ProcessName], WorkerProcess],
        restarts: RestartBudget,
        received: SignalPipe,
        grace: float,
        stop_at: float | None,
        spared: Set[int],
        say: Callable[[str], None],
        news: RemoteStop | None = None,
    ) -> None:
        self._tasks = tasks
        self._start = start
        self._workers: list[WorkerProcess] = []  # Also those in whose place another one was started.
        self._losses = WorkerLossPolicy(tasks.can_lose, restarts, self._add, say)
        self._received = received
        self._grace = grace
        self._stop_at = stop_at
        self._spared = spared
        self._say = say
        self._news = news
        self._asked_at: float | None = None  # When the workers were asked to end; all times are of the monotonic clock.
        self._done_at: float | None = None  # When the leader had done what there is to do.
        self._killed_at: float | None = None
        self._why: int | None = None  # The signal because of which they were asked.
        self.is_late = False
        self.is_unwanted = False  # Somebody has asked the supervisor to end.
        self._is_called_off = False  # Another node has failed.

    def run(self) -> None:
        """Start all, wait until they have ended, and end those who must not go on."""
        for task in self._tasks.all:
            self._add(task)
        while self._running and not self._has_waited_enough:
            numbers, ready = self._received.wait(self._seconds_to_next(), [*self._files])
            for worker in self._running:
                if worker.file in ready:
                    worker.look()
            for number in numbers:
                self._on_signal(number)
            self._on_done()
            self._on_failure()
            if not self._is_over:
                self._losses.note(self._workers)
            self._on_news(ready)
            self._on_time()
        self._tell_who_failed_when_all_was_done()

    def bury(self) -> None:
        """Kill what is left, and wait until nothing is and all that was printed is written."""
        for worker in self._workers:
            worker.kill()
        until = time.monotonic() + _BURY_SECONDS
        for worker in self._workers:
            worker.wait(until)
        if not end_children(0, self._spared):  # Only where a keeper was killed is there any.
            self._say("a process could not be ended; a driver or a disk may hold it.")
        until = time.monotonic() + _PRINT_SECONDS
        for worker in self._workers:
            worker.drain(until)
            if worker.log_error is not None:
                self._say(f"the log file of {worker.task.name} is not complete: {worker.log_error}.")

    @property
    def failure(self) -> ProcessFailure | None:
        """The worker that failed first, where that is why all have ended."""
        failures = self._failures()
        return first_of(failures) if failures and self._why is None and not self.is_late else None

    @property
    def code(self) -> int:
        """The exit code that this generation ends the job with."""
        if self._done_at is not None and not self._failures():
            return DONE
        if self.is_late:
            return NO_PROGRESS
        if self._why is not None:
            codes = {worker.code for worker in self._workers if worker not in self._losses.borne}
            return 128 + self._why if codes - {DONE, PEER_LOST} else PEER_LOST if PEER_LOST in codes else DONE
        if self._is_called_off and self.failure is None:
            return PEER_LOST if any(worker.code for worker in self._workers) else DONE
        return DONE if self.failure is None else job_code(self.failure.code)

    @property
    def _files(self) -> Iterator[int]:
        yield from (worker.file for worker in self._running)
        if self._news is not None and self._asked_at is None:  # Else all end already.
            yield self._news.fileno()

    @property
    def _running(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.code is None]

    @property
    def _is_over(self) -> bool:
        """Whether nobody is missed who ends now."""
        return self._asked_at is not None or self._done_at is not None

    def _failures(self) -> list[ProcessFailure]:
        """Whose failure ends the job: not of those who ended because we asked them to, or when all was done."""
        until = min(float("inf") if time is None else time for time in (self._asked_at, self._done_at))
        failures = [worker.failure for worker in self._workers]
        return self._losses.fatal(one for one in failures if one and one.when <= until)

    def _add(self, task: ProcessName) -> None:
        self._workers.append(self._start(task))

    def _on_signal(self, number: int) -> None:
        if number not in ENDING:
            self._send(number)
            return
        self.is_unwanted = True
        if self._asked_at is None:
            self._why = None if self._failures() else number
            again = "; again kills them at once" if number == signal.SIGINT else ""
            self._say(f"{signal.Signals(number).name}: the workers have {self._grace:g} s to end{again}.")
            self._ask(signal.SIGTERM if number == signal.SIGPIPE else number)
        elif number == signal.SIGINT:
            self._kill("killed.")

    def _on_done(self) -> None:
        ends = [
            worker.ended_at for worker in self._workers if worker.task == self._tasks.leader and worker.code == DONE
        ]
        if ends and not self._is_over:
            self._done_at = ends[0]

    def _on_failure(self) -> None:
        failures = self._failures() if self._asked_at is None and self._running else []
        if failures:
            first = first_of(failures)
            if time.monotonic() >= first.certain_at:
                self._say(f"{first.headline}; the others have {self._grace:g} s to end.")
                self._ask(signal.SIGTERM)

    def _on_news(self, ready: Set[int]) -> None:
        if self._news is None or self._asked_at is not None or self._news.fileno() not in ready:
            return
        why = self._news.read()
        if why is not None:
            self._is_called_off = True
            self._say(f"{why}; the workers here have {self._grace:g} s to end.")
            self._ask(signal.SIGTERM)

    def _on_time(self) -> None:
        now = time.monotonic()
        if self._asked_at is not None:
            if self._killed_at is None and now >= self._asked_at + self._grace:
                self._kill(f"did not end within {self._grace:g} s: killed.")
        elif self._done_at is not None and now >= self._done_at + self._grace and self._running:
            self._say(f"{self._names} did not end within {self._grace:g} s after all was done: asked to end.")
            self._ask(signal.SIGTERM)
        elif self._stop_at is not None and now >= self._stop_at and self._running:
            self._on_limit()

    def _on_limit(self) -> None:
        if self.is_late:
            self._ask(signal.SIGTERM)
        else:
            self.is_late = True
            self._say("the run takes longer than --timeout allows.")
            self._send(signal.SIGUSR2)
            self._stop_at = time.monotonic() + _DUMP_SECONDS

    def _ask(self, number: int) -> None:
        self._asked_at = time.monotonic()
        self._send(number)

    def _send(self, number: int) -> None:
        for worker in self._running:
            worker.send(number)

    def _kill(self, what: str) -> None:
        self._killed_at = time.monotonic()
        if self._running:
            self._say(f"{self._names} {what}")
        for worker in self._running:
            worker.kill()

    def _tell_who_failed_when_all_was_done(self) -> None:
        until = float("inf") if self._asked_at is None else self._asked_at
        for failure in filter(None, (worker.failure for worker in self._workers)):
            if self._done_at is not None and self._done_at < failure.when <= until:
                self._say(f"{failure.headline}, when all was done.")

    @property
    def _names(self) -> str:
        return names_of(worker.task for worker in self._running)

    @property
    def _has_waited_enough(self) -> bool:
        return self._killed_at is not None and time.monotonic() >= self._killed_at + _BURY_SECONDS

    def _seconds_to_next(self) -> float | None:
        """Until something is due of which no signal and no worker tells."""
        if self._killed_at is not None:
            due = self._killed_at + _BURY_SECONDS
        elif self._asked_at is not None:
            due = self._asked_at + self._grace
        else:
            due = min(self._dues(), default=float("inf"))
        return None if due == float("inf") else due - time.monotonic()

    def _dues(self) -> Iterator[float]:
        yield from (failure.certain_at for failure in self._failures())
        if not self._is_over:
            yield from self._losses.due(self._workers)
        if self._done_at is not None:
            yield self._done_at + self._grace
        if self._stop_at is not None:
            yield self._stop_at
