"""Restart loop: yields the rank assignment of each generation of this node, decided here or by the rendezvous (``rendezvous.py``)."""

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lockstep.distributed.cluster.exit_codes import DONE
from lockstep.launch.failure_report import USAGE
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.local_workers import STOP_SIGNALS, LocalWorkers, RemoteStop
from lockstep.launch.rank_assignment import AnyRankAssignment, RankAssignment, ServerRankAssignment, reserved_addresses
from lockstep.launch.restart_policy import RestartBudget, backoff_seconds
from lockstep.launch.worker_process import SignalPipe


class RestartLoop(Protocol):
    """Decides about the generations of a node, one after the other."""

    @property
    def code(self) -> int:
        """Exit code of the job on this node."""

    @property
    def remote_stop(self) -> RemoteStop | None:
        """Source of requests of other nodes to stop a generation, if there are other nodes."""

    def assignments(self) -> Generator[AnyRankAssignment, None, None]:
        """Yield the rank assignment of each generation; it is resumed when the workers of the last one have ended."""

    def record(self, workers: LocalWorkers) -> None:
        """Record how a generation has ended here."""

    def close(self) -> None:
        """Release all resources."""


def is_final(workers: LocalWorkers) -> bool:
    """Whether a restart is not wanted or would not help."""
    return workers.code == USAGE or workers.timed_out or workers.was_asked_to_stop


@dataclass
class LocalRestartLoop:
    """Restart loop of a node that restarts its workers on its own.

    Args:
        job: what runs.
        node: rank of this node.
        restarts: the remaining ones.
        signals: of the supervisor.
        log: prints a line for the user.
    """

    job: LaunchConfig
    node: int
    restarts: RestartBudget
    signals: SignalPipe
    log: Callable[[str], None]
    remote_stop: None = None
    code: int = field(default=DONE, init=False)
    _is_over: bool = field(default=False, init=False)

    def assignments(self) -> Generator[AnyRankAssignment, None, None]:
        """Yield assignments as long as workers fail and may be restarted."""
        for generation in itertools.count():
            if generation and not self._take_restart():
                return
            with self._assignment(generation) as assignment:
                yield assignment
            if self._is_over:
                return

    def record(self, workers: LocalWorkers) -> None:
        """Record how a generation has ended here."""
        self.code, self._is_over = workers.code, workers.code == DONE or is_final(workers)

    def close(self) -> None:
        """Do nothing: there are no resources."""

    @contextlib.contextmanager
    def _assignment(self, generation: int) -> Iterator[AnyRankAssignment]:
        workers, nodes = self.job.workers, self.job.nodes
        if self.job.servers is not None:
            with reserved_addresses(sum(self.job.processes.values())) as addresses:
                yield ServerRankAssignment.at(generation, self.job.processes, addresses)
        else:
            with self._addresses() as (coordinator, known):
                first = self.node * workers
                yield RankAssignment(generation, self.node, nodes, workers, first, nodes * workers, coordinator, known)

    @contextlib.contextmanager
    def _addresses(self) -> Iterator[tuple[str, Sequence[str] | None]]:
        """Yield the address of worker 0, and those of all workers if they are known; free ports are chosen anew each time."""
        if self.job.coordinator_address is not None:
            yield self.job.coordinator_address, self.job.addresses
        else:
            with reserved_addresses(self.job.workers) as addresses:
                yield addresses[0], addresses

    def _take_restart(self) -> bool:
        """Take a restart and wait; return False if none is left or the supervisor was asked to stop during the wait."""
        restart = self.restarts.take()
        return restart is not None and self._wait_before(restart)

    def _wait_before(self, restart: int) -> bool:
        seconds = backoff_seconds(restart)
        self.log(f"restart {restart} of {self.job.max_restarts} in {seconds:g} s.")
        start_at = time.monotonic() + seconds
        while (left := start_at - time.monotonic()) > 0:
            numbers, _ = self.signals.wait(left)
            if set(numbers) & set(STOP_SIGNALS):
                return False
        return True
