"""Workers that a job goes on without: which they are, and when they are started again."""

import time
from collections.abc import Callable, Iterable, Sequence, Set

from lockstep.distributed.cluster.exit_codes import USER_ERROR
from lockstep.launch.failure_report import USAGE, ProcessFailure
from lockstep.launch.process_names import ProcessName
from lockstep.launch.restart_budget import RestartBudget, pause_before
from lockstep.launch.worker_process import WorkerProcess

__all__ = ["WorkerLossPolicy"]

_FINAL = (USER_ERROR, USAGE)  # The next process would end alike, and so would the other workers.


class WorkerLossPolicy:
    """The losses of one generation.

    Args:
        can_lose: the job goes on without these, as long as there is one of them; empty: nobody can be spared.
        restarts: those that are left for the whole job.
        start: starts the process of a task again.
        say: takes lines for the user.

    Attributes:
        borne: the workers that were lost and told of.
    """

    def __init__(
        self,
        can_lose: Set[ProcessName],
        restarts: RestartBudget,
        start: Callable[[ProcessName], None],
        say: Callable[[str], None],
    ) -> None:
        self._can_lose, self._restarts, self._start, self._say = can_lose, restarts, start, say
        self.borne: set[WorkerProcess] = set()
        self._gone: set[ProcessName] = set()
        self._due: dict[ProcessName, float] = {}  # When to start it again, on the monotonic clock.

    def fatal(self, failures: Iterable[ProcessFailure]) -> list[ProcessFailure]:
        """Those of the failures that the job cannot go on after."""
        nobody_is_left = self._gone == self._can_lose
        return [failure for failure in failures if nobody_is_left or not self._is_bearable(failure)]

    def note(self, workers: Sequence[WorkerProcess]) -> None:
        """Look who has been lost by now, and start again whose pause is over."""
        now = time.monotonic()
        for worker in [*workers]:
            failure = worker.failure if worker not in self.borne else None
            if failure is not None and self._is_bearable(failure) and failure.certain_at <= now:
                self.borne.add(worker)
                self._on_loss(failure, now)
        for task in [task for task, due in self._due.items() if due <= now]:
            del self._due[task]
            self._start(task)

    def due(self, workers: Sequence[WorkerProcess]) -> list[float]:
        """When ``note`` has something to do next, on the monotonic clock."""
        failures = (worker.failure for worker in workers if worker not in self.borne)
        lost = (failure.certain_at for failure in failures if failure is not None and self._is_bearable(failure))
        return [*lost, *self._due.values()]

    def _is_bearable(self, failure: ProcessFailure) -> bool:
        return failure.task in self._can_lose and failure.code not in _FINAL

    def _on_loss(self, failure: ProcessFailure, now: float) -> None:
        restart = self._restarts.take()
        if restart is not None:
            seconds = pause_before(restart)
            self._due[failure.task] = now + seconds
            what = (
                f"the others go on, and it starts again in {seconds:g} s (restart {restart} of {self._restarts.most})"
            )
        else:
            self._gone.add(failure.task)
            what = "no worker is left" if self._gone == self._can_lose else "the others go on without it"
        self._say(f"{failure.headline}; {what}.")
