"""The global generators of random numbers that pipelines draw from, as values of JSON."""

import base64
import random
import sys
from typing import Any

import numpy as np

__all__ = ["captured_random_state", "restore_random_state"]


def captured_random_state() -> dict[str, Any]:
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
    """Set what :func:`captured_random_state` gave; torch's only where it is loaded."""
    version, numbers, gauss = state["random"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), "uint32"), position, has_gauss, cached))
    if "torch" in state and "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["torch"])), dtype=torch.uint8))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
