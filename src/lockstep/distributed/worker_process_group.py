"""One call of ``fit``, ``evaluate`` or ``predict`` on all workers: they agree on the call and on each batch; only the chief prints.

What they compare is in ``consistency``. They wait for each other in ``control/control_client``; the limits are in
``control/heartbeat``.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, wraps
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import jax
import keras
import numpy as np
from jax import lax
from jax.sharding import Mesh

from lockstep._array_encoding import DTYPES, array_bytes, describe_arrays, parse_description
from lockstep._errors import ModelError
from lockstep._keras.graph import optimizer_variables
from lockstep._keras.patches import (
    CHIEF_ONLY_FILES,
    CHIEF_ONLY_FOLDERS,
    CHIEF_ONLY_PRESETS,
    READ_AFTER_CHIEF,
    install,
    patched,
)
from lockstep._keras.trainer import variables_of
from lockstep._keras.variable_placement import stored_value, whole_values
from lockstep.collectives.base import fill_packs
from lockstep.data import fit_wrapper
from lockstep.data.keras_adapter import KerasInput
from lockstep.data.process_group import ProcessGroup
from lockstep.devices.placement import DEVICE_AXIS, Placement, combine_parts, is_rows
from lockstep.distributed.consistency import BatchComparison, DriftCheck, compare_batch, describe_model
from lockstep.distributed.control.control_client import MAIN, ControlClient
from lockstep.distributed.control.heartbeat import COMPILING, DATA, END_OF_FIT, STEP, WorkerStatus
from lockstep.distributed.control.transport import as_text
from lockstep.execution.spmd import PerDevice, sharded_array
from lockstep.execution.step_hooks import StepHook

_PLAIN = (int, float, str, bool, type(None))
_WRITING = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)
_PRINTING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
)
_METADATA = "the metadata of the checkpoint"
_CHUNK = 1 << 22  # Numbers of 4 bytes of one sum.


class WorkerProcessGroup(ProcessGroup):
    """Coordinates the calls of all workers, besides the steps; ``drift``, if there is one, compares the variables at the end of ``fit``."""

    def __init__(self, client: ControlClient, placement: Placement, drift: DriftCheck | None = None) -> None:
        self._client, self._placement, self._drift, self._inputs = client, placement, drift, count(1)
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
        with nullcontext() if self._client.group.is_chief else _no_output(arguments):
            if call == "fit":
                meter = arguments["x"].meter
                self._client.metadata = lambda: {"waited": meter.waited, "read": meter.read}
            if not isinstance(arguments.get("callbacks"), keras.callbacks.CallbackList):  # It is used as it is.
                arguments["callbacks"] = [_EpochEnd(self), *fit_wrapper.callbacks_in(arguments)]
            try:
                yield
                if call == "fit":
                    self._end_fit(model)
            finally:
                self.end_steps()

    def _end_fit(self, model: keras.Model) -> None:
        self._client.barrier(END_OF_FIT)  # Files that the chief writes in callbacks are complete.
        if self._drift:
            variables = _variables_in_order(model)
            self._drift("at the end of fit", variables, [stored_value(variable) for variable in variables])

    def end_steps(self) -> None:
        self._client.report_program()

    def saving(self) -> AbstractContextManager[None]:
        return self._client.saving()

    def end_together(self) -> None:
        self._client.ends_with_others = True

    def make_batch_check(self, name: str, num_batches: Callable[[], int | None]) -> Callable[[], "BatchComparison"]:
        return self._for_each_pass(BatchComparison, f"input {next(self._inputs)}", name, num_batches)

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
        return self._client.gather(topic, value, channel=channel or MAIN, timeout_seconds=timeout_seconds)

    def agree(self, topic: str, value: Any) -> None:
        self._client.agree(topic, value)

    def compare_batch(self, call: str, number: int, batch: Any) -> None:
        compare_batch(self._client, call, number, batch)

    def worker_statuses(self) -> list[WorkerStatus]:
        return self._client.heartbeats()

    def make_batch_gather(self, name: str) -> Callable[[], "_WorkerBatchGather"]:
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
        self._group.end_steps()


class _WorkerBatchGather:
    """Gathers values of all workers for the batches of one pass; to be called by one thread at a time."""

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
    """Have only the chief write files in methods of a model such as ``save``, and so in ModelCheckpoint, and all read weights together.

    The other workers only gather sharded variables with it. The chief reports that it saves, so that they wait for it as long as for
    compiling.
    """
    _replace_methods_that_write(model, lambda method: _saving(method, model, client))
    if hasattr(model, "load_weights"):
        install(READ_AFTER_CHIEF, [(model, "load_weights", _reading(type(model).load_weights, model, client))])


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
        variables = [*model.variables, *optimizer_variables(model)]
        with whole_values(variables, wanted=client.group.is_chief):
            if client.group.is_chief:
                with client.saving():
                    return method(model, *args, **kwargs)
        return None

    return save


def _reading(method: Callable[..., Any], model: keras.Model, client: ControlClient) -> Callable[..., Any]:
    @wraps(method)
    def load(*args: Any, **kwargs: Any) -> Any:
        if client.is_open:
            client.barrier("load_weights")
        return method(model, *args, **kwargs)

    return load


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replace a method that only the chief runs."""


@contextmanager
def _no_output(arguments: dict[str, Any]) -> Iterator[None]:
    """Have a call print nothing and touch no file, and Keras's callbacks neither: those that only write are dropped."""
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):  # It is used as it is.
        given = callbacks.callbacks
    else:
        given = fit_wrapper.callbacks_in(arguments)
        arguments["callbacks"] = [callback for callback in given if not isinstance(callback, _WRITING)]
    arguments["verbose"] = 0
    checkpoints = [callback for callback in given if isinstance(callback, keras.callbacks.ModelCheckpoint)]
    names = [(callback, "_get_file_path", _without_folder(callback)) for callback in checkpoints]
    with ExitStack() as stack, patched(CHIEF_ONLY_FOLDERS, names):
        for callback in given:
            if isinstance(callback, _PRINTING):
                stack.callback(setattr, callback, "verbose", callback.verbose)
                callback.verbose = 0
        yield


def _without_folder(checkpoint: keras.callbacks.ModelCheckpoint) -> Callable[..., str]:
    path = checkpoint._get_file_path
    return lambda *args, **kwargs: os.path.basename(path(*args, **kwargs))


def _refuse_backup(arguments: dict[str, Any]) -> None:
    """Refuse Keras's own BackupAndRestore, whose files every worker would write and delete.

    Raises:
        ModelError: it is among the callbacks.
    """
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in fit_wrapper.callbacks_in(arguments)):
        raise ModelError(
            "keras.callbacks.BackupAndRestore writes and deletes its files on every worker at once, and restores the beginning of an "
            "epoch only. Fix: take lockstep.callbacks.BackupAndRestore."
        )


# Arrays that only the chief has read.


def _broadcast_arrays(
    client: ControlClient, placement: Placement, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the chief's arrays, which hold numbers, as sums over devices to which only the chief contributes; all workers call this.

    The bytes of all arrays follow each other in chunks, so that this takes little more memory than the arrays.
    """
    given = dict(arrays)  # They may be in a file until now.
    specs = parse_description(client.broadcast("the arrays", describe_arrays(given)))
    found = given if client.group.is_chief else {x.name: np.empty(x.shape, DTYPES[x.dtype]) for x in specs}
    contents = [array_bytes(found[spec.name]) for spec in specs]
    for chunk in fill_packs(enumerate(spec.nbytes for spec in specs), 4 * _CHUNK):
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


def sum_over_workers(placement: Placement, own: np.ndarray) -> np.ndarray:
    """Return the sum over the workers; one device of each worker contributes its array."""
    device = placement.first_local_device
    parts = PerDevice(jax.device_put(own[None], device) if one == device else None for one in placement.devices)
    stack = sharded_array(parts, placement)
    return np.asarray(_device_sum(placement.mesh)(stack).addressable_shards[0].data)


@cache
def _device_sum(mesh: Mesh) -> Any:
    """Return the program that adds the rows of an array, of which each device of ``mesh`` has one."""
    return jax.jit(combine_parts(lambda x: lax.psum(x[0], DEVICE_AXIS), mesh))


class ProgressReporter(StepHook):
    """Counts the steps of all calls of a strategy, reports each to the control client, and compares the variables every ``check_every`` training
    steps; 0: never.
    """

    def __init__(self, client: ControlClient, drift: DriftCheck | None, check_every: int) -> None:
        self._client, self._drift, self._check_every = client, drift, check_every
        self._steps = self._trained = 0
        self._seen: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()

    def on_fetch(self) -> None:
        self._client.report(self._steps, DATA)

    def on_step_start(self, model: keras.Model, kind: str, batch: Any) -> None:
        self._steps += 1
        # Each compile() of the model makes another function, which JAX compiles again.
        seen = self._seen.setdefault(getattr(model, f"{kind}_function") or model, set())
        shape = tuple(_kind(leaf) for leaf in jax.tree.leaves(batch, is_leaf=is_rows))
        self._client.report(self._steps, STEP if shape in seen else COMPILING)
        seen.add(shape)

    def on_pause(self) -> None:
        self._client.report(self._steps, COMPILING)

    def on_step_end(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
        self._client.report(self._steps, STEP)
        if kind != "train" or not self._drift:
            return
        self._trained += 1
        if self._trained == 1 or self._trained % self._check_every == 0:
            arrays = [array for part in state for array in part]
            self._drift(f"after step {self._trained}", _variables_in_order(model), arrays)


def _variables_in_order(model: keras.Model) -> list[keras.Variable]:
    """Return the variables in the order of a state of training."""
    return [variable for part in variables_of(model) for variable in part]


def _kind(leaf: Any) -> Any:
    return jax.typeof(leaf.array) if is_rows(leaf) else jax.typeof(leaf)
