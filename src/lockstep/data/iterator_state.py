"""Where a pass over an input stands, so that another process can go on with the very next batch."""

import base64
import hashlib
import random
import sys
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from lockstep._errors import InputError

__all__ = ["IteratorState", "capture_random_state", "check_same_batch", "digest_of_batch", "restore_random_state"]


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

    def to_json(self) -> dict[str, Any]:
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


def check_same_batch(name: str, position: IteratorState, batch: Any) -> None:
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


def capture_random_state() -> dict[str, Any]:
    """The state of ``random``, of ``numpy.random`` and, where it is loaded, of torch."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    found: dict[str, Any] = {
        "random": [version, list(numbers), gauss],
        "numpy": [kind, _text(np.asarray(keys, "uint32").tobytes()), int(position), int(has_gauss), float(cached)],
    }
    if "torch" in sys.modules:
        found["torch"] = _text(sys.modules["torch"].get_rng_state().numpy().tobytes())
    return found


def restore_random_state(state: dict[str, Any]) -> None:
    """Set what :func:`capture_random_state` gave; torch's only where it is loaded."""
    version, numbers, gauss = state["random"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), "uint32"), position, has_gauss, cached))
    if "torch" in state and "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["torch"])), dtype=torch.uint8))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
