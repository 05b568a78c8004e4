"""One call of ``fit``, ``evaluate`` or ``predict`` on all workers: they agree on the call and on each batch; only the chief prints.

Values that must be equal on all workers are compared: versions and script, random state, the model, and its variables every few steps.
Workers wait for each other in ``control/control_client``; the limits are ``Limits`` of ``control/failure_detector``.
"""

import hashlib
import json
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from lockstep._arrays import DTYPES, array_bytes, describe_arrays, parse_description
from lockstep._errors import ModelError
from lockstep._keras import trainer
from lockstep._keras.patches import CHIEF_ONLY_FILES, CHIEF_ONLY_PRESETS, install
from lockstep._keras.sharded_variable import whole_values
from lockstep._logging import CancelledError
from lockstep._version import used_versions
from lockstep.data import fit_entry
from lockstep.data.keras_adapter import KerasInput
from lockstep.data.resumable_iterator import digest_of_batch
from lockstep.devices.placement import DEVICE_AXIS, Placement, is_rows, is_spread
from lockstep.distributed.control.control_client import MAIN, ControlClient
from lockstep.distributed.control.failure_detector import WorkerStatus
from lockstep.distributed.control.transport import as_text
from lockstep.execution.spmd import PerDeviceProgram, to_per_device
from lockstep.execution.step_hooks import StepHook
from lockstep.execution.step_loop import STATE

_PLAIN = (int, float, str, bool, type(None))
_WRITING = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)
_FIRST, _EVERY = 3, 100  # Which batches are compared: the first three, then one in a hundred.
_METADATA = "the metadata of the checkpoint"
_CHUNK = 1 << 22  # Numbers of 4 bytes of one sum.
_FIX = (
    "Every worker must read the same data in the same order and takes its own rows of them. Fix: give shuffling a seed "
    "(torch.manual_seed for a DataLoader), or let each worker bring its own data with distribute_datasets_from_function."
)


class WorkerProcessGroup(fit_entry.ProcessGroup):
    """Coordinates the calls of all workers, besides the steps.

    Args:
        client: the control client.
        placement: the devices of all workers.
    """

    def __init__(self, client: ControlClient, placement: Placement) -> None:
        self._client, self._placement, self._inputs = client, placement, count(1)
        self.processes, self.process = client.group.workers, client.group.index

    @contextmanager
    def surround_call(
        self, model: keras.Model, call: str, arguments: dict[str, Any], batch_size: int | None
    ) -> Iterator[None]:
        """Check that all workers make the same call, and let only the chief print; changes the arguments.

        Raises:
            ClusterError: another worker makes another call, or has other arguments or another model.
        """
        _refuse_backup(arguments)
        given = {name: value for name, value in arguments.items() if isinstance(value, _PLAIN) and name != "verbose"}
        given |= {"batches of x": arguments["x"].num_batches, "batch_size": batch_size}
        if isinstance(arguments.get("validation_data"), KerasInput):
            given["batches of validation_data"] = arguments["validation_data"].num_batches
        self._client.agree("the call", call)
        self._client.agree(f"{call}()", {"arguments": given, "model": describe_model(model)})
        if not self._client.group.is_chief:
            _disable_output(arguments)
        if call == "fit":
            meter = arguments["x"].meter
            self._client.metadata = lambda: {"waited": meter.waited, "read": meter.read}
        if not isinstance(arguments.get("callbacks"), keras.callbacks.CallbackList):  # It is used as it is.
            arguments["callbacks"] = [_EpochEnd(self), *fit_entry.callbacks_in(arguments)]
        try:
            yield
        finally:
            self.end_steps()

    def end_steps(self) -> None:
        """See the base class."""
        self._client.report_program()

    def saving(self) -> AbstractContextManager[None]:
        """See the base class."""
        return self._client.saving()

    def end_together(self) -> None:
        """See the base class."""
        self._client.ends_with_others = True

    def make_batch_check(self, name: str, num_batches: Callable[[], int | None]) -> Callable[[], "_BatchComparison"]:
        """See the base class."""
        return self._for_each_pass(_BatchComparison, f"input {next(self._inputs)}", name, num_batches)

    def broadcast_from_chief(self, found: Any) -> Any:
        """See the base class: a checkpoint, which the chief has read, or None."""
        step, arrays, metadata = found or (None, {}, None)
        step = self._client.broadcast("the checkpoint", step)
        if step is None:
            return None
        # It may be larger than a message: hooks of all epochs are in it.
        text = np.frombuffer(as_text(metadata), np.uint8)
        received = _broadcast_arrays(self._client, self._placement, dict(arrays) | {_METADATA: text})
        return step, received, json.loads(received.pop(_METADATA).tobytes())

    def all_gather(
        self, topic: str, value: Any, *, channel: str | None = None, timeout_seconds: float | None = None
    ) -> list[Any]:
        """See the base class."""
        return self._client.gather(topic, value, channel=channel or MAIN, timeout_seconds=timeout_seconds)

    def agree(self, topic: str, value: Any) -> None:
        """See the base class."""
        self._client.agree(topic, value)

    def worker_statuses(self) -> list[WorkerStatus]:
        """See the base class."""
        return self._client.heartbeats()

    def make_batch_gather(self, name: str) -> Callable[[], "_WorkerBatchGather"]:
        """See the base class."""
        return self._for_each_pass(_WorkerBatchGather, f"own input {next(self._inputs)}", name)

    def _for_each_pass(self, kind: Callable[..., Any], channel: str, *options: Any) -> Callable[[], Any]:
        """Return a function that makes a ``kind`` for each pass over an input, with a channel of its own."""
        numbers = count(1)
        return lambda: kind(self._client, f"{channel}, pass {next(numbers)}", *options)


class _EpochEnd(keras.callbacks.Callback):
    """Ends the steps of an epoch before other callbacks run: its logs are there, so that no step is waited for."""

    def __init__(self, group: WorkerProcessGroup) -> None:
        super().__init__()
        self._group = group

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See Keras."""
        self._group.end_steps()


# Batches.


class _BatchComparison:
    """Compares the batches of one pass, which all workers should read equally.

    The digests of some batches are compared, of the last one too, which may have fewer rows. How many rows each batch has is compared,
    unless the workers have agreed on the length: else one worker would begin a step without the others.

    A thread that reads ahead may wait here for a batch that is no longer wanted: that wait is cancelled.

    Args:
        client: the control client.
        channel: channel of the pass.
        name: name of the input.
        num_batches: returns the length of the pass, on which the workers have agreed; None: it is not known. It is called once, as it may
            run code of the user.
    """

    def __init__(self, client: ControlClient, channel: str, name: str, num_batches: Callable[[], int | None]) -> None:
        self._client, self._channel, self._name, self._length = client, channel, name, num_batches()

    def __call__(self, number: int, batch: Any) -> None:
        """Compare a batch; None: the end of the pass.

        Raises:
            ClusterError: a worker has read another batch, or its pass has another length.
        """
        is_compared = number < _FIRST or number % _EVERY == 0 or number + 1 == self._length
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


def _rows_of(batch: Any) -> str:
    leaves = [leaf for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    return f"{len(leaves[0])} rows" if leaves else "a batch"


class _WorkerBatchGather:
    """Gathers values of all workers for the batches of one pass; to be called by one thread at a time.

    Args:
        client: the control client.
        channel: channel of the pass.
        name: name of the input.
    """

    def __init__(self, client: ControlClient, channel: str, name: str) -> None:
        self._client, self._channel, self._name = client, channel, name

    def __call__(self, value: Any) -> list[Any]:
        """Return the values of all workers, which are JSON.

        Raises:
            CancelledError: batches are no longer wanted.
        """
        return self._client.gather(f"the batches of {self._name}", value, channel=self._channel)

    def close(self) -> None:
        """End the pass."""
        self._client.forget(self._channel)


# Prints and files.


def disable_saving(model: keras.Model) -> None:
    """Have methods of a model that write files do nothing, and so ModelCheckpoint, on a process that is not the chief."""
    _replace_methods_that_write(model, lambda method: _do_nothing)


def coordinate_saving(model: keras.Model, client: ControlClient) -> None:
    """Have only the chief write files in methods of a model such as ``save``, and so in ModelCheckpoint.

    The other workers only gather sharded variables with it. The chief reports that it saves, so that they wait for it as long as for
    compiling.
    """
    _replace_methods_that_write(model, lambda method: _saving(method, model, client))


def _replace_methods_that_write(model: keras.Model, replace: Callable[[Any], Any]) -> None:
    kind = type(model)
    for patch in (CHIEF_ONLY_FILES, CHIEF_ONLY_PRESETS):
        names = [name for name in patch.attributes if hasattr(kind, name)]
        install(patch, [(model, name, replace(getattr(kind, name))) for name in names])


def _saving(method: Callable[..., Any], model: keras.Model, client: ControlClient) -> Callable[..., Any]:
    @wraps(method)
    def save(*args: Any, **kwargs: Any) -> Any:
        if client.is_saving:  # A model saves a model within it, whose variables are gathered already.
            return method(model, *args, **kwargs)
        optimizer = getattr(model, "optimizer", None)
        variables = [*model.variables, *(optimizer.variables if optimizer else ())]
        with whole_values(variables, wanted=client.group.is_chief):
            if client.group.is_chief:
                with client.saving():
                    return method(model, *args, **kwargs)
        return None

    return save


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replace a method that only the chief runs."""


def _disable_output(arguments: dict[str, Any]) -> None:
    """Have a call of ``fit``, ``evaluate`` or ``predict`` print nothing, and drop Keras's callbacks that only write."""
    arguments["verbose"] = 0
    if not isinstance(arguments.get("callbacks"), keras.callbacks.CallbackList):  # It is used as it is.
        arguments["callbacks"] = [
            callback for callback in fit_entry.callbacks_in(arguments) if not isinstance(callback, _WRITING)
        ]


def _refuse_backup(arguments: dict[str, Any]) -> None:
    """Refuse Keras's own BackupAndRestore, whose files every worker would write and delete.

    Raises:
        ModelError: it is among the callbacks.
    """
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in fit_entry.callbacks_in(arguments)):
        raise ModelError(
            "keras.callbacks.BackupAndRestore writes and deletes its files on every worker at once, and restores the beginning of an "
            "epoch only. Fix: take lockstep.callbacks.BackupAndRestore."
        )


# Arrays that only the chief has read.


def _broadcast_arrays(
    client: ControlClient, placement: Placement, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the chief's arrays, as sums over devices to which only the chief contributes; all workers call this.

    The bytes of all arrays follow each other in chunks, so that this takes little more memory than the arrays.

    Args:
        client: client of the control channel.
        placement: the devices of all workers.
        arrays: by name, of dtypes of numbers.
    """
    given = dict(arrays)  # They may be in a file until now.
    specs = parse_description(client.broadcast("the arrays", describe_arrays(given)))
    found = given if client.group.is_chief else {x.name: np.empty(x.shape, DTYPES[x.dtype]) for x in specs}
    contents = [array_bytes(found[spec.name]) for spec in specs]
    for chunk in _chunks([spec.nbytes for spec in specs], 4 * _CHUNK):
        numbers = np.zeros(-(-sum(stop - start for _, start, stop in chunk) // 4), np.int32)
        if client.group.is_chief:
            own = b"".join(contents[array][start:stop] for array, start, stop in chunk)
            numbers.view(np.uint8)[: len(own)] = np.frombuffer(own, np.uint8)
        received = memoryview(sum_over_workers(placement, numbers).tobytes())
        if not client.group.is_chief:
            for array, start, stop in chunk:
                contents[array][start:stop] = received[: stop - start]
                received = received[stop - start :]
    return found


def _chunks(lengths: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Divide arrays of these lengths, which follow each other, into chunks of ``most`` bytes; the last may be shorter.

    Example:
        >>> list(_chunks([3, 0, 4], 5))
        [[(0, 0, 3), (2, 0, 2)], [(2, 2, 4)]]
    """
    chunk, left = [], most
    for array, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + left)
            chunk.append((array, start, stop))
            left -= stop - start
            start = stop
            if not left:
                yield chunk
                chunk, left = [], most
    if chunk:
        yield chunk


def sum_over_workers(placement: Placement, own: np.ndarray) -> np.ndarray:
    """Return the sum over the workers; one device of each worker contributes its array."""
    zeros = np.zeros_like(own)
    parts = [
        jax.device_put((own if place == placement.local_indices[0] else zeros)[None], placement.devices[place])
        for place in placement.local_indices
    ]
    whole = (len(placement.devices), *own.shape)
    stack = jax.make_array_from_single_device_arrays(whole, placement.row_sharding, parts)
    return np.asarray(_device_sum(placement.mesh)(stack).addressable_shards[0].data)


@cache
def _device_sum(mesh: Mesh) -> Any:
    """Return the program that adds the rows of an array, of which each device of ``mesh`` has one."""
    whole, cut = PartitionSpec(), PartitionSpec(DEVICE_AXIS)
    add = jax.shard_map(
        lambda x: lax.psum(x[0], DEVICE_AXIS), mesh=mesh, in_specs=cut, out_specs=whole, check_vma=False
    )
    return jax.jit(add)


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
            names: names of the variables.
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
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag])
    size = array.dtype.itemsize
    bits = lax.bitcast_convert_type(array, _UNSIGNED[min(size, 4)]).reshape(-1).astype(jnp.uint32)
    return jnp.sum(bits * (2 * lax.iota(jnp.uint32, bits.size) + 1), dtype=jnp.uint32)
