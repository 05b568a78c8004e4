"""Calls of layers whose results are computed again in the backward pass, from the shards of their variables.

Undocumented parts, as of Keras 3.15: the current ``StatelessScope``; ``_layers``; ``_loss_ids``, by which a layer knows its losses in
a scope; the masks that Keras attaches to tensors.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import keras
from keras.src.backend.common.stateless_scope import get_stateless_scope

from lockstep._keras.graph import attribute_arrays, get_keras_mask, set_attribute_arrays, set_keras_mask
from lockstep._keras.patches import LAYER_CALL, patched_method

Gather = Callable[[keras.Variable, jax.Array], jax.Array]
Shards = Mapping[
    int, tuple[jax.Array, jax.Array]
]  # by the id of a variable its shard on this device, and its whole value


def blocks_of(model: keras.Model, is_sharded: Callable[[keras.Variable], bool]) -> list[Any]:
    """Return the layers that are recomputed one by one: repeated layers, and others that hold no layers.

    Args:
        model: a built model.
        is_sharded: whether a variable is sharded; layers without such a variable are left out.
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


def uncovered_variables(
    model: keras.Model, layers: Iterable[Any], is_sharded: Callable[[keras.Variable], bool]
) -> list[str]:
    """Return the paths of the sharded variables of ``model`` that belong to none of ``layers``."""
    covered = {id(variable) for layer in layers for variable in layer.variables}
    return [one.path for one in model.variables if is_sharded(one) and id(one) not in covered]


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
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
    known = [variable for variable in layer.variables if scope.get_current_value(variable) is not None]
    values, is_shard = _values_to_keep([(variable, scope.get_current_value(variable)) for variable in known], shards)
    learned: dict[str, Any] = {}  # what the trace finds besides arrays

    def run(values: list[Any], arrays: list[Any], masks: list[Any]) -> Any:
        for array, mask in zip(arrays, masks, strict=True):
            if mask is not None:
                set_keras_mask(array, mask)
        own = iter(arrays)
        own_leaves = [next(own) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
        own_args, own_kwargs = jax.tree.unflatten(structure, own_leaves)
        stored_before = attribute_arrays(layer)
        before = [
            gather(variable, value) if is_one else value
            for variable, value, is_one in zip(known, values, is_shard, strict=True)
        ]
        with keras.StatelessScope(collect_losses=scope.collect_losses) as inner:
            for variable, value in zip(known, before, strict=True):
                inner.add_update((variable, value))
            outputs = method(*own_args, **own_kwargs)
        stored = {place: new for place, new in attribute_arrays(layer).items() if new is not stored_before.get(place)}
        outputs, learned["outputs"] = jax.tree.flatten(outputs)
        learned["stored"] = list(stored)
        after = [inner.get_current_value(variable) for variable in known]
        changes = [None if new is old else new for new, old in zip(after, before, strict=True)]
        learned["owners"] = [_take_loss(layer, loss) for loss in inner.losses]
        return outputs, [get_keras_mask(output) for output in outputs], changes, inner.losses, list(stored.values())

    masks = [get_keras_mask(array) for array in arrays]
    outputs, masks, changes, losses, stored = jax.checkpoint(run)(values, arrays, masks)
    set_attribute_arrays(learned["stored"], stored)
    for output, mask in zip(outputs, masks, strict=True):
        if mask is not None:
            set_keras_mask(output, mask)
    for variable, new in zip(known, changes, strict=True):
        if new is not None:
            scope.add_update((variable, new))
    for owner, loss in zip(learned["owners"], losses, strict=True):
        owner.add_loss(loss)
    return jax.tree.unflatten(learned["outputs"], outputs)


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
