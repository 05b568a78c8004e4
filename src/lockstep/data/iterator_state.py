"""Where a pass over an input stands, so that another process can go on with the very next batch."""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from lockstep._errors import InputError

__all__ = ["IteratorState", "digest_of_batch", "refuse_other_batch"]


@dataclass(frozen=True)
class IteratorState:
    """Where a pass stands; of values of JSON.

    Args:
        batches: number of batches of the pass that steps have taken.
        at_begin: the random state with which the pass began.
        after: that after the last of these batches was read.
        digest: of that batch; None where it lay on devices only.
    """

    batches: int
    at_begin: dict[str, Any]
    after: dict[str, Any]
    digest: str | None

    def as_facts(self) -> dict[str, Any]:
        """This, as values of JSON."""
        return asdict(self)


def digest_of_batch(batch: Any) -> str | None:
    """A digest of the arrays of a batch; None where they lie on devices."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array):
            return None
        array = np.ascontiguousarray(leaf)
        found.update(f"{array.shape} {array.dtype}".encode())
        found.update(repr(array).encode() if array.dtype == object else array.tobytes())
    return found.hexdigest()


def refuse_other_batch(name: str, position: IteratorState, batch: Any) -> None:
    """Refuse to go on in an input that gives another batch than the one that was used last.

    Raises:
        InputError: it does.
    """
    if position.digest not in (None, digest_of_batch(batch)):
        raise InputError(
            f"The {name} is not the one that the checkpoint was written with, or gives its batches in another order: batch "
            f"{position.batches} of this pass is not the one that was trained on. Give it the same data, and its shuffling a seed; or "
            "begin anew with another directory."
        )
