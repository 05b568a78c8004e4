"""Admission of workers to a job: the decisions of the chief, without a socket."""

from dataclasses import dataclass

from lockstep._logging import abridged, counted
from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.control.handshake import Peer
from lockstep.distributed.control.value_differences import first_difference


@dataclass(frozen=True)
class JoinRejection:
    """Why a worker may not join.

    Args:
        sentence: for the user.
        everyone: whether the job cannot start at all, so that all workers are rejected.
        again: whether the worker should try again later.
        exit_code: exit code of the rejected process; None: as after any error of the program.
    """

    sentence: str
    everyone: bool = False
    again: bool = False
    exit_code: int | None = None


class Admission:
    """The workers of the group that have joined; all must have the identity of the chief.

    Attributes:
        peers: the workers that have joined, by index.
    """

    def __init__(self, group: WorkerGroup, chief: Peer) -> None:
        self._group = group
        self._chief = chief
        self.peers: dict[int, Peer] = {0: chief}

    @property
    def is_complete(self) -> bool:
        """Whether all workers have joined."""
        return len(self.peers) == self._group.workers

    def validate(self, peer: Peer) -> JoinRejection | None:
        """Return why ``peer`` may not join; None if it may."""
        if peer.generation != self._chief.generation:
            return self._reject_generation(peer)
        if peer.workers != self._group.workers:
            return JoinRejection(
                f"{peer} was started with {counted(peer.workers, 'worker')}, the chief ({self._chief.process}) with "
                f"{counted(self._group.workers, 'worker')}. Fix: start all with the same number.",
                everyone=not self.is_complete,
            )
        if not 0 <= peer.index < self._group.workers:
            return JoinRejection(
                f"{peer} has no place: the indices of {counted(peer.workers, 'worker')} are 0 to {peer.workers - 1}. Fix: number them from 0.",
                everyone=not self.is_complete,
            )
        return self._check_duplicate(peer) or self._check_identity(peer)

    def missing(self) -> list[str]:
        """Return the names of the workers that have not joined, with their addresses if known; of many, the first ones."""
        names = [self._group.name_of(index) for index in range(self._group.workers) if index not in self.peers]
        return abridged(names)

    def _reject_generation(self, peer: Peer) -> JoinRejection:
        ours = self._chief.generation
        if peer.generation > ours:
            return JoinRejection(
                f"the chief ({self._chief.process}) is of start {ours} of the job and this worker of start "
                f"{peer.generation}: an earlier chief still runs",
                again=True,
            )
        return JoinRejection(
            f"{peer} is left over from start {peer.generation} of the job, the chief ({self._chief.process}) is of start "
            f"{ours}. Fix: end it."
        )

    def _check_duplicate(self, peer: Peer) -> JoinRejection | None:
        first = self.peers.get(peer.index)
        if first is None:
            return None
        return JoinRejection(
            f"Two processes say that they are worker {peer.index} of {peer.workers}: {first.process} and {peer.process}. "
            "Fix: start each worker once, with its own index.",
            everyone=not self.is_complete,
            again=self.is_complete,  # The first may be lost, and its connection not closed yet: its machine was reset.
        )

    def _check_identity(self, peer: Peer) -> JoinRejection | None:
        found = first_difference(peer.identity, self._chief.identity)
        if found is None:
            return None
        entry, here, there = found
        return JoinRejection(
            f"{peer} differs from the chief ({self._chief.process}) in {entry!r}: it has {here}, the chief {there}. Fix: "
            "give all workers the same.",
            everyone=True,
        )
