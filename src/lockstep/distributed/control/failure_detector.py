"""Finds which worker is dead, silent or stuck, or has left early, and says how a job failed.

A worker is dead if its connection has closed before it left. A worker without a heartbeat for ``timeout`` is silent. A worker is stuck if
its step and activity have not changed for ``timeout`` (``long`` in an activity of ``MAY_TAKE_LONG``) while another has waited for
``timeout`` in a step that it has not reached. If a worker that has left, or has come to the end of ``fit``, never reached that step,
waiting is given up early. If no worker leaves its step for ``long``, they are stuck, too.
"""

import enum
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep._errors import NO_PROGRESS, PEER_LOST, USER_ERROR
from lockstep._logging import listed
from lockstep.distributed.control.handshake import Peer
from lockstep.distributed.control.heartbeat import (
    AT_END_OF_FIT,
    DATA,
    HEARTBEAT_SECONDS,
    MAY_TAKE_LONG,
    PROGRAM,
    QUIET,
    STEP,
    WAITING,
    Limits,
    WorkerStatus,
)


class FailureKind(enum.StrEnum):
    """The ways in which a worker fails."""

    DIED = "died"  # Its connection closed without a message that it leaves.
    SILENT = "silent"  # No heartbeat: stopped, or cut off.
    STUCK = "stuck"  # Its heartbeats come, its program goes no further, and others wait for it.
    LEFT = "left"  # It left in order, and others wait for it.
    FAILED = "failed"  # It said that its program raised an exception.


_CODES = {
    FailureKind.DIED: PEER_LOST,
    FailureKind.SILENT: PEER_LOST,
    FailureKind.STUCK: NO_PROGRESS,
    FailureKind.LEFT: USER_ERROR,
    FailureKind.FAILED: USER_ERROR,
}
_AGAIN = "Start the job again: with lockstep.callbacks.BackupAndRestore it resumes from its last checkpoint."
_FIXES = {
    FailureKind.DIED: f"Fix: see the end of its output; a process that the system killed for lack of memory prints nothing. {_AGAIN}",
    FailureKind.SILENT: "Fix: check that process, its machine and the network. If one call held Python's lock (GIL) so long, as "
    f"json.load of a large file does, raise CommunicationOptions(timeout_seconds=…). {_AGAIN}",
    FailureKind.STUCK: "Fix: see the stacks in its output; if it was only slow, raise CommunicationOptions(timeout_seconds=…) above that time.",
    FailureKind.LEFT: "Fix: give all workers the same number of epochs and of batches, and have callbacks "
    "stop training after the same step on all.",
    FailureKind.FAILED: "",  # What it raised says it.
}


@dataclass(frozen=True)
class Failure:
    """Why a job cannot continue: how a worker has failed, and all of this in a sentence for the user, with its machine and process.

    Example:
        >>> Failure(FailureKind.DIED, 1, "worker 1 of 2 (node1, process 77) died.").exit_code
        75
    """

    kind: FailureKind
    worker: int
    sentence: str

    @property
    def exit_code(self) -> int:
        """The exit code of every process of the job."""
        return _CODES[self.kind]

    @property
    def fix(self) -> str:
        """What to do, as a sentence with "Fix: " before it; empty if the failure is an error of the program."""
        return _FIXES[self.kind]

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "Failure":
        """Return the failure whose fields a message has."""
        return cls(**{**message, "kind": FailureKind(message["kind"])})


_PAUSE = 4 * HEARTBEAT_SECONDS
_MAX_LOAD = 0.25  # CPU time in a pause, by its length.


Wait = tuple[Collection[int], Collection[int]]  # Workers that have made a collective call, and those that have not.


def find_failure(
    now: float, statuses: Sequence[WorkerStatus], limits: Limits, waits: Sequence[Wait] = ()
) -> Failure | None:
    """Return why the job cannot continue; None if no worker has failed. ``waits`` are the collective calls that are not complete.

    Example:
        >>> here, there = Peer(0, 2, "a", 70), Peer(1, 2, "b", 71)
        >>> find_failure(65.0, [WorkerStatus(here, 65, 8, "step", 4), WorkerStatus(there, 64.8, 7, "data", 3)], Limits(60, 1800)).sentence
        "worker 1 of 2 (b, process 71) is stuck: in 'data' at step 7 for 62 s; worker 0 waits for it in step 8."
    """
    return (
        _find_silent(now, statuses, limits.timeout)
        or _find_left_early(now, statuses)
        or _find_ended_fit_early(statuses, waits)
        or _find_stuck(now, statuses, limits)
        or _find_standstill(now, statuses, limits)
    )


def find_death(status: WorkerStatus, ended: str | None) -> Failure | None:
    """Return the failure of a worker whose connection has closed, given its last status and how that ended; None if it had left."""
    if status.left:
        return None
    return make_failure(FailureKind.DIED, status.peer, f"died: {ended} unexpectedly, last {status.doing}.")


def find_overdue(now: float, missing: Sequence[WorkerStatus], waits: Peer, what: str) -> Failure:
    """Return the failure that has made the wait of ``waits`` for the ``missing`` workers exceed its limit; ``what`` says what it waits for, and
    since when.
    """
    status = min(missing, key=lambda status: (status.activity in MAY_TAKE_LONG, status.step, status.since))
    if now - status.heard > QUIET:
        return _silent_failure(now, status)
    done = f"{status.doing} for {now - status.since:.0f} s; worker {waits.index} waits for it at {what}."
    return make_failure(FailureKind.STUCK, status.peer, f"is stuck: {done}")


def find_cause(now: float, found: Failure, statuses: Sequence[WorkerStatus]) -> Failure:
    """Return the cause of the failure noticed first: a death or an exception may result from the silence, or early end, of another worker."""
    if found.kind not in (FailureKind.DIED, FailureKind.FAILED):
        return found
    own = [status for status in statuses if status.peer.index == found.worker]
    others = [status for status in statuses if status.peer.index != found.worker]
    first = _find_silent(now, others, QUIET) or _left_before(own, statuses)
    return found if first is None else replace(first, sentence=f"{first.sentence} Then {found.sentence}")


def _find_silent(now: float, statuses: Sequence[WorkerStatus], seconds: float) -> Failure | None:
    found = [status for status in statuses if not status.left and now - status.heard > seconds]
    return _silent_failure(now, min(found, key=lambda status: status.heard)) if found else None


def _silent_failure(now: float, status: WorkerStatus) -> Failure:
    return make_failure(
        FailureKind.SILENT,
        status.peer,
        f"does not answer: no heartbeat for {now - status.heard:.0f} s, last {status.doing} "
        f"(stopped, or cut off from the network).",
    )


def _find_left_early(now: float, statuses: Sequence[WorkerStatus]) -> Failure | None:
    return _left_before([status for status in statuses if _has_waited(now, status, QUIET)], statuses)


def _left_before(continuing: Sequence[WorkerStatus], statuses: Sequence[WorkerStatus]) -> Failure | None:
    """Return the failure of a worker that left before a step which one of ``continuing`` has reached."""
    first = max(continuing, key=lambda status: status.step, default=None)
    early = [status for status in statuses if first is not None and status.left and status.step < first.step]
    if first is None or not early:
        return None
    status = min(early, key=lambda status: status.step)
    what = f"finished after step {status.step}; worker {first.peer.index} waits for it in step {first.step}."
    return make_failure(FailureKind.LEFT, status.peer, what)


def _find_ended_fit_early(statuses: Sequence[WorkerStatus], waits: Sequence[Wait]) -> Failure | None:
    """Return the failure of a worker that waits at the end of ``fit`` for one that is in a later step, or waits for its next batch."""
    at_end = (status for status in statuses if status.activity == AT_END_OF_FIT)
    ended = min(at_end, key=lambda status: status.step, default=None)
    if ended is None:
        return None
    wait_for_it = {index for waiting, missing in waits if ended.peer.index in missing for index in waiting}
    for other in statuses:
        is_behind = other.step > ended.step or (other.activity == DATA and other.peer.index in wait_for_it)
        if is_behind and not other.left and ended.heard - max(ended.since, other.since) > QUIET:
            where = "with its next batch" if other.step == ended.step else f"in step {other.step}"
            what = f"ended fit after step {ended.step}; worker {other.peer.index} waits for it {where}."
            return make_failure(FailureKind.LEFT, ended.peer, what)
    return None


def _find_stuck(now: float, statuses: Sequence[WorkerStatus], limits: Limits) -> Failure | None:
    waiting = [status for status in statuses if _has_waited(now, status, limits.timeout)]
    if not waiting:
        return None
    first = max(waiting, key=lambda status: status.step)
    behind = [status for status in statuses if _has_not_reached(status, first.step)]
    if not behind or any(_makes_progress(now, status, limits) for status in behind):
        return None  # One that compiles, for instance, may be what all others wait for.
    status = min(behind, key=lambda status: (status.activity.startswith(WAITING), status.step, status.since))
    waits = f"worker {first.peer.index} waits for it in step {first.step}."
    if status.left:
        return make_failure(FailureKind.LEFT, status.peer, f"finished after step {status.step}; {waits}")
    return make_failure(
        FailureKind.STUCK, status.peer, f"is stuck: {status.doing} for {now - status.since:.0f} s; {waits}"
    )


def _find_standstill(now: float, statuses: Sequence[WorkerStatus], limits: Limits) -> Failure | None:
    staying = [status for status in statuses if not status.left]
    if len(staying) < 2 or not any(_has_waited(now, status, limits.long) for status in staying):
        return None
    if any(now - status.since <= limits.long for status in staying):
        return None
    status = min(staying, key=lambda status: (status.step, status.since))
    places = listed(f"worker {other.peer.index} {other.doing}" for other in staying)
    return make_failure(
        FailureKind.STUCK, status.peer, f"is stuck for {now - status.since:.0f} s, as are all others: {places}."
    )


def make_failure(kind: FailureKind, peer: Peer, what: str) -> Failure:
    """Return a failure of ``peer``; ``what`` completes the sentence that begins with its name."""
    return Failure(kind, peer.index, f"{peer} {what}")


def _has_not_reached(status: WorkerStatus, step: int) -> bool:
    """Whether a worker has not reached ``step``: it may still read the data for it."""
    return status.step < step or (status.step == step and status.activity not in (STEP, PROGRAM))


def _has_waited(now: float, status: WorkerStatus, seconds: float) -> bool:
    return not status.left and status.activity == STEP and now - status.since > seconds


def _makes_progress(now: float, status: WorkerStatus, limits: Limits) -> bool:
    limit = limits.long if status.activity in MAY_TAKE_LONG else limits.timeout
    return not status.left and now - status.since <= limit


class SuspendDetector:
    """Detects that this process was suspended: silences that fall into such a pause are not failures of other workers.

    The process has not run if it has used little CPU time. Else other threads have held Python's lock (the GIL). The process still
    runs for up to ``HEARTBEAT_SECONDS`` between a tick and the pause; the CPU time of these, much on many cores, is
    estimated from the ticks before and subtracted.

    Attributes:
        since: when the last pause ended.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.process_time
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._last = self.since = clock()
        self._last_cpu = cpu_clock()
        # CPU time in HEARTBEAT_SECONDS by each of the last two ticks, as one may follow the other at once.
        self._usual_cpu = (0.0, 0.0)

    def tick(self) -> float:
        """Note that this process runs, to be called each ``HEARTBEAT_SECONDS``; returns the time."""
        now, cpu = self._clock(), self._cpu_clock()
        seconds, used = now - self._last, cpu - self._last_cpu
        if seconds > _PAUSE and used - max(self._usual_cpu) < _MAX_LOAD * seconds:
            self.since = now
        self._usual_cpu = (self._usual_cpu[1], used * HEARTBEAT_SECONDS / max(seconds, HEARTBEAT_SECONDS))
        self._last, self._last_cpu = now, cpu
        return now
