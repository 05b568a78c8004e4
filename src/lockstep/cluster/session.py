"""What a worker holds of the control channel: it agrees with the others, says how far it is, and learns who is lost.

This file is the interface; what it promises is built in the commits that follow.
"""

import socket
from collections.abc import Callable, Mapping
from typing import Any

from lockstep._errors import ClusterError
from lockstep._logging import announce as announce_line
from lockstep.cluster.failure import Failure
from lockstep.cluster.group import WorkerGroup
from lockstep.cluster.peer import Peer

__all__ = ["Session", "join"]

Announce = Callable[[str], None]


def join(
    group: WorkerGroup,
    identity: Mapping[str, Any],
    *,
    information: Mapping[str, Any] | None = None,
    generation: int = 0,
    secret: bytes | None = None,
    timeout_seconds: float = 60.0,
    start_seconds: float | None = None,
    long_seconds: float = 1800.0,
    bind_host: str | None = None,
    listener: socket.socket | None = None,
    on_failure: Callable[[Failure], None] | None = None,
    announce: Announce = announce_line,
) -> "Session":
    """Meet the other workers of the job at the chief's address, and check that all were started alike.

    Args:
        group: who takes part. The chief, worker 0, listens at ``group.coordinator``; all others connect to it.
        identity: what must be equal on all workers, values of JSON: versions, the script's digest, options.
        information: what the others may know of this worker; see :attr:`Session.peers`.
        generation: how many times this job was started again. Leftovers of an earlier one are turned away.
        secret: the workers prove to each other that they know it. None: no proof is asked.
        timeout_seconds: limit of every wait but the two that follow.
        start_seconds: limit of the wait for all workers here; None: ``timeout_seconds``.
        long_seconds: limit for what may take long: a worker in the activity ``"start"`` or ``"compiling"``.
        bind_host: address of this machine that the chief listens on; None: chosen by the coordinator's host.
        listener: a socket that listens already, for the chief; then nothing is bound.
        on_failure: is called once, in a thread of the session, when the job cannot go on; None: the process says why and
            ends (:func:`lockstep.cluster.ending.end_process`).
        announce: takes the lines about waits.

    Raises:
        ClusterError: who is missing, or which worker differs in what; the same sentence on every worker.
    """
    raise ClusterError("The control channel is not built yet.")


class Session:
    """One worker's end of the control channel.

    All methods may be called from any thread. Calls that meet the other workers are counted by ``lane``: on each lane all
    workers make the same calls in the same order, and a lane serves one thread at a time.
    """

    group: WorkerGroup
    peers: tuple[Peer, ...]  # All workers, in order.
    generation: int
    failure: Failure | None  # Why the job cannot go on.

    def report(self, step: int, activity: str) -> None:
        """Say how far this worker is; costs less than a microsecond, so call it in each step.

        Args:
            step: a number that never falls and counts the same on all workers.
            activity: ``"step"`` while the others are needed to go on; ``"start"`` and ``"compiling"`` may take long; any other
                word names work of this worker alone: ``"data"``, ``"callback"``, ``"save"``.
        """

    def gather(
        self, topic: str, value: Any = None, *, lane: str = "main", timeout_seconds: float | None = None
    ) -> list[Any]:
        """The values of all workers, in their order.

        Args:
            topic: what is asked; another worker that asks something else at this point is an error that names both.
            value: of JSON.
            lane: which sequence of calls this belongs to.
            timeout_seconds: limit of the wait; None: the session's.

        Raises:
            ClusterError: somebody is missing, has left, or asks something else; or the job has failed.
        """
        raise ClusterError("The control channel is not built yet.")

    def agree(self, topic: str, value: Any, *, lane: str = "main", timeout_seconds: float | None = None) -> None:
        """Raise ClusterError on all workers, naming who differs in what, unless all values are equal."""
        raise ClusterError("The control channel is not built yet.")

    def broadcast(
        self, topic: str, value: Any = None, *, lane: str = "main", timeout_seconds: float | None = None
    ) -> Any:
        """The chief's value; all workers call it, and what the others give is not looked at."""
        raise ClusterError("The control channel is not built yet.")

    def barrier(self, topic: str, *, lane: str = "main", timeout_seconds: float | None = None) -> None:
        """Wait until all workers are here."""
        raise ClusterError("The control channel is not built yet.")

    def check(self) -> None:
        """Raise ClusterError if the job has failed; cheap."""

    def fail(self, summary: str) -> None:
        """Tell the others that this worker's program failed, as ``"ValueError: …"``; they are ended with that sentence."""

    def leave(self) -> None:
        """End in order; the chief waits for the others, as they need it. Runs by itself when the program ends."""
