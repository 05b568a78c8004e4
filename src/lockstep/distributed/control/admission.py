"""Admission of workers to a job, and what they disagree about: the chief's decisions, without a socket."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep._logging import counted, listed
from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.control.handshake import Peer


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
    """The workers that have joined.

    Args:
        group: the workers that the chief expects.
        chief: the chief itself, whose identity all workers must have.

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
                f"{counted(self._group.workers, 'worker')}: start all with the same number.",
                everyone=not self.is_complete,
            )
        if not 0 <= peer.index < self._group.workers:
            return JoinRejection(
                f"{peer} has no place: the indices of {counted(peer.workers, 'worker')} are 0 to {peer.workers - 1}.",
                everyone=not self.is_complete,
            )
        return self._check_duplicate(peer) or self._check_identity(peer)

    def missing(self) -> list[str]:
        """Return the names of the workers that have not joined, with their addresses if known."""
        return [self._group.name_of(index) for index in range(self._group.workers) if index not in self.peers]

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
            f"{ours}: end it."
        )

    def _check_duplicate(self, peer: Peer) -> JoinRejection | None:
        first = self.peers.get(peer.index)
        if first is None:
            return None
        return JoinRejection(
            f"Two processes say that they are worker {peer.index} of {peer.workers}: {first.process} and {peer.process}: "
            f"start each worker once, with an index of its own.",
            everyone=not self.is_complete,
            again=self.is_complete,  # The first may be lost, and its connection not closed yet: its machine was reset.
        )

    def _check_identity(self, peer: Peer) -> JoinRejection | None:
        found = first_difference(peer.identity, self._chief.identity)
        if found is None:
            return None
        entry, here, there = found
        return JoinRejection(
            f"{peer} differs from the chief ({self._chief.process}) in {entry!r}: it has {here}, the chief {there}. All "
            f"workers need the same.",
            everyone=True,
        )


_ABSENT = "nothing"
_MAX_SHOWN = 200  # Characters of a value in a sentence.


def first_difference(left: Any, right: Any, path: str = "") -> tuple[str, str, str] | None:
    """Return the path at which two values of JSON first differ, and what both have there; None if they are equal.

    Their JSON texts are compared: NaN equals NaN, and 1 differs from 1.0 and from true.

    Example:
        >>> first_difference({"jax": "0.10.2", "options": {"rows": 64}}, {"jax": "0.10.2", "options": {"rows": 32}})
        ('options.rows', '64', '32')
    """
    if _text(left) == _text(right):
        return None
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in sorted({*left, *right}):
            inner = f"{path}.{key}" if path else str(key)
            if key not in left or key not in right:
                return inner, _shown(left, key), _shown(right, key)
            if found := first_difference(left[key], right[key], inner):
                return found
    return path, _short(_text(left)), _short(_text(right))


@dataclass(frozen=True)
class Disagreement:
    """The workers whose value differs.

    Args:
        different: those workers, at least one.
        usual: a worker with the value of the majority; if there is none, the chief.
        is_majority: whether there is a majority.
    """

    different: tuple[int, ...]
    usual: int
    is_majority: bool

    @property
    def pair(self) -> tuple[int, int]:
        """Two workers whose values differ."""
        return self.different[0], self.usual

    def sentence(self, topic: str, values: Sequence[Any], names: Sequence[str]) -> str:
        """Describe the difference between the workers of :attr:`pair` for the user.

        Args:
            topic: what the values are of.
            values: by worker; only those of the pair are used.
            names: by worker.
        """
        odd, usual = self.pair
        path, here, there = first_difference(values[odd], values[usual]) or ("", "", "")
        several = len(self.different) > 1
        who = f"{listed(names[worker] for worker in self.different)} differ{'' if several else 's'}"
        place = f" in {path!r}" if path else ""
        here = f"{names[odd]} has {here}" if several else f"it has {here}"
        others = "the others have" if self.is_majority else f"{names[usual]} has"
        return f"The workers do not agree on {topic!r}: {who}{place}: {here}, {others} {there}."


def find_disagreement(values: Sequence[Any]) -> Disagreement | None:
    """Return which workers differ; None if all have equal values.

    Args:
        values: values of all workers, in order.

    Example:
        >>> from lockstep.distributed.control.admission import find_disagreement
        >>> find_disagreement([1, 2, 1, 1])
        Disagreement(different=(1,), usual=0, is_majority=True)
    """
    texts = [_text(value) for value in values]
    most, count = Counter(texts).most_common(1)[0]
    if count == len(texts):
        return None
    is_majority = 2 * count > len(texts)
    usual = texts.index(most) if is_majority else 0
    return Disagreement(tuple(n for n, text in enumerate(texts) if text != texts[usual]), usual, is_majority)


def digest(value: Any) -> str:
    """Return a hash of a value of JSON."""
    return hashlib.blake2b(_text(value).encode(), digest_size=16).hexdigest()


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _shown(values: Mapping[str, Any], key: str) -> str:
    return _short(_text(values[key])) if key in values else _ABSENT


def _short(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
