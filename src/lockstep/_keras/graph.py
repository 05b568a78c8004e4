"""Layers, variables and tensors of a model, the graph of layers behind its outputs, and layers that are recomputed.

Undocumented parts, as of Keras 3.15: ``_flatten_layers`` and ``_layers``; that ``__call__`` of a layer or an operation looks ``call`` up on the
instance, and that ``train_step`` so looks up ``stateless_call`` and ``compute_loss``; the masks that Keras attaches to tensors;
the names of seed generators' variables; the texts of Keras's exceptions; ``_loss_ids``; ``_operations`` and
``_non_trainable_variables``; ``_keras_history`` of symbolic tensors, ``_inbound_nodes`` of operations and the input tensors of a node,
``_functional``, and the structure of a functional model's outputs; the current ``StatelessScope``; ``_call_has_training_arg``;
the classes of ``keras.src.ops.nn``.
"""

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import keras
import numpy as np
from keras.src.backend.common.masking import get_keras_mask as get_keras_mask
from keras.src.backend.common.masking import set_keras_mask as set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope

from lockstep._keras.patches import (
    LAYER_CALL,
    MOMENTS,
    SYNCHRONIZED_FLAG,
    patched,
    patched_method,
)

_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray)
_LEAVES = (*_NUMBERS, jax.Array)
AttributeLeaf = tuple[Any, str, int]  # a layer, the name of its attribute, and the number of the leaf in that tree


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


# --- batch normalization -----------------------------------------------------------------------------------------


def unsynchronized_normalizations(model: keras.Model) -> list[str]:
    """Return the names of the BatchNormalization layers that normalize each replica's rows separately."""
    return [layer.name for layer in _normalizations(model) if not layer.synchronized]


@contextlib.contextmanager
def clear_synchronized(model: keras.Model) -> Iterator[None]:
    """Clear ``synchronized`` of all BatchNormalization layers during a trace on the global batch, where it changes nothing."""
    layers = [layer for layer in _normalizations(model) if layer.synchronized]
    with patched(SYNCHRONIZED_FLAG, [(layer, "synchronized", False) for layer in layers]):
        yield


@contextlib.contextmanager
def disable_batch_statistics(model: keras.Model, mark: Callable[[Any], Any]) -> Iterator[list[keras.Layer]]:
    """Make each BatchNormalization use its moving statistics while this context is open, so that it treats each row separately.

    Where it would compute the moments of the batch, it gets ``mark`` of the moving statistics.

    Yields:
        A list to which each layer is added that asks for the moments of the batch.
    """
    called: list[keras.Layer] = []

    def around_moments(layer: Any, method: Any) -> Any:
        def moments(*args: Any, **kwargs: Any) -> Any:
            called.append(layer)
            statistics = layer.moving_mean, layer.moving_variance
            return tuple(mark(keras.ops.convert_to_tensor(one)) for one in statistics)

        return moments

    with patched_method(MOMENTS, _normalizations(model), around_moments):
        yield called


def _normalizations(model: keras.Model) -> list[keras.Layer]:
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


# --- variables and tensors ---------------------------------------------------------------------------------------


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
        for layer in _normalizations(model)
        if is_keras_class(type(layer))
        for own in layer._non_trainable_variables
    )


def attribute_arrays(layer: keras.Layer) -> dict[AttributeLeaf, jax.Array]:
    """Return the arrays that a layer or model and the layers in it hold in attributes, alone or in lists, tuples and dicts."""
    return _attribute_leaves(layer._flatten_layers(), (jax.Array,))


def attribute_numbers(layer: keras.Layer) -> dict[AttributeLeaf, Any]:
    """Return the numbers of Python and NumPy, and NumPy's arrays, that a layer or model and the layers in it hold in attributes."""
    return _attribute_leaves(layer._flatten_layers(), _NUMBERS)


def _attribute_leaves(layers: Iterable[keras.Layer], kinds: tuple[type, ...]) -> dict[AttributeLeaf, Any]:
    return {
        (layer, name, number): leaf
        for layer in layers
        for name, value in vars(layer).items()
        if isinstance(value, (*kinds, list, tuple, dict))
        for number, leaf in enumerate(keras.tree.flatten(value))
        if isinstance(leaf, kinds)
    }


def changed_numbers(before: dict[AttributeLeaf, Any], after: dict[AttributeLeaf, Any]) -> dict[AttributeLeaf, Any]:
    """Return the numbers of ``after`` that ``before`` does not have, or not with this value.

    Layers that were made or built meanwhile are left out: that happens once, and what they hold now stays.
    """
    known = {layer for layer, _, _ in before}
    built = {
        place[0] for place, is_built in after.items() if place[1] == "built" and is_built and not before.get(place)
    }
    kept = {place: value for place, value in after.items() if place[0] in known - built}
    return {place: value for place, value in kept.items() if not is_equal_number(before.get(place), value)}


@contextlib.contextmanager
def attributes_kept(model: keras.Layer) -> Iterator[None]:
    """Undo what calls of a model in a context change in attributes of its layers: numbers and arrays, also where there was None before.

    Layers that are built meanwhile keep theirs: that happens once.
    """
    before = [
        (layer, name, value, keras.tree.flatten(value), layer.built)
        for layer in model._flatten_layers()
        for name, value in vars(layer).items()
        if value is None or isinstance(value, (*_LEAVES, list, tuple, dict))
    ]
    try:
        yield
    finally:
        for layer, name, value, leaves, was_built in before:
            if layer.built == was_built and name in vars(layer):
                _restore(layer, name, value, leaves)


def _restore(layer: keras.Layer, name: str, value: Any, leaves: list[Any]) -> None:
    """Give an attribute its earlier ``value``, or a tree of the same size its earlier ``leaves``, if it has other numbers or arrays."""
    now = vars(layer)[name]
    found = keras.tree.flatten(now)
    changed = [isinstance(new, _LEAVES) and new is not old for new, old in zip(found, leaves, strict=False)]
    if not any(changed):
        return
    if isinstance(value, (list, tuple, dict)):
        if len(found) == len(leaves):
            mixed = [old if is_new else new for new, old, is_new in zip(found, leaves, changed, strict=True)]
            layer.__dict__[name] = keras.tree.pack_sequence_as(now, mixed)
    else:
        layer.__dict__[name] = value


def is_equal_number(one: Any, other: Any) -> bool:
    """Return whether two numbers or arrays of NumPy are equal; NaN equals NaN, and other objects only themselves."""
    if one is other or type(one) is not type(other):
        return one is other
    has_nan = np.issubdtype(np.asarray(one).dtype, np.inexact)
    return np.asarray(one).dtype != object and bool(np.array_equal(one, other, equal_nan=has_nan))


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


def set_attribute_leaves(leaves: list[AttributeLeaf], arrays: list[Any]) -> None:
    """Put arrays, or numbers, into the attributes that :func:`attribute_arrays` or :func:`attribute_numbers` found."""
    for (layer, name, number), array in zip(leaves, arrays, strict=True):
        values = keras.tree.flatten(vars(layer)[name])
        values[number] = array
        layer.__dict__[name] = keras.tree.pack_sequence_as(vars(layer)[name], values)


def copy_keras_mask(original: Any, value: jax.Array) -> jax.Array:
    """Attach the mask that Keras has attached to ``original``, if any, to ``value``, and return it."""
    mask = get_keras_mask(original)
    if mask is not None:
        set_keras_mask(value, mask)
    return value


_SHAPE_LAYERS = (keras.layers.Reshape, keras.layers.Flatten, keras.layers.Permute)
_LAYERS_WITH_ACTIVATION = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
)
_ACTIVATION_NAMES: dict[Callable[..., Any], str] = {
    keras.activations.softmax: "softmax",
    keras.ops.softmax: "softmax",
    jax.nn.softmax: "softmax",
    keras.activations.sigmoid: "sigmoid",
    keras.ops.sigmoid: "sigmoid",
    jax.nn.sigmoid: "sigmoid",
    keras.activations.linear: "linear",
}


@dataclass(frozen=True)
class Output:
    """One output of a model.

    Args:
        names: the names under which losses and targets may be given for it.
        layer: name of the layer or operation that computes its values; "" if it is not known.
        activation: ``"softmax"``, ``"sigmoid"``, ``"linear"``, or None if it is another one or not known.
        shape: shape without the batch axis; None if it is not known.
    """

    names: tuple[str, ...]
    layer: str = ""
    activation: str | None = None
    shape: tuple[int | None, ...] | None = None


def outputs_of(model: keras.Model) -> list[Output] | None:
    """Return the outputs if Keras has the graph of the model and no class overrides ``call``; else None."""
    graph = _graph_of(model)
    if graph is None:
        return None
    return [_output(names, tensor) for names, tensor in zip(_output_names(graph), graph.outputs, strict=True)]


def overrides_any(one: Any, *methods: str) -> bool:
    """Return whether the class of a model or another object of Keras, or a base class that is not Keras's, defines one of these methods."""
    owners = [next(cls for cls in type(one).__mro__ if name in vars(cls)) for name in methods]
    return not all(is_keras_class(owner) for owner in owners)


def is_keras_class(kind: type) -> bool:
    """Return whether a class is defined in Keras."""
    return kind.__module__.partition(".")[0] == "keras"


def _graph_of(model: keras.Model) -> Any:
    """Return the functional model that computes the outputs of ``model``; None if there is none, or more may follow it."""
    if overrides_any(model, "call", "__call__"):
        return None
    graph = model._functional if isinstance(model, keras.Sequential) else model
    return graph if graph is not None and "_outputs_struct" in vars(graph) else None


def _output_names(graph: Any) -> list[tuple[str, ...]]:
    layer_names: list[tuple[str, ...]] = [(name,) for name in graph.output_names]
    struct = graph._outputs_struct
    if not isinstance(struct, dict):
        return layer_names
    keys = {id(tensor): key for key, tensor in struct.items()}
    return [(*names, keys.get(id(tensor), names[0])) for names, tensor in zip(layer_names, graph.outputs, strict=True)]


def _output(names: tuple[str, ...], tensor: Any) -> Output:
    operation = _final_operation(tensor)
    return Output(names, operation.name, _activation(operation), tuple(tensor.shape[1:]))


def _final_operation(tensor: Any) -> Any:
    """Return the operation that computes the values of a tensor: inside nested models, and before what changes only its shape."""
    history = tensor._keras_history
    operation = history.operation
    if isinstance(operation, keras.Model):
        graph = _graph_of(operation)
        return operation if graph is None else _final_operation(graph.outputs[history.tensor_index])
    is_linear = type(operation) is keras.layers.Activation and _ACTIVATION_NAMES.get(operation.activation) == "linear"
    if type(operation) in _SHAPE_LAYERS or is_linear:
        return _final_operation(operation._inbound_nodes[history.node_index].input_tensors[0])
    return operation.layer if type(operation) is keras.layers.TimeDistributed else operation


def _activation(operation: Any) -> str | None:
    kind = type(operation)
    if kind is keras.layers.Softmax or (kind.__module__ == "keras.src.ops.nn" and kind.__name__ == "Softmax"):
        return "softmax"
    if kind.__module__ == "keras.src.ops.nn" and kind.__name__ == "Sigmoid":
        return "sigmoid"
    if kind is keras.layers.Activation:
        return _ACTIVATION_NAMES.get(operation.activation)
    if kind not in _LAYERS_WITH_ACTIVATION:
        return None
    name = _ACTIVATION_NAMES.get(operation.activation)
    return None if name == "linear" and not _is_unconstrained(operation) else name


def _is_unconstrained(layer: Any) -> bool:
    """Return whether a layer may give any number; a layer with a constraint, or not trained, may preserve probabilities."""
    constraints = [weight.constraint for weight in layer.weights]
    return bool(layer.trainable) and all(constraint is None for constraint in constraints)


def cause_of(error: Exception) -> str:
    """Return the line of an exception that gives the cause; Keras puts the layer before it and the arguments after it."""
    if "_error_repr" in str(error) and isinstance(error.__context__, Exception):
        # Keras (3.15) rebuilds JAX's exceptions from a text, which some of them do not accept.
        error = error.__context__
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
    causes = [line for line in lines if line and not line.startswith("Exception encountered when calling")]
    # Shapes are left out, so that batches of different sizes log one line.
    return re.sub(r" with shape \S+$", "", causes[0]) if causes else type(error).__name__


# --- calls of layers whose results are computed again in the backward pass, from the shards of their variables -----

Gather = Callable[[keras.Variable, jax.Array], jax.Array]
# By the id of a variable its shard on this device, and its whole value.
Shards = Mapping[int, tuple[jax.Array, jax.Array]]


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


@dataclass
class _TraceFindings:
    """What the trace of a recomputed layer finds besides arrays, which it returns.

    Args:
        outputs: structure of the outputs.
        stored: the attributes that get an array.
        owners: for each loss the layer that it is added to.
        others: keys of further variables that get a value.
    """

    outputs: Any = None
    stored: list[AttributeLeaf] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)


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
    arrays = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
    known = [variable for variable in layer.variables if scope.get_current_value(variable) is not None]
    values, is_shard = _values_to_keep([(variable, scope.get_current_value(variable)) for variable in known], shards)
    own_keys = {id(variable) for variable in known}
    found = _TraceFindings()

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
        outputs, found.outputs = jax.tree.flatten(outputs)
        found.stored, found.others = list(stored), list(others)
        after = [inner.get_current_value(variable) for variable in known]
        changes = [None if new is old else new for new, old in zip(after, before, strict=True)]
        found.owners = [_take_loss(layer, loss) for loss in inner.losses]
        masks = [get_keras_mask(output) for output in outputs]
        return outputs, masks, [*changes, *others.values()], inner.losses, list(stored.values())

    masks = [get_keras_mask(array) for array in arrays.values()]
    outputs, masks, changes, losses, stored = jax.checkpoint(run)(values, arrays, masks)
    changes, others = changes[: len(known)], changes[len(known) :]
    scope.state_mapping.update(zip(found.others, others, strict=True))
    set_attribute_leaves(found.stored, stored)
    _set_masks(outputs, masks)
    for variable, new in zip(known, changes, strict=True):
        if new is not None:
            scope.add_update((variable, new))
    for owner, loss in zip(found.owners, losses, strict=True):
        owner.add_loss(loss)
    return jax.tree.unflatten(found.outputs, outputs)


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
