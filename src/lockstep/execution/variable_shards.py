"""``shard="variables"`` and ``shard="optimizer"``: each device keeps a shard of every large variable, or of the optimizer's.

``Placement.slice_axis`` chooses the axis. If its length is not divisible by the number of devices, the last shards are padded
between two steps and in collectives. A sharded variable is gathered where a forward pass uses it. The transpose of a gather is a
reduce-scatter, so a device also gets only its shard of a gradient, and the update runs on shards. Source: Rajbhandari et al., "ZeRO"
(2020), stage 3. Both are explicit collectives inside of ``shard_map``; the partitioner of XLA decides nothing about them.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax.sharding import PartitionSpec

from lockstep._keras.recompute import blocks_of, layers_where, recompute_layers
from lockstep._padded_array import PaddedArray, cut, pad
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


@dataclass(frozen=True)
class ShardAxis:
    """The axis along which a variable is sharded, and its length without padding."""

    axis: int
    length: int


Axes = tuple[ShardAxis | None, ...]  # for each variable; None: it is whole


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
    axes = [placement.slice_axis(tuple(value.shape)) for value in values]
    pairs = zip(values, axes, strict=True)
    return tuple(None if axis is None else ShardAxis(axis, value.shape[axis]) for value, axis in pairs)


def sharded_values(values: Sequence[jax.Array], axes: Axes, placement: Placement) -> list[jax.Array]:
    """Return values whose shards are equal, as ``shard_map`` takes them."""
    pairs = zip(values, axes, strict=True)
    padded = [value if axis is None else pad(value, placement.slice_sharding(value.shape)) for value, axis in pairs]
    return [value.array if isinstance(value, PaddedArray) else value for value in padded]


def gathered(values: Sequence[jax.Array], axes: Axes) -> list[jax.Array]:
    """Return whole values from this device's shards; to be called inside of ``shard_map``."""
    return [value if axis is None else _gather(value, axis) for value, axis in zip(values, axes, strict=True)]


def scattered_sum(value: jax.Array, along: ShardAxis, devices: int) -> jax.Array:
    """Return this device's shard of the sum over the devices; to be called inside of ``shard_map``."""
    padding = [(0, -along.length % devices if axis == along.axis else 0) for axis in range(value.ndim)]
    padded = jnp.pad(value, padding)
    return lax.psum_scatter(padded, DEVICE_AXIS, scatter_dimension=along.axis, tiled=True)


def without_shard_padding(values: Sequence[jax.Array], like: Sequence[Any], placement: Placement) -> list[jax.Array]:
    """Return what ``shard_map`` returned as shards, with the shapes of ``like``."""
    return [
        value if value.shape == one.shape else cut(PaddedArray(value, one.shape), placement.slice_sharding(one.shape))
        for value, one in zip(values, like, strict=True)
    ]


def shard_spec(shard: ShardAxis | None) -> PartitionSpec:
    """Return the ``PartitionSpec`` of a value that is sharded along an axis; None: it is whole on each device."""
    return PartitionSpec() if shard is None else PartitionSpec(*[None] * shard.axis, DEVICE_AXIS)


def _gather(shard: jax.Array, along: ShardAxis) -> jax.Array:
    whole = lax.all_gather(shard, DEVICE_AXIS, axis=along.axis, tiled=True)
    return lax.slice_in_dim(whole, 0, along.length, axis=along.axis)


def gather_variables(call: ReplicaCall, model: keras.Model, placement: Placement, recompute: Recompute) -> ReplicaCall:
    """Return the forward pass of a replica, ``call`` on whole values, as a function of shards of the variables, or of whole values.

    Every variable is gathered once for the whole pass, and once more in each call of a recomputed layer; what is not used is not
    computed. So a variable that is used outside of its layer has its value there, too.
    """
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    axes = shard_axes(variables, placement)
    axis_of = {id(variable): axis for variable, axis in zip(variables, axes, strict=True)}

    def run(
        trainable: list[Any], non_trainable: list[Any], inputs: list[Any], shared: list[Any], used: Any = None
    ) -> ReplicaResult:
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
            return call(whole[: len(trainable)], whole[len(trainable) :], inputs, shared, used=used)

    return run


def recompute_whole(
    model: keras.Model, placement: Placement, recompute: Recompute
) -> contextlib.AbstractContextManager[None]:
    """Recompute layers in the backward pass of a call of ``model`` with whole variables, while a context is open."""
    return recompute_layers(_layers_of_call(model, placement, recompute), {}, lambda variable, value: value)


def _layers_of_call(model: keras.Model, placement: Placement, recompute: Recompute) -> list[keras.Layer]:
    """Return the layers to recompute; on one device, where no variable is sharded, blocks are those of several devices."""
    if placement.row_shards > 1:
        return layers_to_recompute(model, partial(is_sharded, placement), recompute)
    return layers_to_recompute(model, lambda variable: is_large(tuple(variable.shape)), recompute)


def layers_to_recompute(
    model: keras.Model, is_sharded: Callable[[keras.Variable], bool], recompute: Recompute
) -> list[keras.Layer]:
    """Return the layers of ``model`` that are recomputed in the backward pass; ``is_sharded`` says which variables are sharded."""
    if recompute is None:
        return []
    return layers_where(model, recompute) if callable(recompute) else blocks_of(model, is_sharded)


def is_sharded(placement: Placement, variable: keras.Variable) -> bool:
    """Return whether a variable is sharded over the devices."""
    return placement.slice_axis(tuple(variable.shape)) is not None
