"""Who is missing or stuck: arithmetic on what was last heard of the workers.

A worker that is not heard of for ``timeout`` is silent. One that does not go on for ``timeout``, in an activity of
``MAY_TAKE_LONG`` for ``long``, is stuck where another waits for ``timeout`` in a step to which it has not come; one that has come to
its end never will, so that nobody waits for it for long. Where all stay in one step, which may be a long one, that takes ``long`` too.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep._errors import OptionError
from lockstep.distributed.control.failures import Failure, FailureKind
from lockstep.distributed.control.peer import Peer
from lockstep.distributed.control.wait_logger import listed

__all__ = [
    "BEAT_SECONDS",
    "MAY_TAKE_LONG",
    "QUIET",
    "START",
    "STEP",
    "WAITING",
    "Limits",
    "SuspendDetector",
    "WorkerStatus",
    "cause",
    "failure",
    "look",
    "overdue",
]

BEAT_SECONDS = 0.5
START = "start"
STEP = "step"
WAITING = "waiting for others at "  # and the topic: in a call of the session.
MAY_TAKE_LONG = (START, "compiling")

QUIET = 6 * BEAT_SECONDS  # Heartbeats are not that late.
_PAUSE = 4 * BEAT_SECONDS


@dataclass(frozen=True)
class Limits:
    """How long what may take, in seconds.

    Args:
        timeout: a wait, and the silence of a worker.
        long: an activity of ``MAY_TAKE_LONG``, and a step of all workers.
        start: the wait for all workers at the start; None: ``timeout``.

    Raises:
        OptionError: a limit that some heartbeats that are late would break, or that is below the other.
    """

    timeout: float
    long: float
    start: float | None = None

    @property
    def until_all_are_here(self) -> float:
        """Limit of the wait at the start."""
        return self.timeout if self.start is None else self.start

    def __post_init__(self) -> None:
        least = 3 * BEAT_SECONDS
        if not least <= self.timeout <= self.long:
            raise OptionError(
                f"timeout_seconds, long_seconds: expected {least:g} or more, and the second no less than the first, as "
                f"heartbeats come each {BEAT_SECONDS:g} s; got {self.timeout:g} and {self.long:g}."
            )
        if not self.until_all_are_here >= 0:
            raise OptionError(f"start_seconds: expected 0 or more, got {self.until_all_are_here:g}.")


@dataclass(frozen=True)
class WorkerStatus:
    """What is known of one worker.

    Args:
        peer: who it is.
        heard: when it was last heard of; times are the observer's, in seconds.
        step: the last that it has come to.
        activity: what its main thread does there.
        since: when it began to.
        left: whether it has come to its end in order.
        facts: numbers that it says of itself, for those who watch.
    """

    peer: Peer
    heard: float
    step: int = 0
    activity: str = START
    since: float = 0.0
    left: bool = False
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def doing(self) -> str:
        """What it does, for messages."""
        return f"in {self.activity!r} at step {self.step}"


def look(now: float, beats: Sequence[WorkerStatus], limits: Limits) -> Failure | None:
    """Why the job cannot go on; None where all is well.

    Example:
        >>> here, there = Peer(0, 2, "a", 70), Peer(1, 2, "b", 71)
        >>> look(65.0, [WorkerStatus(here, 65, 8, "step", 4), WorkerStatus(there, 64.8, 7, "data", 3)], Limits(60, 1800)).sentence
        "worker 1 of 2 (b, process 71) is stuck: in 'data' at step 7 for 62 s; worker 0 waits for it in step 8."
    """
    return (
        _silent(now, beats, limits)
        or _left_too_early(now, beats)
        or _stuck(now, beats, limits)
        or _standstill(now, beats, limits)
    )


def overdue(now: float, missing: Sequence[WorkerStatus], waits: Peer, what: str) -> Failure:
    """Why a wait has come to its limit.

    Args:
        now: the time.
        missing: those that ``waits`` waits for.
        waits: who waits.
        what: for what it waits, and since when.
    """
    beat = min(missing, key=lambda beat: (beat.activity in MAY_TAKE_LONG, beat.step, beat.since))
    if now - beat.heard > QUIET:
        return _silence(now, beat)
    done = f"{beat.doing} for {now - beat.since:.0f} s; worker {waits.index} waits for it at {what}."
    return failure(FailureKind.STUCK, beat.peer, f"is stuck: {done}")


def cause(now: float, found: Failure, beats: Sequence[WorkerStatus]) -> Failure:
    """What ``found`` comes of: a death or an exception may be what another worker's silence, or early end, has led to.

    Args:
        now: the time.
        found: what was seen first.
        beats: of all workers.
    """
    if found.kind not in (FailureKind.DIED, FailureKind.FAILED):
        return found
    quiet = [beat for beat in beats if not beat.left and beat.peer.index != found.worker and now - beat.heard > QUIET]
    own = [beat for beat in beats if beat.peer.index == found.worker]
    first = _silence(now, min(quiet, key=lambda beat: beat.heard)) if quiet else _left_before(own, beats)
    return found if first is None else replace(first, sentence=f"{first.sentence} Then {found.sentence}")


def _silent(now: float, beats: Sequence[WorkerStatus], limits: Limits) -> Failure | None:
    found = [beat for beat in beats if not beat.left and now - beat.heard > limits.timeout]
    if not found:
        return None
    return _silence(now, min(found, key=lambda beat: beat.heard))


def _silence(now: float, beat: WorkerStatus) -> Failure:
    return failure(
        FailureKind.SILENT,
        beat.peer,
        f"does not answer: no sign of life for {now - beat.heard:.0f} s, last {beat.doing} "
        f"(stopped, or cut off from the network).",
    )


def _left_too_early(now: float, beats: Sequence[WorkerStatus]) -> Failure | None:
    return _left_before([beat for beat in beats if _has_waited(now, beat, QUIET)], beats)


def _left_before(going_on: Sequence[WorkerStatus], beats: Sequence[WorkerStatus]) -> Failure | None:
    """The end of a worker before a step to which one of those that go on has come."""
    first = max(going_on, key=lambda beat: beat.step, default=None)
    early = [beat for beat in beats if first is not None and beat.left and beat.step < first.step]
    if first is None or not early:
        return None
    beat = min(early, key=lambda beat: beat.step)
    what = f"came to its end after step {beat.step}; worker {first.peer.index} waits for it in step {first.step}."
    return failure(FailureKind.LEFT, beat.peer, what)


def _stuck(now: float, beats: Sequence[WorkerStatus], limits: Limits) -> Failure | None:
    waiting = [beat for beat in beats if _has_waited(now, beat, limits.timeout)]
    if not waiting:
        return None
    first = max(waiting, key=lambda beat: beat.step)
    behind = [beat for beat in beats if _is_behind(beat, first.step)]
    if not behind or any(_goes_on(now, beat, limits) for beat in behind):
        return None  # One that compiles, say, may be what all the others wait for.
    beat = min(behind, key=lambda beat: (beat.activity.startswith(WAITING), beat.step, beat.since))
    waits = f"worker {first.peer.index} waits for it in step {first.step}."
    if beat.left:
        return failure(FailureKind.LEFT, beat.peer, f"came to its end after step {beat.step}; {waits}")
    return failure(FailureKind.STUCK, beat.peer, f"is stuck: {beat.doing} for {now - beat.since:.0f} s; {waits}")


def _standstill(now: float, beats: Sequence[WorkerStatus], limits: Limits) -> Failure | None:
    staying = [beat for beat in beats if not beat.left]
    if len(staying) < 2 or not any(_has_waited(now, beat, limits.long) for beat in staying):
        return None
    if any(now - beat.since <= limits.long for beat in staying):
        return None
    beat = min(staying, key=lambda beat: (beat.step, beat.since))
    places = listed(f"worker {other.peer.index} {other.doing}" for other in staying)
    return failure(FailureKind.STUCK, beat.peer, f"is stuck for {now - beat.since:.0f} s, as are all others: {places}.")


def failure(kind: FailureKind, peer: Peer, what: str) -> Failure:
    """A failure of ``peer``; ``what`` ends the sentence that begins with its name."""
    return Failure(kind, peer.index, peer.host, peer.pid, f"{peer} {what}")


def _is_behind(beat: WorkerStatus, step: int) -> bool:
    """Whether it has not come to ``step``: there it may still read the data."""
    return beat.step < step or (beat.step == step and beat.activity != STEP)


def _has_waited(now: float, beat: WorkerStatus, seconds: float) -> bool:
    return not beat.left and beat.activity == STEP and now - beat.since > seconds


def _goes_on(now: float, beat: WorkerStatus, limits: Limits) -> bool:
    limit = limits.long if beat.activity in MAY_TAKE_LONG else limits.timeout
    return not beat.left and now - beat.since <= limit


class SuspendDetector:
    """Since when this process runs without a pause: one that was stopped itself has heard nobody, and means nothing.

    Args:
        clock: gives seconds, and is not set back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = self.since = clock()

    def tick(self) -> float:
        """Say that this process runs, each ``BEAT_SECONDS``; gives the time."""
        now = self._clock()
        if now - self._last > _PAUSE:
            self.since = now
        self._last = now
        return now
