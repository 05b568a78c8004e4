"""Diagnosis of a non-finite step: it is run again, layer by layer.

In the forward pass each layer is checked when it returns, so inner layers come before the layers that contain them. In the backward pass
the gradient is checked at a layer's outputs, where it enters the layer, and at its inputs, where it leaves.

The step is run again, from the same state and batch, one replica after the other and uncompiled, on the first device of each process.
Every process runs all replicas, so all find the same, and wait for each other only to gather the rows of the batch.
"""

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding

from lockstep._keras.graph import copy_keras_mask, operations_of
from lockstep._keras.patches import LAYER_CALL, LOSS, REMATERIALIZED_CALL, STATELESS_CALL, patched_method
from lockstep._keras.trainer import variables_of
from lockstep._logging import capitalized, counted, listed
from lockstep._padded_array import without_padding
from lockstep.data.random_state import random_state_kept
from lockstep.devices.batch_layout import BatchLayout
from lockstep.devices.names import device_name
from lockstep.devices.placement import PlacedRows, Placement, count_rows, is_rows, laid_out
from lockstep.execution.executors import EagerExecutor
from lockstep.execution.nonfinite_gate import loss_logs
from lockstep.execution.replica import ReplicaResult
from lockstep.execution.spmd import SpmdForward
from lockstep.execution.step_functions import StepFunctions


def kind_of(value: Any) -> str | None:
    """Return "NaN", "Inf" or "NaN and Inf"; None if all numbers are finite, or have no values yet, as in a trace."""
    if not isinstance(value, (jax.Array, np.ndarray)) or not jnp.issubdtype(value.dtype, jnp.inexact):
        return None
    try:
        found = [name for name, test in (("NaN", jnp.isnan), ("Inf", jnp.isinf)) if bool(test(value).any())]
    except jax.errors.ConcretizationTypeError:
        return None
    return " and ".join(found) or None


def rows_of(value: Any, rows: int) -> list[int]:
    """Return which of ``rows`` rows have a non-finite number; none if the first axis of the array is no multiple of the rows."""
    if not np.ndim(value) or not rows or np.shape(value)[0] % rows:
        return []
    by_row = np.asarray(~jnp.isfinite(value)).reshape(rows, -1)
    return [int(row) for row in np.flatnonzero(by_row.any(axis=1))]


@dataclass(frozen=True)
class NonFiniteValue:
    """A non-finite value.

    Attributes:
        path: names of the layers, from the outermost to that of the value; empty for the model.
        kind: "NaN", "Inf" or "NaN and Inf".
        side: "outputs" or "inputs" of that layer.
        is_first: whether the inputs of the layer are finite.
        replica: number of the replica that has the value; None if the model runs on the global batch.
        rows: number of rows of the global batch, if known.
    """

    path: str
    kind: str
    side: str
    is_first: bool
    replica: int | None
    rows: tuple[int, ...] = ()


@dataclass
class LayerTrace:
    """The non-finite values of a step of ``model`` that runs inside :meth:`recording`.

    Attributes:
        forward: non-finite outputs of layers.
        backward: non-finite gradients at outputs and inputs of layers.
        gradients: for each replica the positions of trainable variables whose gradient is not finite.
        losses: replicas whose own loss is not finite.
        loss: kind of the loss of the whole batch, if it is not finite.
        order: layers in the order of their first return.
        replica: the running replica; None: the global batch.
    """

    model: keras.Model
    rows_of_replica: Callable[[int | None], range]
    replicas: list[int]
    forward: list[NonFiniteValue] = field(default_factory=list)
    backward: list[NonFiniteValue] = field(default_factory=list)
    gradients: dict[int | None, list[int]] = field(default_factory=dict)
    losses: list[int] = field(default_factory=list)
    loss: str | None = None
    order: list[Any] = field(default_factory=list)
    replica: int | None = None
    _stack: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record layers, gradients and losses while this context is open."""
        layers = operations_of(self.model)
        with (
            patched_method(LAYER_CALL, layers, self._wrap_layer),
            patched_method(REMATERIALIZED_CALL, layers, lambda layer, original: _call_once),
            patched_method(STATELESS_CALL, [self.model], self._wrap_model),
            patched_method(LOSS, [self.model], self._wrap_loss),
        ):
            yield

    def _wrap_model(self, model: keras.Model, call: Callable[..., Any]) -> Callable[..., Any]:
        def stateless_call(trainable: list[Any], *args: Any, **kwargs: Any) -> Any:
            own = [self._tapped_variable(number, value) for number, value in enumerate(trainable)]
            return call(own, *args, **kwargs)

        return stateless_call

    def _tapped_variable(self, number: int, value: Any) -> Any:
        replica = self.replica

        def record(gradient: Any) -> None:
            if kind_of(gradient):
                self.gradients.setdefault(replica, []).append(number)

        return _with_gradient_callback(value, record) if _varies(value) else value

    def _wrap_layer(self, layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._stack.append("" if layer is self.model else layer.name)
            path = "/".join(name for name in self._stack if name)
            try:
                has_finite_inputs = not any(map(kind_of, jax.tree.leaves((args, kwargs))))
                args, kwargs = self._tapped((args, kwargs), path, "inputs")
                outputs = call(*args, **kwargs)
            finally:
                self._stack.pop()
            if not any(layer is known for known in self.order):
                self.order.append(layer)
            self._record_outputs(outputs, path, has_finite_inputs)
            return self._tapped(outputs, path, "outputs")

        return wrapped

    def _record_outputs(self, outputs: Any, path: str, has_finite_inputs: bool) -> None:
        own = self.rows_of_replica(self.replica)
        for leaf in jax.tree.leaves(outputs):
            kind = kind_of(leaf)
            if kind:
                rows = tuple(own[row] for row in rows_of(jax.lax.stop_gradient(leaf), len(own)))
                self.forward.append(NonFiniteValue(path, kind, "outputs", has_finite_inputs, self.replica, rows))

    def _tapped(self, tree: Any, path: str, side: str) -> Any:
        """Return the same values, whose gradients will be recorded."""
        replica = self.replica

        def record(gradient: Any) -> None:
            kind = kind_of(gradient)
            if kind:
                self.backward.append(NonFiniteValue(path, kind, side, not self.backward, replica))

        return jax.tree.map(
            lambda leaf: copy_keras_mask(leaf, _with_gradient_callback(leaf, record)) if _varies(leaf) else leaf, tree
        )

    def _wrap_loss(self, model: keras.Model, compute: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = compute(*args, **kwargs)
            kind = kind_of(loss)
            if kind:
                self.loss = kind
                self.losses = [r for r in self.replicas if kind_of(self._own_loss(compute, r, args, kwargs))]
            return loss

        return compute_loss

    def _own_loss(self, compute: Callable[..., Any], replica: int, args: Any, kwargs: Any) -> Any:
        """Return the loss of one replica's rows; None if it cannot be computed for these rows only."""
        every, own = self.rows_of_replica(None), self.rows_of_replica(replica)

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, (jax.Array, np.ndarray)) or not np.ndim(leaf) or np.shape(leaf)[0] % len(every):
                return leaf
            k = np.shape(leaf)[0] // len(every)
            return leaf[own.start * k : own.stop * k]

        try:
            own_args, own_kwargs = jax.tree.map(cut, (args, kwargs))
            return compute(*own_args, **own_kwargs)
        except (TypeError, ValueError):
            return None


def _call_once(layer_call: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return the call of a layer as it is: ``jax.checkpoint`` would hide the values inside."""
    return layer_call


def _with_gradient_callback(value: jax.Array, record: Callable[[Any], None]) -> jax.Array:
    """Return the same value; ``record`` is called with its gradient."""

    @jax.custom_vjp
    def same(value: jax.Array) -> jax.Array:
        return value

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        record(gradient)
        return (gradient,)

    same.defvjp(lambda value: (value, None), backward)
    return same(value)


def _varies(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


_LISTED = 8  # of a longer list, the first are named


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a non-finite step.

    Attributes:
        sentence: for the user.
        replicas: with non-finite numbers; empty if unknown.
        layer: path of the first layer with non-finite outputs, if any.
        variable: path of the variable whose gradient was non-finite first, if the forward pass was finite.
        rows: number of rows of the batch, if known.
    """

    sentence: str
    replicas: tuple[int, ...] = ()
    layer: str | None = None
    variable: str | None = None
    rows: tuple[int, ...] = ()


def describe_nonfinite(model: keras.Model, bad: Sequence[tuple[int, int] | str]) -> str:
    """Describe what is not finite after a step: losses by their names, and variables by the part of the state and the position in it."""
    kinds = variables_of(model)
    losses = [name if name == "loss" else repr(name) for name in bad if isinstance(name, str)]
    paths = [kinds[part][number].path for part, number in (name for name in bad if not isinstance(name, str))]
    parts = [f"the {name}" for name in losses]
    if paths:
        others = f" and {counted(len(paths) - 1, 'other variable')}" if len(paths) > 1 else ""
        parts.append(f"variable {paths[0]!r}{others}")
    return f"Not finite after it: {'; '.join(parts)}."


def diagnose(functions: StepFunctions, state: Any, batch: Any) -> Diagnosis:
    """Run a non-finite step again, from the state before it on the batch as placed, and find its cause; every process calls it."""
    placement = functions.placement
    here = whole_batch(batch, placement)
    layout = placement.on_first_device().layout(count_rows(here))
    names = _Names(functions.model, placement)
    of_batch = _diagnose_batch(here, layout, names)
    try:
        record = rerun(functions, state, here)
    except Exception as error:  # The step was not finite, which is to be reported whatever fails here.
        kind = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return of_batch or Diagnosis(f"It could not be run again to find the cause ({kind}).")
    of_step = _diagnose_forward(record, names) or _diagnose_loss(record, names) or _diagnose_backward(record, names)
    if of_batch and (of_step is None or not _begins_in_layer(record)):
        return of_batch
    if of_batch and of_step:
        return replace(of_step, sentence=f"{of_batch.sentence} {of_step.sentence}")
    return of_step or Diagnosis(
        "Run again, its outputs, its loss and its gradients are finite: it is the update of the variables that is not (is the learning "
        "rate too large?), or a number so near to the limit that it depends on how the step is compiled."
    )


def _begins_in_layer(record: LayerTrace) -> bool:
    """Return whether the first layer with non-finite outputs had finite inputs."""
    return bool(record.forward) and record.forward[0].is_first


class _Names:
    """Formats the names of replicas and layers."""

    def __init__(self, model: keras.Model, placement: Placement) -> None:
        self.model = model
        self._placement = placement

    def replicas(self, numbers: Sequence[int | None]) -> tuple[int, ...]:
        """Return the replicas, each once, without None, which is the global batch."""
        return tuple(sorted({number for number in numbers if number is not None}))

    def on(self, replicas: Sequence[int]) -> str:
        """Format replicas: "On replica 1 of 2 (cpu:1), "; empty if there is only one."""
        count = self._placement.replicas
        if count == 1 or not replicas:
            return ""
        if len(replicas) > 1:
            return f"On {_listed('replica', replicas)} of {count}, "
        layout = self._placement.layout(count)
        place = max(d for d, first in enumerate(layout.first_replica) if first <= replicas[0] and layout.per_device[d])
        return f"On replica {replicas[0]} of {count} ({device_name(self._placement.devices[place])}), "

    def layer(self, path: str) -> str:
        """Format a layer: "layer 'encoder/log'", or the model."""
        return f"layer {path!r}" if path else f"the model {self.model.name!r} in its own call"


def _diagnose_batch(batch: Any, layout: Any, names: _Names) -> Diagnosis | None:
    found, rows = [], set()
    for name, value in _named_leaves(batch):
        kind = kind_of(value)
        if kind:
            own = rows_of(value, layout.rows)
            rows.update(own)
            found.append(f"{name} {kind} in {_listed('row', own)}" if own else f"{name} {kind}")
    if not found:
        return None
    ends = list(itertools.accumulate(layout.busy_replicas))
    replicas = names.replicas([bisect.bisect_right(ends, row) for row in rows])
    text = f"{names.on(replicas)}{' and '.join(found)} of the batch, counted from 0."
    return Diagnosis(capitalized(text), replicas, rows=tuple(sorted(rows)))


def _named_leaves(batch: Any) -> Iterator[tuple[str, Any]]:
    names = "the input has", "the targets have", "the sample weights have"
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    for name, part in zip(names, parts, strict=False):
        for path, leaf in jax.tree.leaves_with_path(part, is_leaf=is_rows):
            key = f" at {jax.tree_util.keystr(path)}" if path else ""
            noun, verb = name.rsplit(" ", 1)
            yield f"{noun}{key} {verb}", leaf.array if isinstance(leaf, PlacedRows) else leaf


def _diagnose_forward(record: LayerTrace, names: _Names) -> Diagnosis | None:
    if not record.forward:
        return None
    first = record.forward[0]
    replicas = names.replicas([seen.replica for seen in record.forward])
    origin = "from finite numbers" if first.is_first else "from what was not finite before"
    rows = f", in {_listed('row', first.rows)} of the batch, counted from 0" if first.rows else ""
    text = f"{names.on(replicas)}{names.layer(first.path)} is the first that gives {first.kind}, {origin}{rows}."
    nan = next((x for x in record.forward if "NaN" in x.kind), None)
    if nan and "NaN" not in first.kind and nan.path != first.path:
        text += f" The first NaN comes from {names.layer(nan.path)}."
    return Diagnosis(capitalized(text), replicas, first.path or None, rows=first.rows)


def _diagnose_loss(record: LayerTrace, names: _Names) -> Diagnosis | None:
    if record.loss is None:
        return None
    replicas = tuple(record.losses) or names.replicas([seen.replica for seen in record.backward])
    text = f"{names.on(replicas)}all outputs of the model are finite, and the loss is {record.loss}."
    return Diagnosis(capitalized(text), replicas)


def _diagnose_backward(record: LayerTrace, names: _Names) -> Diagnosis | None:
    if isinstance(record.model.optimizer, keras.optimizers.LossScaleOptimizer):
        return None  # It makes gradients overflow, and handles that.
    replicas = names.replicas([*(seen.replica for seen in record.backward), *record.gradients])
    own = replicas[0] if replicas else None
    first = next((seen for seen in record.backward if seen.replica == own), None)
    variable = _first_variable(record, own)
    if first is None and variable is None:
        return None
    text = f"{names.on(replicas)}the forward pass is finite, and the backward pass is not"
    if first and first.side == "inputs":
        text += f": behind {names.layer(first.path)} the gradient is {first.kind}"
    elif first:
        text += f": the gradient is {first.kind} when it comes to {names.layer(first.path)}, from the loss or what else is no layer"
    if variable:
        text += f"; the first variable whose gradient is bad is {variable!r}"
    return Diagnosis(capitalized(text + "."), replicas, first.path or None if first else None, variable)


def _first_variable(record: LayerTrace, replica: int | None) -> str | None:
    """Return the path of the variable with a non-finite gradient that was used last in the forward pass."""
    variables = record.model.trainable_variables

    def used(number: int) -> int:
        layers = (x.trainable_variables if isinstance(x, keras.Layer) else () for x in record.order)
        owners = (n for n, own in enumerate(layers) if any(variables[number] is variable for variable in own))
        return next(owners, -1)

    bad = sorted(set(record.gradients.get(replica, [])))
    return variables[max(bad, key=used)].path if bad else None


def _listed(noun: str, numbers: Iterable[int]) -> str:
    """Format numbers: "row 3", "rows 3 and 7", "rows 1, 2, 3, 4, 5, 6, 7, 8 and 12 more"."""
    found = [str(number) for number in numbers]
    if len(found) > _LISTED + 1:
        found = [*found[:_LISTED], f"{len(found) - _LISTED} more"]
    return f"{noun}{'s' * (len(found) > 1)} {listed(found)}"


class _ReplayExecutor(EagerExecutor):
    """An executor whose replicas run one after the other, each noted in ``record``."""

    def __init__(self, device: jax.Device, record: LayerTrace, global_batch_note: str) -> None:
        super().__init__(device)
        self._record, self.global_batch_note = record, global_batch_note

    def global_batch(self, rows: PlacedRows) -> jax.Array:
        """See :class:`Executor`; the rows were brought together before."""
        return rows.array

    def forward(self, forward: SpmdForward, inputs: list[Any], placed: list[PlacedRows | None]) -> ReplicaResult:
        numbers = itertools.count()  # Replicas without rows are the last ones.

        def call(*values: Any, **options: Any) -> ReplicaResult:
            self._record.replica = next(numbers)
            try:
                return forward.call(*values, **options)
            finally:
                self._record.replica = None

        return super().forward(replace(forward, call=call), inputs, placed)


def rerun(functions: StepFunctions, state: Any, batch: Any) -> LayerTrace:
    """Run a training step from the state before it, on a batch of :func:`whole_batch`, and return its trace; the model, its variables and random
    states are unchanged.
    """
    placement, model = functions.placement, functions.model
    layout = placement.on_first_device().layout(count_rows(batch))
    device = placement.first_local_device
    record = LayerTrace(model, lambda replica: _own_rows(layout, replica), list(range(len(layout.busy_replicas))))
    executor = _ReplayExecutor(device, record, functions.executor.global_batch_note)
    with jax.default_device(device), record.recording(), random_state_kept():
        own = without_padding(_on_one_device(state, placement))
        logs, _ = functions.build_step(executor, "train")(own, batch)
    record.loss = record.loss or next(filter(None, map(kind_of, loss_logs(logs).values())), None)
    return record


def whole_batch(batch: Any, placement: Placement) -> Any:
    """Gather a placed batch on the first device of this process; every process calls it."""

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, PlacedRows):
            return _on_one_device(leaf, placement)
        array = jax.jit(PlacedRows.global_batch, out_shardings=placement.replicated)(leaf)
        return PlacedRows(_on_one_device(array, placement), leaf.layout)

    return jax.tree.map(whole, batch, is_leaf=is_rows)


def _on_one_device(tree: Any, placement: Placement) -> Any:
    device = placement.first_local_device

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return jax.device_put(leaf, device)
        if isinstance(leaf.sharding, NamedSharding) and not leaf.is_fully_replicated:
            leaf = laid_out(placement.replicated)(leaf)
        return jax.device_put(leaf.addressable_shards[0].data, device)

    return jax.tree.map(own, tree)


def _own_rows(layout: BatchLayout, replica: int | None) -> range:
    if replica is None:
        return range(layout.rows)
    start = sum(layout.busy_replicas[:replica])
    return range(start, start + layout.busy_replicas[replica])
