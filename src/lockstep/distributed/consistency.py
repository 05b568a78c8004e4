"""What is compared between workers: versions and script, random state, the model, the batches, and checksums of the variables.

Each comparison is a call of ``ControlClient.agree``, which names the workers that differ and the first difference.
"""

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
from lockstep._keras.graph import optimizer_variables
from lockstep._keras.variable_placement import stored_value
from lockstep._logging import CancelledError, listed
from lockstep._padded_array import PaddedArray
from lockstep._version import used_versions
from lockstep.data.resumable_iterator import digest_of_batch
from lockstep.devices.placement import Placement, is_spread
from lockstep.distributed.control.control_client import ControlClient
from lockstep.execution.spmd import PerDeviceProgram, to_per_device

_FIRST, _EVERY = 3, 100  # Which batches are compared: the first three, then one in a hundred.
_FIX = (
    "Every worker must read the same data in the same order and takes its own rows of them. Fix: give shuffling a seed "
    "(numpy.random.default_rng(seed) for a generator of the program; torch.manual_seed for a DataLoader; PYTHONHASHSEED for the order of a set), "
    "or let each worker bring its own data with distribute_datasets_from_function."
)
_SEEDED: dict[str, Callable[[int], None]] = {
    "random": random.seed,
    "numpy.random": np.random.seed,
}  # by the name in messages
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class BatchComparison:
    """Compares the batches of one pass, which all workers should read equally.

    The digests of some batches are compared, of the last one too, which may have fewer rows. How many rows each batch has is compared,
    unless the workers have agreed on the length: else one worker would begin a step without the others. ``num_batches`` returns that
    length, or None; it is called once, as it may run code of the user.

    A thread that reads ahead may wait here for a batch that is no longer wanted: that wait is cancelled.
    """

    def __init__(self, client: ControlClient, channel: str, name: str, num_batches: Callable[[], int | None]) -> None:
        self._client, self._channel, self._name, self._length = client, channel, name, num_batches()

    def __call__(self, number: int, batch: Any) -> None:
        """Compare a batch; None: the end of the pass.

        Raises:
            ClusterError: a worker has read another batch, or its pass has another length.
        """
        is_compared = _is_compared(number) or number + 1 == self._length
        if self._length is not None and not is_compared and batch is not None:
            return
        found = "the end" if batch is None else digest_of_batch(batch) if is_compared else _rows_of(batch)
        try:
            self._client.agree(f"batch {number + 1} of {self._name}", found, fix=_FIX, channel=self._channel)
        except CancelledError:
            return  # No step takes the batch: it goes back to the input.

    def close(self) -> None:
        """End the pass."""
        self._client.forget(self._channel)


def compare_batch(client: ControlClient, call: str, number: int, batch: Any) -> None:
    """Compare the batch of the ``number``-th call of a method such as ``train_on_batch``, which is given it by the program.

    Raises:
        ClusterError: a worker has another batch, or makes another call.
    """
    if _is_compared(number):
        client.agree(f"call {number + 1} of {call}()", digest_of_batch(batch), fix=_FIX)


def _is_compared(number: int) -> bool:
    return number < _FIRST or number % _EVERY == 0


def _rows_of(batch: Any) -> str:
    leaves = [leaf for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    return f"{len(leaves[0])} rows" if leaves else "a batch"


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

    Generators that have no seed, or another one on each worker, get one from the chief; the others stay as they are.

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
        log(f"no seed was set before the strategy ({listed(different)}); all workers get one from worker 0")
        seed = client.broadcast("a seed", random.SystemRandom().getrandbits(32))
        for name in different:
            _SEEDED[name](seed)
    _agree_on_torch(client, log)


def _agree_on_torch(client: ControlClient, log: Callable[[str], None]) -> None:
    """Have torch draw the same numbers on all workers that have loaded it; ``keras.utils.set_random_seed`` gives it no seed on JAX."""
    torch = sys.modules.get("torch")
    own = None if torch is None else _digest(repr(torch.get_rng_state().numpy().tobytes()))
    known = [digest for digest in client.gather("random numbers of torch", own) if digest is not None]
    if len(set(known)) > 1:
        log("torch has no seed, or another one on each worker; all workers give it one now")
        if torch is not None:
            torch.manual_seed(int(known[0], 16) % 2**63)


def describe_model(model: keras.Model) -> dict[str, Any]:
    """Return what must be equal of a model: its layers, how it was compiled, and the checksums of its variables."""
    return {
        "layers": {layer.name: _config(layer.get_config) for layer in model.layers},
        "compile": _config(model.get_compile_config),
        "variables": {
            x.path: f"{x.dtype} {list(x.shape)}{_host_checksum(stored_value(x))}"
            for x in (*model.variables, *optimizer_variables(model))
        },
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


class DriftCheck:
    """Compares checksums of the variables, device by device and worker by worker."""

    def __init__(self, client: ControlClient, placement: Placement) -> None:
        self._client, self._placement = client, placement
        self._sums = PerDeviceProgram(lambda arrays: [jnp.stack([_checksum(array) for array in arrays])], placement)

    def __call__(self, when: str, variables: Sequence[keras.Variable], arrays: Sequence[Any]) -> None:
        """Compare the variables, which have the values ``arrays``, of all devices and workers: those that are replicated over the devices, or
        after an eager step on one of this process.

        Raises:
            ClusterError: they differ; it names the worker and the variable, on every worker.
        """
        whole = {f"{n} {v.path}": x for n, (v, x) in enumerate(zip(variables, arrays, strict=True)) if _is_whole(x)}
        if not whole:
            return
        names, arrays = list(whole), list(whole.values())
        values = [to_per_device(array, self._placement) for array in arrays]
        places = [place for place in self._placement.local_indices if all(value[place] is not None for value in values)]
        (sums,) = self._sums(values, places=places)
        columns = zip(*(np.asarray(part).tolist() for part in sums if part is not None), strict=True)
        own = {
            name: column[0] if len(set(column)) == 1 else list(column)
            for name, column in zip(names, columns, strict=True)
        }
        self._client.agree(f"the checksums of the variables {when}", own)


def _is_whole(array: Any) -> bool:
    return not isinstance(array, PaddedArray) and array.is_fully_replicated


def _checksum(array: jax.Array) -> jax.Array:
    """Return the weighted sum of the array's bits modulo 2 ** 32; each number has another weight."""
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag])
    size = array.dtype.itemsize
    bits = lax.bitcast_convert_type(array, _UNSIGNED[min(size, 4)]).reshape(-1).astype(jnp.uint32)
    return jnp.sum(bits * (2 * lax.iota(jnp.uint32, bits.size) + 1), dtype=jnp.uint32)
