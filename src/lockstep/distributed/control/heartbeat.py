"""How far this worker is, as it tells the chief, and for how long the chief was not heard."""

import time
from collections.abc import Callable
from typing import Any

from lockstep.distributed.control.failure_detector import START, SuspendDetector, failure
from lockstep.distributed.control.failures import Failure, FailureKind
from lockstep.distributed.control.peer import Peer

__all__ = ["HeartbeatState"]


class HeartbeatState:
    """The heartbeats of one worker.

    Args:
        chief: who hears them.
        clock: gives seconds, and is not set back.
    """

    def __init__(self, chief: Peer, clock: Callable[[], float] = time.monotonic) -> None:
        self._chief, self._clock = chief, clock
        self._awake, self._heard = SuspendDetector(clock), clock()
        self.report(0, START)

    def report(self, step: int, activity: str) -> None:
        """This worker is there, from now on."""
        self._now = (step, activity, self._clock())

    @property
    def progress(self) -> tuple[int, str]:
        """Where it is."""
        return self._now[:2]

    def heard(self) -> None:
        """The chief has said something."""
        self._heard = self._clock()

    def tick(self) -> None:
        """Say that this process runs, for each heartbeat."""
        self._awake.tick()

    @property
    def message(self) -> dict[str, Any]:
        """What the chief is told."""
        step, activity, since = self._now
        age = max(0.0, self._clock() - max(since, self._awake.since))
        return {"kind": "beat", "step": int(step), "activity": activity, "seconds": age}

    @property
    def silence(self) -> float:
        """For how many seconds, while this process ran, the chief was not heard."""
        return self._clock() - max(self._heard, self._awake.since)

    def silent_chief(self) -> Failure:
        """That the chief is silent."""
        what = f"does not answer: no sign of life for {self.silence:.0f} s (stopped, or cut off from the network)."
        return failure(FailureKind.SILENT, self._chief, f"{what} It was the chief.")
