"""``shard="variables"`` and ``shard="optimizer"``: each device keeps a shard of every large variable, or of the optimizer's.

``Placement.slice_axis`` chooses the axis. A sharded variable is gathered where a forward pass uses it. The transpose of a gather is a reduce-scatter, so a device also gets only its shard of a gradient, and the update runs on shards. Source:
Rajbhandari et al., "ZeRO" (2020), stage 3. Both are explicit collectives inside of ``shard_map``; the partitioner of XLA decides nothing
about them.
"""

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import keras
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from lockstep._keras.recompute import blocks_of, layers_where, recompute_layers
from lockstep.devices.placement import DEVICE_AXIS, Placement, is_large
from lockstep.execution.replica import ReplicaCall, ReplicaResult

# By platform, options of XLA, which joins collectives up to so many bytes. Joined ones keep all gathered variables and whole gradients in
# memory at once. For many TPUs it writes gathers as all-reduces; small ones are still joined.
SEPARATE_COLLECTIVES = {
    "gpu": {
        "xla_gpu_all_gather_combine_threshold_bytes": "1",
        "xla_gpu_reduce_scatter_combine_threshold_bytes": "1",
    },
    "tpu": {"xla_jf_crs_combiner_threshold_in_bytes": str(1 << 20)},
}

Shard = Literal["optimizer", "variables"] | None
Recompute = str | Callable[[keras.Layer], bool] | None
Axes = tuple[int | None, ...]  # for each variable the axis along which it is sharded; None: it is whole

NAMED = 4  # variables in a note; strategy.layout(model) lists all


def state_shardings(state: Any, placement: Placement, shard: Shard) -> Any:
    """Return the shardings of a state: trainable and non-trainable variables, for training those of the optimizer, and metrics."""
    variables, optimizer = shard == "variables", shard is not None
    of_training, of_evaluation = (variables, variables, optimizer, False), (variables, variables, False)
    is_sharded = of_training if len(state) == 4 else of_evaluation[: len(state)]  # Predictions have no metrics.
    return tuple(
        [placement.slice_sharding(value.shape) for value in part] if sharded else placement.replicated
        for part, sharded in zip(state, is_sharded, strict=True)
    )


def shard_axes(values: Sequence[Any], placement: Placement) -> Axes:
    """Return for each value of a variable the axis along which it is sharded."""
    return tuple(placement.slice_axis(value.shape) for value in values)


def gathered(values: Sequence[jax.Array], axes: Axes) -> list[jax.Array]:
    """Return whole values from this device's shards; to be called inside of ``shard_map``."""
    return [value if axis is None else _gather(value, axis) for value, axis in zip(values, axes, strict=True)]


def shard_spec(axis: int | None) -> PartitionSpec:
    """Return the ``PartitionSpec`` of a value that is sharded along ``axis``; None: it is whole on each device."""
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, DEVICE_AXIS)


def _gather(shard: jax.Array, axis: int) -> jax.Array:
    return lax.all_gather(shard, DEVICE_AXIS, axis=axis, tiled=True)


def gather_variables(call: ReplicaCall, model: keras.Model, placement: Placement, recompute: Recompute) -> ReplicaCall:
    """Return the forward pass of a replica as a function of shards of the variables, or of whole values.

    Every variable is gathered once for the whole pass, and once more in each call of a recomputed layer; what is not used is not
    computed. So a variable that is used outside of its layer has its value there, too.

    Args:
        call: the forward pass on whole values.
        model: the model that it calls.
        placement: the devices.
        recompute: which layers are recomputed in the backward pass.
    """
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    axes = shard_axes(variables, placement)
    axis_of = {id(variable): axis for variable, axis in zip(variables, axes, strict=True)}

    def run(trainable: list[Any], non_trainable: list[Any], inputs: list[Any], shared: list[Any]) -> ReplicaResult:
        values = [*trainable, *non_trainable]
        pairs = list(zip(variables, values, strict=True))
        is_shard = [value.shape != tuple(variable.shape) for variable, value in pairs]
        whole = gathered(values, tuple(axis if shard else None for axis, shard in zip(axes, is_shard, strict=True)))
        shards = {
            id(variable): (value, gathered_value)
            for (variable, value), gathered_value, shard in zip(pairs, whole, is_shard, strict=True)
            if shard
        }
        layers = _layers_of_call(model, placement, recompute)
        with recompute_layers(layers, shards, lambda variable, shard: gathered([shard], (axis_of[id(variable)],))[0]):
            return call(whole[: len(trainable)], whole[len(trainable) :], inputs, shared)

    return run


def recompute_whole(
    model: keras.Model, placement: Placement, recompute: Recompute
) -> contextlib.AbstractContextManager[None]:
    """Recompute layers in the backward pass of a call of ``model`` with whole variables, while a context is open."""
    return recompute_layers(_layers_of_call(model, placement, recompute), {}, lambda variable, value: value)


def _layers_of_call(model: keras.Model, placement: Placement, recompute: Recompute) -> list[keras.Layer]:
    """Return the layers to recompute; on one device, where no variable is sharded, blocks are those of several devices."""
    if placement.row_shards > 1:
        return layers_to_recompute(model, partial(_is_sharded, placement), recompute)
    return layers_to_recompute(model, lambda variable: is_large(tuple(variable.shape)), recompute)


def layers_to_recompute(
    model: keras.Model, is_sharded: Callable[[keras.Variable], bool], recompute: Recompute
) -> list[keras.Layer]:
    """Return the layers of ``model`` that are recomputed in the backward pass; ``is_sharded`` says which variables are sharded."""
    if recompute is None:
        return []
    return layers_where(model, recompute) if callable(recompute) else blocks_of(model, is_sharded)


@dataclass(frozen=True)
class VariableLayout:
    """Where one variable lies.

    Attributes:
        path: name within the model or its optimizer.
        owner: "model" or "optimizer".
        shape: shape of the whole variable.
        bytes: size of the whole variable.
        axes: for each axis of the variable the axis of the mesh along which it is sharded, None if it is not.
        device_bytes: on each device.
        gathered: in which parts of a step the whole value is gathered; what is gathered in "forward" alone is kept for the backward
            pass. "" for a variable that is whole, or never gathered.
        reason: why ``layout="auto"`` has chosen these axes.
        collectives: those of the forward pass that follow from them, if they are known.
    """

    path: str
    owner: str
    shape: tuple[int, ...]
    bytes: int
    axes: tuple[str | None, ...]
    device_bytes: int
    gathered: str = ""
    reason: str = ""
    collectives: tuple[str, ...] = ()

    @property
    def axis(self) -> int | None:
        """The first axis along which the variable is sharded; None: it is whole on each device."""
        return next((number for number, axis in enumerate(self.axes) if axis is not None), None)


@dataclass(frozen=True)
class ModelLayout:
    """Where the variables of a model and of its optimizer lie; ``str`` makes a table.

    Attributes:
        devices: number of devices.
        variables: one entry for each variable.
    """

    devices: int
    variables: tuple[VariableLayout, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all variables."""
        return sum(variable.bytes for variable in self.variables)

    @property
    def device_bytes(self) -> int:
        """Bytes of the variables on each device, between two steps."""
        return sum(variable.device_bytes for variable in self.variables)

    def rules(self) -> dict[str, tuple[str | None, ...]]:
        """Return the layout of the model's sharded variables as rules.

        Returns:
            By regular expression the axes of the mesh; it can be changed and given to ``ModelParallelStrategy`` as ``layout``.

        Example:
            >>> import lockstep
            >>> from lockstep.execution.variable_shards import ModelLayout, VariableLayout
            >>> kernel = VariableLayout("up/kernel", "model", (64, 256), 65536, (None, "model"), 16384)
            >>> ModelLayout(4, (kernel,)).rules()
            {'up/kernel': (None, 'model')}
        """
        return {re.escape(one.path): one.axes for one in self.variables if one.owner == "model" and any(one.axes)}

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("variable", "shape", "MiB", "MiB a device", "sharded along", "gathered", "why")]
        for one in self.variables:
            along = ", ".join(f"axis {n} by {axis}" for n, axis in enumerate(one.axes) if axis) or "whole"
            sizes = mebibytes(one.bytes), mebibytes(one.device_bytes)
            rows.append((one.path, str(one.shape), *sizes, along, one.gathered, one.reason))
        total = mebibytes(self.bytes), mebibytes(self.device_bytes)
        rows.append((f"all, {self.devices} devices", "", *total, "", "", ""))
        rows = [row[: 7 if any(row[6] for row in rows[1:]) else 6] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def mebibytes(number: int) -> str:
    """Format a number of bytes, in MiB."""
    return f"{number / 2**20:.3f}"


def layout_of(
    model: keras.Model, placement: Placement, shard: Shard, recompute: Recompute, *, deterministic: bool
) -> ModelLayout:
    """Return where the variables lie between two steps.

    Args:
        model: a built model; variables that its optimizer has not made yet are left out.
        placement: the devices.
        shard: which variables are sharded.
        recompute: which layers are recomputed in the backward pass.
        deterministic: whether all variables are gathered before a step.
    """
    layers = layers_to_recompute(model, partial(_is_sharded, placement), recompute)
    twice = {id(variable) for layer in layers for variable in layer.variables}

    def row(owner: str, variable: keras.Variable) -> VariableLayout:
        shape = tuple(variable.shape)
        is_sharded = shard == "variables" or (shard == "optimizer" and owner == "optimizer")
        axis = placement.slice_axis(shape) if is_sharded else None
        size = math.prod(shape) * np.dtype(variable.dtype).itemsize
        device_size = size if axis is None else size // len(placement.devices)
        if axis is None or (owner == "optimizer" and not deterministic):
            gathered = ""
        else:
            gathered = "before a step" if deterministic else "forward, backward" if id(variable) in twice else "forward"
        axes = tuple(DEVICE_AXIS if number == axis else None for number in range(len(shape)))
        return VariableLayout(variable.path, owner, shape, size, axes, device_size, gathered)

    optimizer = getattr(model, "optimizer", None)
    rows = [row("model", variable) for variable in model.weights]
    rows += [row("optimizer", variable) for variable in (optimizer.variables if optimizer else ())]
    return ModelLayout(len(placement.devices), tuple(rows))


def layout_notes(layout: ModelLayout, optimizer: keras.Optimizer | None) -> list[str]:
    """Return a sentence for the large variables that stay whole, one for those that no recomputed layer holds, and one for Muon."""
    if layout.devices == 1:
        return []
    notes = []
    if whole := [one for one in layout.variables if one.axis is None and is_large(one.shape)]:
        notes.append(
            f"{_size_of(whole)} of large variables stay whole on each device, as none of their axes can be divided by "
            f"{layout.devices}: {_named(whole)}"
        )
    if isinstance(getattr(optimizer, "inner_optimizer", optimizer), keras.optimizers.Muon):
        notes.append("optimizer Muon multiplies whole matrices, for which XLA adds collectives to the update")
    kept = [one for one in layout.variables if one.gathered == "forward"]
    if kept and len(kept) < sum(one.gathered != "" for one in layout.variables):
        notes.append(f"no recomputed layer holds {_named(kept)}: {_size_of(kept)} are kept for the backward pass")
    return notes


def _size_of(variables: list[VariableLayout]) -> str:
    return f"{mebibytes(sum(one.bytes for one in variables))} MiB"


def _named(variables: list[VariableLayout]) -> str:
    """Return the paths and shapes of the first variables, and how many there are beside them."""
    shown = ", ".join(f"{one.path!r} {one.shape}" for one in variables[:NAMED])
    more = len(variables) - NAMED
    return f"{shown} and {more} more, which strategy.layout(model) lists" if more > 0 else shown


def _is_sharded(placement: Placement, variable: keras.Variable) -> bool:
    return placement.slice_axis(tuple(variable.shape)) is not None
