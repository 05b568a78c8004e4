"""Values that must be equal on all workers: versions and script, the state of random numbers, the model."""

import hashlib
import json
import random
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from lockstep._keras import trainer
from lockstep._version import used_versions
from lockstep.distributed.control.control_client import ControlClient

__all__ = ["agree_on_random_state", "describe_model", "describe_process"]


def describe_process() -> dict[str, Any]:
    """Return the versions that this process uses, and a hash of its script."""
    return used_versions() | {"script": _script()}


def _script() -> str | None:
    path = sys.modules["__main__"].__dict__.get("__file__")  # None: at a prompt.
    if path is None or not Path(path).is_file():
        return None
    return f"{Path(path).name}, sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]}"


def agree_on_random_state(client: ControlClient, log: Callable[[str], None]) -> None:
    """Check that every worker draws the same random numbers, for weights and for the order of rows.

    If no seed was set, all workers get one from the chief.

    Raises:
        ClusterError: workers have set different seeds, or have drawn different numbers since.
    """
    client.agree("the seed, keras.utils.set_random_seed()", {"seed": trainer.get_random_seed()})
    own = {"random": _digest(repr(random.getstate())), "numpy.random": _digest(repr(np.random.get_state()))}
    every = client.gather("random numbers", own)
    different = [name for name in own if any(theirs[name] != own[name] for theirs in every)]
    if different and trainer.get_random_seed() is not None:
        client.agree("the state of random numbers", own)
    if different:
        log("no seed was set before the strategy; all workers use the random numbers of worker 0")
        seed = client.broadcast("a seed", random.getrandbits(32))
        random.seed(seed)
        np.random.seed(seed)


def describe_model(model: keras.Model) -> dict[str, Any]:
    """Return what must be equal of a model: its layers, how it was compiled, and the checksums of its variables."""
    variables = [*model.variables, *(model.optimizer.variables if model.optimizer else [])]
    return {
        "layers": {layer.name: _config(layer.get_config) for layer in model.layers},
        "compile": _config(model.get_compile_config),
        "variables": {x.path: f"{x.dtype} {list(x.shape)}, checksum {_checksum(x.value)}" for x in variables},
    }


def _config(get: Callable[[], Any]) -> Any:
    """Return a configuration as JSON; what has no JSON, such as a custom layer without ``get_config``, is left out."""
    try:
        return json.loads(json.dumps(get(), default=lambda other: type(other).__name__, skipkeys=True))
    except Exception:
        return None


def _checksum(value: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(value).tobytes())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
