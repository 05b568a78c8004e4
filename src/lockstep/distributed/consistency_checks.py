"""Values that must be equal on all workers: versions and script, random state, the model, and its variables every few steps."""

import hashlib
import json
import random
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax

from lockstep._keras import trainer
from lockstep._version import used_versions
from lockstep.data.device_placement import Placement, is_rows, is_spread
from lockstep.distributed.control.control_client import ControlClient
from lockstep.execution.spmd import PerDeviceProgram, to_per_device
from lockstep.execution.train_functions import STATE, StepHook


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
        "variables": {x.path: f"{x.dtype} {list(x.shape)}{_host_checksum(x.value)}" for x in variables},
    }


def _config(get: Callable[[], Any]) -> Any:
    """Return a configuration as JSON; what has no JSON, such as a custom layer without ``get_config``, is left out."""
    try:
        return json.loads(json.dumps(get(), default=lambda other: type(other).__name__, skipkeys=True))
    except Exception:
        return None


def _host_checksum(value: jax.Array) -> str:
    if is_spread(value):
        return ""  # Its value was compared when it was set.
    # Another object for the same memory: JAX keeps the copy of an accelerator's array that NumPy asks for as long as the object.
    return f", checksum {zlib.crc32(np.ascontiguousarray(value.addressable_data(0)).tobytes())}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class ProgressReporter(StepHook):
    """Counts the steps of all calls of a strategy, and reports each to the control client.

    Args:
        client: the control client.
        placement: the devices.
        check_every: number of training steps between two comparisons of the variables; 0: no comparison.
    """

    def __init__(self, client: ControlClient, placement: Placement, check_every: int) -> None:
        self._client, self._check_every = client, check_every
        self._check = _DriftCheck(client, placement)
        self._steps = self._trained = 0
        self._seen: set[Any] = set()

    def on_fetch(self) -> None:
        """See :class:`StepHook`."""
        self._client.report(self._steps, "data")

    def on_step_start(self, model: keras.Model, kind: str, batch: Any) -> None:
        """See :class:`StepHook`."""
        self._steps += 1
        shape = (id(model), kind, *(_kind(leaf) for leaf in jax.tree.leaves(batch, is_leaf=is_rows)))
        self._client.report(self._steps, "step" if shape in self._seen else "compiling")
        self._seen.add(shape)

    def on_pause(self) -> None:
        """See :class:`StepHook`."""
        self._client.report(self._steps, "compiling")

    def on_step_end(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
        """See :class:`StepHook`."""
        self._client.report(self._steps, "step")
        if kind != "train" or not self._check_every:
            return
        self._trained += 1
        if self._trained == 1 or self._trained % self._check_every == 0:
            variables = [x for name in STATE[kind] for x in _variables(model, name)]
            arrays = [array for part in state for array in part]
            names = [f"{n} {x.path}" for n, x in enumerate(variables)]
            whole = [pair for pair in zip(names, arrays, strict=True) if pair[1].is_fully_replicated]
            self._check(self._trained, *map(list, zip(*whole, strict=True)))


def _variables(model: keras.Model, name: str) -> list[keras.Variable]:
    return list(model.optimizer.variables) if name == "optimizer_variables" else list(getattr(model, name))


def _kind(leaf: Any) -> Any:
    return jax.typeof(leaf.array) if is_rows(leaf) else jax.typeof(leaf)


class _DriftCheck:
    """Compares checksums of the variables, device by device and worker by worker.

    Args:
        client: the control client.
        placement: the devices.
    """

    def __init__(self, client: ControlClient, placement: Placement) -> None:
        self._client, self._placement = client, placement
        self._sums = PerDeviceProgram(lambda arrays: [jnp.stack([_checksum(array) for array in arrays])], placement)

    def __call__(self, step: int, names: Sequence[str], arrays: Sequence[Any]) -> None:
        """Compare the variables of all devices and workers.

        Args:
            step: number of the step, for the message.
            names: of the variables.
            arrays: their values, one for each name, replicated over the devices, or after an eager step on one of this process.

        Raises:
            ClusterError: they differ; it names the worker and the variable, on every worker.
        """
        values = [to_per_device(array, self._placement) for array in arrays]
        places = [place for place in self._placement.local_indices if all(value[place] is not None for value in values)]
        (sums,) = self._sums(values, places=places)
        columns = zip(*(np.asarray(part).tolist() for part in sums if part is not None), strict=True)
        own = {
            name: column[0] if len(set(column)) == 1 else list(column)
            for name, column in zip(names, columns, strict=True)
        }
        self._client.agree(f"the checksums of the variables after step {step}", own)


def _checksum(array: jax.Array) -> jax.Array:
    """Return the weighted sum of the array's bits modulo 2 ** 32; each number has another weight."""
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    size = array.dtype.itemsize
    bits = lax.bitcast_convert_type(array, _UNSIGNED[min(size, 4)]).reshape(-1).astype(jnp.uint32)
    return jnp.sum(bits * (2 * lax.iota(jnp.uint32, bits.size) + 1), dtype=jnp.uint32)
