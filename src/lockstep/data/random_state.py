"""States of the global random generators, and of torch's, as values of JSON."""

import base64
import random
import sys
from typing import Any

import numpy as np

_TWISTER_WORDS = 624  # of the state of a Mersenne twister


def encode_bytes(data: bytes) -> str:
    """Return bytes as text for JSON."""
    return base64.b64encode(data).decode()


def decode_torch_state(kept: str) -> Any:
    """Return the state of a generator of torch, from the text of its bytes."""
    return sys.modules["torch"].from_numpy(np.frombuffer(base64.b64decode(kept), "uint8").copy())


def capture_random_state() -> dict[str, Any]:
    """Return the state of the global generators: ``random``, ``numpy.random`` and, if it is loaded, torch; as values of JSON."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    found: dict[str, Any] = {
        "random": [version, list(numbers), gauss],
        "numpy": [
            kind,
            encode_bytes(np.asarray(keys, "uint32").tobytes()),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }
    if "torch" in sys.modules:
        found["torch"] = encode_bytes(sys.modules["torch"].get_rng_state().numpy().tobytes())
    return found


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the state that :func:`capture_random_state` returned; torch's only if it is loaded."""
    _set_random_state(state, random, np.random, sys.modules.get("torch"))


def check_random_state(state: Any) -> None:
    """Raise ValueError if this is no result of :func:`capture_random_state`. No generator changes."""
    try:
        gauss, (position, has_gauss, cached) = state["random"][2], state["numpy"][2:]
        if not (gauss is None or type(gauss) is float) or type(cached) is not float or has_gauss not in (0, 1):
            raise ValueError("a normal number")
        if type(position) is not int or not 0 <= position <= _TWISTER_WORDS:  # NumPy would read beyond its memory.
            raise ValueError("a position")
        torch = sys.modules.get("torch")
        generator = torch.Generator() if torch else None
        _set_random_state(state, random.Random(), np.random.RandomState(0), generator)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"no state of random generators: {error}") from None


def _set_random_state(state: dict[str, Any], python: Any, numpy: Any, torch: Any) -> None:
    """Set the states of generators, each given as its object or its module."""
    version, numbers, gauss = state["random"]
    kind, keys, position, has_gauss, cached = state["numpy"]
    python.setstate((version, tuple(numbers), gauss))
    numpy.set_state((kind, np.frombuffer(base64.b64decode(keys), "uint32"), position, has_gauss, cached))
    if "torch" in state and torch is not None:
        (getattr(torch, "set_rng_state", None) or torch.set_state)(decode_torch_state(state["torch"]))
