"""Layers, variables and tensors of a model, and the structure of what its calls take and return.

Undocumented parts, as of Keras 3.15: ``_flatten_layers`` and ``_layers``; the masks that Keras attaches to tensors; the names of seed
generators' variables; the texts of Keras's exceptions; ``_loss_ids``; ``_operations`` and ``_non_trainable_variables``;
``_call_has_training_arg``.
"""

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import keras
from keras.src.backend.common.masking import get_keras_mask as get_keras_mask
from keras.src.backend.common.masking import set_keras_mask as set_keras_mask

from lockstep._keras.batch_normalization import normalizations_of

# --- layers and operations ---------------------------------------------------------------------------------------


def layers_of(model: keras.Model) -> list[Any]:
    """Return the layers at all depths, without the models that hold them."""
    return [layer for layer in model._flatten_layers() if not isinstance(layer, keras.Model)]


def models_of(model: keras.Model) -> list[keras.Model]:
    """Return the model, and the models among its layers at all depths."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.Model)]


def operations_of(model: keras.Model) -> list[Any]:
    """Return the model, its layers at all depths, and the operations of functional models that are not layers."""
    found = {id(layer): layer for layer in model._flatten_layers()}
    for layer in list(found.values()):
        if isinstance(layer, keras.Model) and "_operations" in vars(layer):
            found |= {id(operation): operation for operation in layer.operations}
    return list(found.values())


def global_batch_reason(model: keras.Model) -> str | None:
    """Return why a model must compute on the global batch at once, or None if it can compute by replicas."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            return f"layer {layer.name!r} normalizes over all replicas (synchronized=True)"
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            return f"layer {layer.name!r} keeps a state for each row of the batch (stateful=True)"
    for variable in model.trainable_variables:
        if variable.overwrite_with_gradient:  # Its gradient is a new value, the scale of float8.
            return f"variable {variable.path!r} takes its gradient as its new value (float8)"
    return None


# --- variables and tensors ---------------------------------------------------------------------------------------


def optimizer_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of a model's optimizer, if it has one; a model that was never compiled lacks the attribute."""
    optimizer = getattr(model, "optimizer", None)
    return list(optimizer.variables) if optimizer else []


def is_seed(variable: keras.Variable) -> bool:
    """Return whether a variable is the state of a ``keras.random.SeedGenerator``."""
    return variable.name == "seed_generator_state" and tuple(variable.shape) == (2,)


def lacks_aggregation(model: keras.Model, variable: keras.Variable) -> bool:
    """Return whether a variable does not state how the values of replicas are aggregated.

    Keras's own layers do not state it either; for the statistics of its normalizations the mean by rows is right. A variable of
    another layer of Keras, such as a frozen embedding, may be changed by a layer of the user.
    """
    if variable.aggregation in ("mean", "sum", "only_first_replica") or is_seed(variable):
        return False
    return not any(
        variable is own
        for layer in normalizations_of(model)
        if is_keras_class(type(layer))
        for own in layer._non_trainable_variables
    )


def forget_losses(model: keras.Model) -> None:
    """Make all layers forget the losses of earlier calls, before a call that collects losses in a ``StatelessScope``.

    A layer knows its losses by their ``id``, and Keras 3.15 keeps the ids of arrays that are gone. A new loss of another layer may get
    such an id: it would be counted twice, or dropped.
    """
    for layer in model._flatten_layers():
        layer._loss_ids.clear()


def training_argument(model: keras.Model) -> dict[str, bool]:
    """Return ``training=True``, as Keras's trainer does, if the call of a model has such an argument."""
    return {"training": True} if model._call_has_training_arg else {}


def copy_keras_mask(original: Any, value: jax.Array) -> jax.Array:
    """Attach the mask that Keras has attached to ``original``, if any, to ``value``, and return it."""
    mask = get_keras_mask(original)
    if mask is not None:
        set_keras_mask(value, mask)
    return value


def overrides_any(one: Any, *methods: str) -> bool:
    """Return whether the class of a model or another object of Keras, or a base class that is not Keras's, defines one of these methods."""
    owners = [next(cls for cls in type(one).__mro__ if name in vars(cls)) for name in methods]
    return not all(is_keras_class(owner) for owner in owners)


def is_keras_class(kind: type) -> bool:
    """Return whether a class is defined in Keras."""
    return kind.__module__.partition(".")[0] == "keras"


def cause_of(error: Exception) -> str:
    """Return the line of an exception that gives the cause; Keras puts the layer before it and the arguments after it."""
    if "_error_repr" in str(error) and isinstance(error.__context__, Exception):
        # Keras (3.15) rebuilds JAX's exceptions from a text, which some of them do not accept.
        error = error.__context__
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
    causes = [line for line in lines if line and not line.startswith("Exception encountered when calling")]
    # Shapes are left out, so that batches of different sizes log one line.
    return re.sub(r" with shape \S+$", "", causes[0]) if causes else type(error).__name__


# --- structures --------------------------------------------------------------------------------------------------


class _InsertionOrder(dict[Any, Any]):
    """A dict whose items JAX is to keep in their order: it sorts those of others by their keys."""


def _dict_of(keys: Any, values: Any) -> Any:
    return dict(zip(keys, values, strict=True))


jax.tree_util.register_pytree_node(_InsertionOrder, lambda items: (tuple(items.values()), tuple(items)), _dict_of)


def flatten_in_order(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves and the structure of a tree as ``jax.tree.flatten``, but keep the order of dicts, as a call without JAX does.

    Example:
        >>> import jax
        >>> from collections import OrderedDict
        >>> leaves, structure = flatten_in_order(OrderedDict(z={"mean": 1, "log_var": (2, 3)}))
        >>> leaves, [*jax.tree.unflatten(structure, leaves)["z"]]
        ([1, 2, 3], ['mean', 'log_var'])
    """
    return jax.tree.flatten(in_order(tree))


def map_in_order(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree with ``function`` of each leaf as ``jax.tree.map``, but keep the order of plain dicts, as code may unpack it."""
    leaves, structure = flatten_in_order(tree)
    return jax.tree.unflatten(structure, map(function, leaves))


def in_order(tree: Any) -> Any:
    """Return a tree whose dicts JAX keeps in their order; it makes plain dicts of them when it unflattens the tree."""
    if type(tree) in (dict, OrderedDict):
        kind = _InsertionOrder if type(tree) is dict else OrderedDict
        return kind((key, in_order(value)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(map(in_order, tree))
    return type(tree)(*map(in_order, tree)) if isinstance(tree, tuple) and hasattr(tree, "_fields") else tree
