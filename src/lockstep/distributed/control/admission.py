"""Who has joined a job, and why somebody may not: the chief's decisions, without a socket."""

from dataclasses import dataclass

from lockstep.distributed.cluster.worker_group import WorkerGroup
from lockstep.distributed.control.consistency import first_difference
from lockstep.distributed.control.peer import Peer

__all__ = ["Admission", "JoinRejection"]


@dataclass(frozen=True)
class JoinRejection:
    """Why a worker may not join.

    Args:
        sentence: for the user.
        everyone: whether the job cannot start at all, so that all workers are told.
        again: whether to ask again later is right.
        exit_code: what a process ends with that was refused; None: as after any error of the program.
    """

    sentence: str
    everyone: bool = False
    again: bool = False
    exit_code: int | None = None


class Admission:
    """The workers that have joined.

    Args:
        group: as the chief was told.
        chief: the chief itself, whose identity all others must have.
    """

    def __init__(self, group: WorkerGroup, chief: Peer) -> None:
        self._group = group
        self._chief = chief
        self.peers: dict[int, Peer] = {0: chief}

    @property
    def is_complete(self) -> bool:
        """Whether all workers are here."""
        return len(self.peers) == self._group.workers

    def judge(self, peer: Peer) -> JoinRejection | None:
        """Why ``peer`` may not join; None where it may."""
        if peer.generation != self._chief.generation:
            return self._of_another_generation(peer)
        if peer.workers != self._group.workers:
            return JoinRejection(
                f"{peer} was started with {_workers(peer.workers)}, the chief ({self._chief.process}) with "
                f"{_workers(self._group.workers)}: start all with the same number.",
                everyone=not self.is_complete,
            )
        if not 0 <= peer.index < self._group.workers:
            return JoinRejection(
                f"{peer} has no place: the indices of {_workers(peer.workers)} are 0 to {peer.workers - 1}.",
                everyone=not self.is_complete,
            )
        return self._of_a_duplicate(peer) or self._of_another_identity(peer)

    def missing(self) -> list[str]:
        """Names of the workers that have not joined, with their addresses as far as these are known."""
        return [self.name(index) for index in range(self._group.workers) if index not in self.peers]

    def name(self, index: int) -> str:
        """A worker as the scheduler named it, whether it is here or not."""
        return self._group.name_of(index)

    def _of_another_generation(self, peer: Peer) -> JoinRejection:
        ours = self._chief.generation
        if peer.generation > ours:
            return JoinRejection(
                f"the chief ({self._chief.process}) is of start {ours} of the job and this worker of start "
                f"{peer.generation}: an earlier chief still runs",
                again=True,
            )
        return JoinRejection(
            f"{peer} is left over from start {peer.generation} of the job, the chief ({self._chief.process}) is of start "
            f"{ours}: end it."
        )

    def _of_a_duplicate(self, peer: Peer) -> JoinRejection | None:
        first = self.peers.get(peer.index)
        if first is None:
            return None
        return JoinRejection(
            f"Two processes say that they are worker {peer.index} of {peer.workers}: {first.process} and {peer.process}: "
            f"start each worker once, with an index of its own.",
            everyone=not self.is_complete,
        )

    def _of_another_identity(self, peer: Peer) -> JoinRejection | None:
        found = first_difference(peer.identity, self._chief.identity)
        if found is None:
            return None
        entry, here, there = found
        return JoinRejection(
            f"{peer} differs from the chief ({self._chief.process}) in {entry!r}: it has {here}, the chief {there}. All "
            f"workers need the same.",
            everyone=True,
        )


def _workers(number: int) -> str:
    return f"{number} worker{'s' if number != 1 else ''}"
