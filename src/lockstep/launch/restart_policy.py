"""The restart policy: the budget and backoff of restarts, and which lost workers a job tolerates and restarts alone."""

import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field

from lockstep._errors import USER_ERROR
from lockstep.launch.rank_assignment import ProcessName
from lockstep.launch.worker_process import USAGE, ProcessFailure, WorkerProcess

_MAX_BACKOFF = 30.0  # seconds; the first wait is 1 s, each further one twice as long
_FINAL = (USER_ERROR, USAGE)  # The restarted process would fail alike, and so would the other workers.


def backoff_seconds(restart: int) -> float:
    """Return the seconds to wait before a restart, of which 1 is the first.

    Example:
        >>> [backoff_seconds(restart) for restart in (1, 2, 3, 9)]
        [1.0, 2.0, 4.0, 30.0]
    """
    return min(_MAX_BACKOFF, 2.0 ** (restart - 1))


@dataclass
class RestartBudget:
    """Remaining restarts of a job, ``limit`` in total; a restart of all processes and that of a single worker each count as one.

    Example:
        >>> restarts = RestartBudget(1)
        >>> restarts.take(), restarts.take()
        (1, None)
    """

    limit: int
    _taken: int = field(default=0, init=False)

    def take(self) -> int | None:
        """Use one restart and return its number, from 1; return None if none is left."""
        if self._taken == self.limit:
            return None
        self._taken += 1
        return self._taken

    def give_back(self, restarts: int) -> None:
        """Return restarts that were taken."""
        self._taken -= restarts


class WorkerLossPolicy:
    """Lost workers of one generation.

    The job continues without the ``expendable`` ones, as long as one of them remains; without any, every loss is fatal. ``restarts``
    are those of the whole job.

    Attributes:
        tolerated: the workers whose loss was logged and does not end the job.
    """

    def __init__(
        self,
        expendable: Set[ProcessName],
        restarts: RestartBudget,
        start: Callable[[ProcessName], None],
        log: Callable[[str], None],
    ) -> None:
        self._expendable, self._restarts, self._start, self._log = expendable, restarts, start, log
        self.tolerated: set[WorkerProcess] = set()
        self._lost: set[ProcessName] = set()  # Lost for good: no restart was left.
        self._restart_at: dict[ProcessName, float] = {}  # On the monotonic clock.
        self._returnable = 0  # Restarts of workers that have only lost another process.
        self._not_before = float("-inf")  # The earliest time of a restart, on the monotonic clock.

    def fatal(self, failures: Iterable[ProcessFailure]) -> list[ProcessFailure]:
        """Return those of the failures that end the job."""
        none_left = self._lost == self._expendable
        return [failure for failure in failures if none_left or not self._is_tolerable(failure)]

    def update(self, workers: Sequence[WorkerProcess]) -> None:
        """Register new losses, and restart workers whose backoff is over."""
        now = time.monotonic()
        for worker in workers:
            failure = worker.failure if worker not in self.tolerated else None
            if failure is not None and self._is_tolerable(failure) and failure.confirmed_at <= now:
                self.tolerated.add(worker)
                self._on_loss(failure, now)
        for process in [process for process, restart_at in self._restart_at.items() if restart_at <= now]:
            del self._restart_at[process]
            self._start(process)

    def delay_restarts(self, until: float) -> None:
        """Restart no worker before ``until``, as the job is about to end, but the last one: without it no batch is finished."""
        self._not_before = until
        if self._lost | self._restart_at.keys() < self._expendable:
            self._restart_at = {process: max(at, until) for process, at in self._restart_at.items()}

    def return_restarts(self) -> None:
        """Return the restarts of workers that had only lost another process, as the job has failed of it."""
        self._restarts.give_back(self._returnable)

    def deadlines(self, workers: Sequence[WorkerProcess]) -> list[float]:
        """Return the times at which ``update`` will have something to do, on the monotonic clock."""
        failures = (worker.failure for worker in workers if worker not in self.tolerated)
        losses = (failure.confirmed_at for failure in failures if failure is not None and self._is_tolerable(failure))
        return [*losses, *self._restart_at.values()]

    def _is_tolerable(self, failure: ProcessFailure) -> bool:
        return failure.process in self._expendable and failure.code not in _FINAL

    def _on_loss(self, failure: ProcessFailure, now: float) -> None:
        is_last = self._lost | self._restart_at.keys() | {failure.process} == self._expendable
        restart = self._restarts.take()
        if restart is not None:
            self._returnable += failure.is_consequence
            restart_at = now + backoff_seconds(restart)
            self._restart_at[failure.process] = restart_at if is_last else max(restart_at, self._not_before)
            action = (
                f"the other processes continue, and it restarts in {self._restart_at[failure.process] - now:.0f} s "
                f"(restart {restart} of {self._restarts.limit})"
            )
        else:
            self._lost.add(failure.process)
            action = (
                "no worker is left" if self._lost == self._expendable else "the other processes continue without it"
            )
        self._log(f"{failure.headline}; {action}.")
