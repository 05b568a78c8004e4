"""Explains why a step is not finite: the batch, a layer in the forward pass, the loss, a gradient in the backward pass, or the update.

The step is run again, from the same state and batch, one replica after the other and uncompiled, on the first device of each process.
Every process runs all replicas, so all find the same, and wait for each other only to gather the rows of the batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding

from lockstep.data.device_placement import PlacedRows, Placement, count_rows, join_rows
from lockstep.data.iterator_state import capture_random_state, restore_random_state
from lockstep.devices.batch_split import Layout
from lockstep.devices.names import device_name
from lockstep.execution.call_splitter import CallTrace
from lockstep.execution.nonfinite_gate import loss_logs
from lockstep.execution.replica import ReplicaResult
from lockstep.execution.spmd import SpmdForward, forward_eagerly
from lockstep.execution.train_functions import StepFunctions
from lockstep.fit.nan_guard.layer_trace import LayerTrace, NonFiniteValue, kind_of, rows_of

__all__ = ["Diagnosis", "count_of", "describe_nonfinite", "diagnose", "rerun", "whole_batch"]

_LISTED = 8  # of a longer list, the first are named


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a non-finite step.

    Attributes:
        sentence: for the user.
        replicas: with non-finite numbers; empty if unknown.
        layer: path of the first layer with non-finite outputs, if any.
        variable: path of the variable whose gradient was non-finite first, if the forward pass was finite.
        rows: of the batch, if known.
    """

    sentence: str
    replicas: tuple[int, ...] = ()
    layer: str | None = None
    variable: str | None = None
    rows: tuple[int, ...] = ()


def describe_nonfinite(model: keras.Model, bad: Sequence[tuple[int, int] | str]) -> str:
    """Describe what is not finite after a step.

    Args:
        model: of the step.
        bad: names of losses, and variables as part of the state and position in it.
    """
    kinds = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables
    losses = [name if name == "loss" else repr(name) for name in bad if isinstance(name, str)]
    paths = [kinds[part][number].path for part, number in (name for name in bad if not isinstance(name, str))]
    parts = [f"the {name}" for name in losses]
    if paths:
        others = f" and {_counted(len(paths) - 1, 'other variable')}" if len(paths) > 1 else ""
        parts.append(f"variable {paths[0]!r}{others}")
    return f"Not finite after it: {'; '.join(parts)}."


def diagnose(functions: StepFunctions, state: Any, batch: Any) -> Diagnosis:
    """Run a non-finite step again and find its cause; every process calls it.

    Args:
        functions: of the model.
        state: before the step.
        batch: as placed on the devices.
    """
    placement = functions.placement
    here = whole_batch(batch, placement)
    layout = placement.layout(count_of(here))
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
        sentence = f"{of_batch.sentence} {of_step.sentence}"
        return Diagnosis(sentence, of_step.replicas, of_step.layer, of_step.variable, of_step.rows)
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
    ends = [sum(layout.busy_replicas[: n + 1]) for n in range(len(layout.busy_replicas))]
    replicas = names.replicas([next(n for n, end in enumerate(ends) if row < end) for row in rows])
    text = f"{names.on(replicas)}{' and '.join(found)} of the batch, counted from 0."
    return Diagnosis(_sentence(text), replicas, rows=tuple(sorted(rows)))


def _named_leaves(batch: Any) -> Iterator[tuple[str, Any]]:
    names = "the input has", "the targets have", "the sample weights have"
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    for name, part in zip(names, parts, strict=False):
        leaves, _ = jax.tree_util.tree_flatten_with_path(part, is_leaf=lambda leaf: isinstance(leaf, PlacedRows))
        for path, leaf in leaves:
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
    return Diagnosis(_sentence(text), replicas, first.path or None, rows=first.rows)


def _diagnose_loss(record: LayerTrace, names: _Names) -> Diagnosis | None:
    if record.loss is None:
        return None
    replicas = tuple(record.losses) or names.replicas([seen.replica for seen in record.backward])
    text = f"{names.on(replicas)}all outputs of the model are finite, and the loss is {record.loss}."
    return Diagnosis(_sentence(text), replicas)


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
    if first:
        text += _describe_gradient(first, names)
    if variable:
        text += f"; the first variable whose gradient is bad is {variable!r}"
    return Diagnosis(_sentence(text + "."), replicas, first.path or None if first else None, variable)


def _describe_gradient(first: NonFiniteValue, names: _Names) -> str:
    if first.side == "inputs":
        return f": behind {names.layer(first.path)} the gradient is {first.kind}"
    return f": the gradient is {first.kind} when it comes to {names.layer(first.path)}, from the loss or what else is no layer"


def _first_variable(record: LayerTrace, replica: int | None) -> str | None:
    """Return the path of the variable with a non-finite gradient that was used last in the forward pass."""
    variables = record.model.trainable_variables

    def used(number: int) -> int:
        owners = (n for n, x in enumerate(record.order) if isinstance(x, keras.Layer) and _has(x, variables[number]))
        return next(owners, -1)

    bad = sorted(set(record.gradients.get(replica, [])))
    return variables[max(bad, key=used)].path if bad else None


def _has(layer: keras.Layer, variable: keras.Variable) -> bool:
    return any(variable is own for own in layer.trainable_variables)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _listed(noun: str, numbers: Iterable[int]) -> str:
    """Format numbers: "row 3", "rows 3 and 7", "rows 1, 2, 3, 4, 5, 6, 7, 8 and 12 more"."""
    found = [str(number) for number in numbers]
    if len(found) > _LISTED + 1:
        found = [*found[:_LISTED], f"{len(found) - _LISTED} more"]
    return f"{noun} {found[0]}" if len(found) == 1 else f"{noun}s {', '.join(found[:-1])} and {found[-1]}"


def _counted(number: int, noun: str) -> str:
    """Format a number with its noun: "1 time", "2 times"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


class _ReplayExecutor:
    """An executor whose replicas run one after the other, each noted in ``record``."""

    def __init__(self, record: LayerTrace, global_batch_note: str) -> None:
        self._record, self.global_batch_note, self.supports_second_derivatives = record, global_batch_note, True

    def partition_calls(self, layout: Layout, trace: CallTrace) -> tuple[tuple[int, ...], ...]:
        """See :class:`Executor`: each replica is one."""
        return layout.per_device

    def join_rows(self, rows: PlacedRows) -> jax.Array:
        """See :class:`Executor`; the rows were brought together before."""
        return rows.array

    def forward(self, forward: SpmdForward, inputs: list[Any], places: list[PlacedRows | None]) -> ReplicaResult:
        """See :class:`Executor`."""
        busy = iter(_busy(forward.layout))

        def call(*values: Any, **options: Any) -> ReplicaResult:
            self._record.replica = next(busy)
            try:
                return forward.call(*values, **options)
            finally:
                self._record.replica = None

        return forward_eagerly(replace(forward, call=call), inputs)


def rerun(functions: StepFunctions, state: Any, batch: Any) -> LayerTrace:
    """Run a training step and return its trace; the model, its variables and random states are unchanged.

    Args:
        functions: of the model.
        state: before the step, on the devices.
        batch: on the first device, as :func:`whole_batch` gives it.
    """
    placement, model = functions.placement, functions.model
    layout = placement.layout(count_of(batch))
    record = LayerTrace(model, lambda replica: _own_rows(layout, replica), _busy(layout))
    executor: Any = _ReplayExecutor(record, functions.executor.global_batch_note)
    device = placement.first_local_device
    random = capture_random_state()
    try:
        with jax.default_device(device), record.recording():
            logs, _ = functions.build_step(executor, "train")(_on_one_device(state, placement), batch)
    finally:
        restore_random_state(random)
    record.loss = record.loss or next(filter(None, map(kind_of, loss_logs(logs).values())), None)
    return record


def whole_batch(batch: Any, placement: Placement) -> Any:
    """Gather a placed batch on the first device of this process; every process calls it."""

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, PlacedRows):
            return _on_one_device(leaf, placement)
        array = jax.jit(join_rows, out_shardings=placement.replicated)(leaf)
        return PlacedRows(_on_one_device(array, placement), leaf.layout)

    return jax.tree.map(whole, batch, is_leaf=lambda leaf: isinstance(leaf, PlacedRows))


def _on_one_device(tree: Any, placement: Placement) -> Any:
    device = placement.first_local_device

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return jax.device_put(leaf, device)
        if isinstance(leaf.sharding, NamedSharding) and not leaf.is_fully_replicated:
            leaf = jax.jit(lambda array: array, out_shardings=placement.replicated)(leaf)
        return jax.device_put(leaf.addressable_shards[0].data, device)

    return jax.tree.map(own, tree)


def count_of(batch: Any) -> int:
    """Return the number of rows of a batch."""
    arrays = [
        x.array if isinstance(x, PlacedRows) else x
        for x in jax.tree.leaves(batch, is_leaf=lambda x: isinstance(x, PlacedRows))
    ]
    return count_rows(arrays)


def _busy(layout: Layout) -> list[int]:
    """Return the numbers of the replicas that have rows."""
    every = [rows for device in layout.per_device for rows in device]
    return [replica for replica, rows in enumerate(every) if rows]


def _own_rows(layout: Layout, replica: int | None) -> range:
    if replica is None:
        return range(layout.rows)
    every = [rows for device in layout.per_device for rows in device]
    start = sum(every[:replica])
    return range(start, start + every[replica])
