"""All processes of this node in one generation, from their start to the exit of the last one: signals, failures and time limits.

One process is started in ``worker_process``, with the environment that ``supervisor`` gives it; ``restart_policy`` says what the loss of
a worker means.
"""

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Protocol

from lockstep._errors import DONE, NO_PROGRESS, PEER_LOST
from lockstep.launch.rank_assignment import NodeProcesses, ProcessName, format_names
from lockstep.launch.reaper import terminate_children
from lockstep.launch.restart_policy import RestartBudget, WorkerLossPolicy
from lockstep.launch.signals import SignalPipe
from lockstep.launch.worker_process import USAGE, ProcessFailure, WorkerProcess, job_exit_code, root_cause

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
# Those that end a node while no workers run: a scheduler that sends USR1 is about to stop the job, and none is there to save.
IDLE_STOP_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1)
_SAVE_SECONDS = 600.0  # For the workers to save and end after USR1, as for a checkpoint; a later end has another cause.
_DUMP_SECONDS = 0.5  # For each worker to print its stack, before it gets SIGTERM.
_REAP_SECONDS = 5.0
_DRAIN_SECONDS = 2.0  # For the last output to be written.


class RemoteStop(Protocol):
    """Connection to other nodes, which may request to stop all workers."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a message arrives."""

    def send_heartbeat_if_due(self) -> float:
        """Tell the other nodes that this one is alive, if it is time to; return the seconds until it is again."""

    def read(self) -> str | None:
        """Read messages; return the reason if all workers must stop, else None."""


@dataclass
class _Shutdown:
    """How far the end of a generation has come. All times are of the monotonic clock.

    Args:
        done_at: when the leader was done.
        stopped_at: when the workers were sent a signal to stop.
        killed_at: when the remaining workers were killed.
        announced_at: when USR1 came, after which workers save and may end with 75: a scheduler is about to stop the job.
        stop_signal: the signal to the supervisor that is the reason of the stop.
        is_requested: whether there was a signal to stop.
        interrupts: number of SIGINTs, as of Ctrl-C.
        is_remote: whether a failure of another node is the reason of the stop.
    """

    done_at: float | None = None
    stopped_at: float | None = None
    killed_at: float | None = None
    announced_at: float = float("-inf")
    stop_signal: int | None = None
    is_requested: bool = False
    interrupts: int = 0
    is_remote: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether a worker may exit from now on without being missed."""
        return self.stopped_at is not None or self.done_at is not None

    @property
    def is_announced(self) -> bool:
        """Whether USR1 came so recently that workers end because of it; else they have saved and continued."""
        return time.monotonic() < self.announced_at + _SAVE_SECONDS

    @property
    def is_given_up(self) -> bool:
        """Whether the wait for killed processes has taken too long."""
        return self.killed_at is not None and time.monotonic() >= self.killed_at + _REAP_SECONDS


class LocalWorkers:
    """Starts processes and supervises them until each has exited.

    Args:
        processes: the processes of this node; this class calls all of them workers.
        start: starts one.
        restarts: the remaining ones, for workers that the job can lose.
        signals: signals of the supervisor. SIGPIPE means that the reader of the output is gone.
        grace: seconds that a worker has to exit after SIGTERM.
        stop_at: when the run must be over, on the monotonic clock.
        excluded: children of this process that are not workers.
        log: prints a line for the user.
        remote_stop: requests of other nodes, if there are any.

    Attributes:
        timed_out: whether the run has reached ``stop_at``.
    """

    def __init__(
        self,
        processes: NodeProcesses,
        start: Callable[[ProcessName], WorkerProcess],
        restarts: RestartBudget,
        signals: SignalPipe,
        grace: float,
        stop_at: float | None,
        excluded: Set[int],
        log: Callable[[str], None],
        remote_stop: RemoteStop | None = None,
    ) -> None:
        self._processes = processes
        self._start = start
        self._workers: list[WorkerProcess] = []  # Also lost ones that were restarted.
        self._losses = WorkerLossPolicy(processes.expendable, restarts, self._add, log)
        self._signals = signals
        self._grace = grace
        self._stop_at = stop_at
        self._excluded = excluded
        self._log = log
        self._remote_stop = remote_stop
        self._shutdown = _Shutdown()
        self.timed_out = False

    def run(self) -> None:
        """Start all, wait until they have exited, and stop them if they must not continue."""
        for process in self._processes.all:
            self._add(process)
        while self._running and not self._shutdown.is_given_up:
            numbers, ready = self._signals.wait(self._seconds_to_wait(), [*self._files])
            for worker in self._running:
                if worker.file in ready:
                    worker.read_exit()
            for number in numbers:
                self._on_signal(number)
            self._check_done()
            self._check_failures()
            if not self._shutdown.has_begun:
                self._losses.update(self._not_saved)
            self._check_remote_stop()
            self._check_limits()
        if self.failure is not None:
            self._losses.return_restarts()
        self._log_failures_after_done()

    def kill_and_reap(self) -> None:
        """Kill all remaining processes, and wait until they are gone and all output is written."""
        for worker in self._workers:
            worker.kill()
        until = time.monotonic() + _REAP_SECONDS
        for worker in self._workers:
            worker.wait(until)
        if not terminate_children(0, self._excluded):  # There are children only if a reaper was killed.
            self._log("a process could not be killed; a driver or a disk may block it.")
        until = time.monotonic() + _DRAIN_SECONDS
        for worker in self._workers:
            worker.drain(until)
            if worker.log_error is not None:
                self._log(f"the log file of {worker.process.name} is incomplete: {worker.log_error}.")

    @property
    def failure(self) -> ProcessFailure | None:
        """The root cause, if a failure of a worker is the reason of the end."""
        failures = self._failures(self._workers)
        was_stopped = self._shutdown.stop_signal is not None or self.timed_out
        return root_cause(failures) if failures and not was_stopped else None

    @property
    def code(self) -> int:
        """The exit code of the job after this generation."""
        stop_signal = self._shutdown.stop_signal
        if self._shutdown.done_at is not None and not self._failures(self._workers):
            return DONE
        if self.timed_out:
            return NO_PROGRESS
        if stop_signal is not None:
            if self._codes <= {DONE, PEER_LOST}:
                return PEER_LOST if PEER_LOST in self._codes else DONE
            return 128 + stop_signal
        if self._shutdown.is_remote and self.failure is None:
            return PEER_LOST if any(worker.code for worker in self._workers) else DONE
        return DONE if self.failure is None else job_exit_code(self.failure.code)

    @property
    def was_asked_to_stop(self) -> bool:
        """Whether the supervisor was sent a signal to stop, or USR1 and all workers have saved and ended."""
        has_saved = self._shutdown.is_announced and self.code == PEER_LOST
        return self._shutdown.is_requested or (has_saved and self._codes <= {DONE, PEER_LOST})

    @property
    def is_final(self) -> bool:
        """Whether a restart is not wanted or would not help."""
        return self.code == USAGE or self.timed_out or self.was_asked_to_stop

    @property
    def _files(self) -> Iterator[int]:
        yield from (worker.file for worker in self._running)
        if self._remote_stop is not None and self._shutdown.stopped_at is None:
            yield self._remote_stop.fileno()

    @property
    def _running(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.code is None]

    @property
    def _codes(self) -> set[int | None]:
        """The exit codes of those whose loss the job has not tolerated."""
        return {worker.code for worker in self._workers if worker not in self._losses.tolerated}

    @property
    def _not_saved(self) -> list[WorkerProcess]:
        """All but those that have ended with 75 after USR1, as they were asked to: such a worker is not lost."""
        if not self._shutdown.is_announced:
            return self._workers
        announced_at = self._shutdown.announced_at
        return [worker for worker in self._workers if worker.code != PEER_LOST or worker.ended_at < announced_at]

    @property
    def _running_names(self) -> str:
        return format_names(worker.process for worker in self._running)

    def _failures(self, workers: Iterable[WorkerProcess]) -> list[ProcessFailure]:
        """Failures of these workers that end the job: not those after the stop signal, or after the leader was done."""
        times = (self._shutdown.stopped_at, self._shutdown.done_at)
        until = min(float("inf") if time is None else time for time in times)
        failures = [worker.failure for worker in workers]
        return self._losses.fatal(failure for failure in failures if failure and failure.when <= until)

    def _add(self, process: ProcessName) -> None:
        self._workers.append(self._start(process))

    def _on_signal(self, number: int) -> None:
        if number not in STOP_SIGNALS:
            if number == signal.SIGUSR1 and not self._shutdown.is_announced:
                self._shutdown.announced_at = time.monotonic()
                self._losses.delay_restarts(self._shutdown.announced_at + _SAVE_SECONDS)
            self._send(number)
            return
        self._shutdown.is_requested = True
        self._shutdown.interrupts += number == signal.SIGINT
        again = "; again kills them at once" if number == signal.SIGINT else ""
        if self._shutdown.stopped_at is None:
            self._shutdown.stop_signal = None if self._failures(self._not_saved) else number
            self._log(f"{signal.Signals(number).name}: the workers have {self._grace:g} s to exit{again}.")
            self._stop(signal.SIGTERM if number == signal.SIGPIPE else number)
        elif number == signal.SIGINT and self._shutdown.interrupts > 1:
            self._kill("killed.")
        elif number == signal.SIGINT:
            # It may have the same cause as the first signal: Ctrl-C also ends what reads the output.
            self._log(f"SIGINT: the workers are ending{again}.")

    def _check_done(self) -> None:
        exits = [
            worker.ended_at
            for worker in self._workers
            if worker.process == self._processes.leader and worker.code == DONE
        ]
        if exits and not self._shutdown.has_begun:
            self._shutdown.done_at = exits[0]

    def _check_failures(self) -> None:
        failures = self._failures(self._not_saved) if self._shutdown.stopped_at is None and self._running else []
        if failures:
            cause = root_cause(failures)
            if time.monotonic() >= cause.confirmed_at:
                self._log(f"{cause.headline}; the other processes have {self._grace:g} s to exit.")
                self._stop(signal.SIGTERM)

    def _check_remote_stop(self) -> None:
        if self._remote_stop is None or self._shutdown.stopped_at is not None:
            return
        # Also if the descriptor is not ready: the request may have been received together with the start.
        reason = self._remote_stop.read()
        if reason is not None:
            self._shutdown.is_remote = True
            self._log(f"{reason}; the workers here have {self._grace:g} s to exit.")
            self._stop(signal.SIGTERM)

    def _check_limits(self) -> None:
        now, shutdown = time.monotonic(), self._shutdown
        if shutdown.stopped_at is not None:
            if shutdown.killed_at is None and now >= shutdown.stopped_at + self._grace:
                self._kill(f"did not exit within {self._grace:g} s: killed.")
        elif shutdown.done_at is not None and now >= shutdown.done_at + self._grace and self._running:
            self._log(
                f"{self._running_names} did not exit within {self._grace:g} s after the job was done: sent SIGTERM."
            )
            self._stop(signal.SIGTERM)
        elif self._stop_at is not None and now >= self._stop_at and self._running:
            self._on_timeout()

    def _on_timeout(self) -> None:
        if self.timed_out:
            self._stop(signal.SIGTERM)
        else:
            self.timed_out = True
            self._log("the run takes longer than --timeout allows.")
            self._send(signal.SIGUSR2)
            self._stop_at = time.monotonic() + _DUMP_SECONDS

    def _stop(self, number: int) -> None:
        self._shutdown.stopped_at = time.monotonic()
        self._send(number)

    def _send(self, number: int) -> None:
        for worker in self._running:
            worker.send(number)

    def _kill(self, action: str) -> None:
        self._shutdown.killed_at = time.monotonic()
        if self._running:
            self._log(f"{self._running_names} {action}")
        for worker in self._running:
            worker.kill()

    def _log_failures_after_done(self) -> None:
        done_at, stopped_at = self._shutdown.done_at, self._shutdown.stopped_at
        until = float("inf") if stopped_at is None else stopped_at
        for failure in filter(None, (worker.failure for worker in self._workers)):
            if done_at is not None and done_at < failure.when <= until:
                self._log(f"{failure.headline}, after the job was done.")

    def _seconds_to_wait(self) -> float | None:
        due = self._seconds_to_deadline()
        if self._remote_stop is None:
            return due
        heartbeat = self._remote_stop.send_heartbeat_if_due()
        return heartbeat if due is None else min(due, heartbeat)

    def _seconds_to_deadline(self) -> float | None:
        """Return the seconds until the next check that neither a signal nor a worker triggers; None if there is none."""
        if self._shutdown.killed_at is not None:
            due = self._shutdown.killed_at + _REAP_SECONDS
        elif self._shutdown.stopped_at is not None:
            due = self._shutdown.stopped_at + self._grace
        else:
            due = min(self._deadlines(), default=float("inf"))
        return None if due == float("inf") else due - time.monotonic()

    def _deadlines(self) -> Iterator[float]:
        yield from (failure.confirmed_at for failure in self._failures(self._not_saved))
        if not self._shutdown.has_begun:
            yield from self._losses.deadlines(self._not_saved)
        if self._shutdown.is_announced:
            yield self._shutdown.announced_at + _SAVE_SECONDS
        if self._shutdown.done_at is not None:
            yield self._shutdown.done_at + self._grace
        if self._stop_at is not None:
            yield self._stop_at
