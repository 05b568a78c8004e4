"""State of an input: position in a pass, random state and digest of the last batch, from which another process resumes."""

import base64
import hashlib
import random
import sys
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from lockstep._errors import InputError

__all__ = [
    "EpochHook",
    "InputState",
    "IteratorState",
    "capture_random_state",
    "check_same_batch",
    "digest_of_batch",
    "restore_random_state",
]

EpochHook = list[Any]  # "begin" or "end" of an epoch, and the random state before the data's hook ran


@dataclass(frozen=True)
class IteratorState:
    """State of one pass over an input, in values of JSON.

    Args:
        batches: number of batches of the pass that steps have taken.
        at_begin: the random state with which the pass began.
        after: the random state after the last of these batches was read.
        digest: digest of that batch; None if it was on devices only.
    """

    batches: int
    at_begin: dict[str, Any]
    after: dict[str, Any]
    digest: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the state as values of JSON."""
        return asdict(self)


@dataclass(frozen=True)
class InputState:
    """State of the input of a call of ``fit``.

    Args:
        iterator: state of the current pass; None if a new pass begins next.
        hooks: the hooks of the data at the begin and end of epochs that have run.
    """

    iterator: IteratorState | None
    hooks: tuple[EpochHook, ...]


def digest_of_batch(batch: Any) -> str | None:
    """Return a digest of the arrays of a batch; None if they are on devices."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array):
            return None
        array = np.ascontiguousarray(leaf)
        found.update(f"{array.shape} {array.dtype}".encode())
        found.update(repr(array).encode() if array.dtype == object else array.tobytes())
    return found.hexdigest()


def check_same_batch(name: str, state: IteratorState, batch: Any) -> None:
    """Check that an input, read again, gives the batch that was used last.

    Raises:
        InputError: it gives another one.
    """
    if state.digest not in (None, digest_of_batch(batch)):
        raise InputError(
            f"The {name} is not the one that the checkpoint was written with, or gives its batches in another order: batch "
            f"{state.batches} of this pass is not the one that was trained on. Give it the same data, and its shuffling a seed; or "
            "begin anew with another directory."
        )


def capture_random_state() -> dict[str, Any]:
    """Return the state of the global generators: ``random``, ``numpy.random`` and, if it is loaded, torch; as values of JSON."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    found: dict[str, Any] = {
        "random": [version, list(numbers), gauss],
        "numpy": [kind, _encode(np.asarray(keys, "uint32").tobytes()), int(position), int(has_gauss), float(cached)],
    }
    if "torch" in sys.modules:
        found["torch"] = _encode(sys.modules["torch"].get_rng_state().numpy().tobytes())
    return found


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the state that :func:`capture_random_state` returned; torch's only if it is loaded."""
    version, numbers, gauss = state["random"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), "uint32"), position, has_gauss, cached))
    if "torch" in state and "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["torch"])), dtype=torch.uint8))


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()
