"""Gradient checkpointing of blocks: they are computed again in the backward pass, so that gathered weights are not kept.

Undocumented parts, as of Keras 3.15: ``_layers``; that ``__call__`` of a layer or an operation looks ``call`` up on the instance; the
masks that Keras attaches to tensors; the current ``StatelessScope``; ``_loss_ids``.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import keras
from keras.src.backend.common.stateless_scope import get_stateless_scope

from lockstep._keras.graph import flatten_in_order, get_keras_mask, in_order, set_keras_mask
from lockstep._keras.layer_attributes import attribute_arrays, set_attribute_leaves
from lockstep._keras.patches import LAYER_CALL, patched_method

Gather = Callable[[keras.Variable, jax.Array], jax.Array]
# By the id of a variable its shard on this device, and its whole value.
Shards = Mapping[int, tuple[jax.Array, jax.Array]]


def blocks_of(model: keras.Model, is_sharded: Callable[[keras.Variable], bool]) -> list[Any]:
    """Return the layers of a built model to recompute one by one: of those with a sharded variable, repeated ones and others that hold no
    layers.
    """
    found: dict[int, Any] = {}

    def visit(parent: Any) -> None:
        children = [layer for layer in parent._layers if any(map(is_sharded, layer.variables))]
        kinds = Counter(map(_kind, children))
        for layer in children:
            is_single = kinds[_kind(layer)] == 1
            if is_single and any(is_sharded(variable) for one in layer._layers for variable in one.variables):
                visit(layer)
            else:
                found[id(layer)] = layer

    visit(model)
    return list(found.values())


def layers_where(model: keras.Model, is_chosen: Callable[[Any], bool]) -> list[Any]:
    """Return the outermost layers of ``model`` for which ``is_chosen`` is true."""
    found: dict[int, Any] = {}

    def visit(parent: Any) -> None:
        for layer in parent._layers:
            if is_chosen(layer):
                found[id(layer)] = layer
            else:
                visit(layer)

    visit(model)
    return list(found.values())


def _kind(layer: Any) -> Any:
    return type(layer), tuple(variable.shape for variable in layer.variables)


def recompute_layers(layers: Iterable[Any], shards: Shards, gather: Gather) -> contextlib.AbstractContextManager[None]:
    """Make each of ``layers`` compute its results again in the backward pass, while this context is open.

    Only the shards of its variables and its arguments are kept for the backward pass. Outside of a ``StatelessScope`` a layer is
    called as usual.

    Args:
        layers: layers that do not contain each other.
        shards: by the ``id`` of a variable its shard on this device, and the whole value with which the model is called.
        gather: returns the whole value of a variable, given its shard.
    """

    def around(layer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            scope = get_stateless_scope()
            if scope is None:
                return method(*args, **kwargs)
            return _recomputed_call(layer, method, scope, shards, gather, args, kwargs)

        return call

    return patched_method(LAYER_CALL, layers, around)


def _recomputed_call(
    layer: Any,
    method: Callable[..., Any],
    scope: keras.StatelessScope,
    shards: Shards,
    gather: Gather,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    leaves, structure = flatten_in_order((args, kwargs))
    arrays = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
    known = [variable for variable in layer.variables if scope.get_current_value(variable) is not None]
    values, is_shard = _values_to_keep([(variable, scope.get_current_value(variable)) for variable in known], shards)
    own_keys = {id(variable) for variable in known}
    owners: list[Any] = []  # for each loss the layer that it is added to

    def run(values: list[Any], arrays: dict[int, Any], masks: list[Any]) -> Any:
        _set_masks(arrays.values(), masks)
        own_leaves = [arrays.get(place, leaf) for place, leaf in enumerate(leaves)]
        own_args, own_kwargs = jax.tree.unflatten(structure, own_leaves)
        stored_before = attribute_arrays(layer)
        before = [
            gather(variable, value) if is_one else value
            for variable, value, is_one in zip(known, values, is_shard, strict=True)
        ]
        with keras.StatelessScope(collect_losses=scope.collect_losses) as inner:
            inner.state_mapping.update(scope.state_mapping)  # The layer may use variables of other layers.
            for variable, value in zip(known, before, strict=True):
                inner.add_update((variable, value))
            outputs = method(*own_args, **own_kwargs)
        others = {key: new for key, new in inner.state_mapping.items() if key not in own_keys}
        others = {key: new for key, new in others.items() if new is not scope.state_mapping.get(key)}
        stored = {place: new for place, new in attribute_arrays(layer).items() if new is not stored_before.get(place)}
        after = [inner.get_current_value(variable) for variable in known]
        changes = [None if new is old else new for new, old in zip(after, before, strict=True)]
        owners[:] = [_take_loss(layer, loss) for loss in inner.losses]
        masks = [get_keras_mask(output) for output in flatten_in_order(outputs)[0]]
        return in_order((outputs, masks, changes, others, inner.losses, stored))

    masks = [get_keras_mask(array) for array in arrays.values()]
    outputs, masks, changes, others, losses, stored = jax.checkpoint(run)(values, arrays, masks)
    scope.state_mapping.update(others)
    set_attribute_leaves(list(stored), list(stored.values()))
    _set_masks(flatten_in_order(outputs)[0], masks)
    for variable, new in zip(known, changes, strict=True):
        if new is not None:
            scope.add_update((variable, new))
    for owner, loss in zip(owners, losses, strict=True):
        owner.add_loss(loss)
    return outputs


def _set_masks(tensors: Iterable[Any], masks: Iterable[Any]) -> None:
    for tensor, mask in zip(tensors, masks, strict=True):
        if mask is not None:
            set_keras_mask(tensor, mask)


def _values_to_keep(current: list[tuple[keras.Variable, Any]], shards: Shards) -> tuple[list[Any], list[bool]]:
    """Return for each variable its shard or its whole value, and whether it is the shard.

    An earlier call of a shared layer may have changed a variable: its value is then whole, and not that of the shard.
    """
    is_shard = [id(variable) in shards and shards[id(variable)][1] is value for variable, value in current]
    pairs = zip(current, is_shard, strict=True)
    return [shards[id(variable)][0] if is_one else value for (variable, value), is_one in pairs], is_shard


def _take_loss(layer: Any, loss: Any) -> Any:
    """Return the layer that has added a loss, and make it forget it."""
    owner = next(one for one in layer._flatten_layers() if id(loss) in one._loss_ids)
    owner._loss_ids.discard(id(loss))
    return owner
