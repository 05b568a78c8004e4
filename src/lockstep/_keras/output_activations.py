"""Outputs of a model, their last activations and ignored arguments, from the graph that Keras has of it.

Undocumented parts, as of Keras 3.15: ``_keras_history`` of symbolic tensors, ``_inbound_nodes`` of operations, the input tensors and
arguments of a node, ``_functional``, ``_nodes_by_depth``, and the structure of a functional model's inputs and outputs; the classes of
``keras.src.ops.nn``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from typing import Any

import jax
import keras

from lockstep._keras.graph import overrides_any

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
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
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
        activation: ``"softmax"`` over the last axis, ``"sigmoid"``, ``"linear"``, or None if it is another one or not known.
        shape: shape without the batch axis; None if it is not known.
        activated: length of the last axis where the activation is applied; None if it is not known.
    """

    names: tuple[str, ...]
    layer: str = ""
    activation: str | None = None
    shape: tuple[int | None, ...] | None = None
    activated: int | None = None


def outputs_of(model: keras.Model) -> list[Output] | None:
    """Return the outputs if Keras has the graph of the model and no class overrides ``call``; else None."""
    graph = _graph_of(model)
    if graph is None:
        return None
    return [_output(names, tensor) for names, tensor in zip(_output_names(graph), graph.outputs, strict=True)]


def inputs_used_by(model: keras.Model, x: Any) -> Any:
    """Return of a dict or list of inputs, by key or index, those on which the outputs of a model with a graph depend; other inputs as they are."""
    graph = _graph_of(model)
    struct = graph._inputs_struct
    if isinstance(x, dict):
        tensors = struct if isinstance(struct, dict) else {tensor.name: tensor for tensor in graph.inputs}
    elif isinstance(x, (list, tuple)) and isinstance(struct, (list, tuple)):
        tensors, x = dict(enumerate(struct)), dict(enumerate(x))
    else:
        return x
    nodes = chain(*graph._nodes_by_depth.values())
    used = {id(tensor) for tensor in chain(graph.outputs, *(node.input_tensors for node in nodes))}
    return {
        key: x[key]
        for key, tensor in tensors.items()
        if key in x and any(id(one) in used for one in jax.tree.leaves(tensor))
    }


def ignored_training_arguments(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yield layers and models that a graph calls with training=False: Keras 3.15 gives them that of the call of the model instead.

    A node has training=False also where it is the default of the method ``call``, as of Dropout; these are left out.
    """
    graph = _graph_of(model)
    for node in () if graph is None else chain(*graph._nodes_by_depth.values()):
        if isinstance(node.operation, keras.layers.Layer) and node.arguments.kwargs.get("training") is False:
            parameter = signature(node.operation.call).parameters.get("training")
            if parameter is None or parameter.default is not False:
                yield node.operation
        elif isinstance(node.operation, keras.Model):
            yield from ignored_training_arguments(node.operation)


def is_given_mask(model: keras.Model) -> bool:
    """Return whether a graph gives a layer the argument ``mask``, which then holds for the loss as well."""
    graph = _graph_of(model)
    nodes = () if graph is None else chain(*graph._nodes_by_depth.values())
    return any(
        node.arguments.kwargs.get("mask") is not None
        or (isinstance(node.operation, keras.Model) and is_given_mask(node.operation))
        for node in nodes
    )


def is_softmax(operation: Any) -> bool:
    """Return whether a layer or operation is a softmax and nothing else, before which minus infinity masks."""
    return not isinstance(operation, _LAYERS_WITH_ACTIVATION) and _activation(operation) == "softmax"


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
    final = _final_tensor(tensor)
    operation = final._keras_history.operation
    if type(operation) is keras.layers.TimeDistributed:
        operation = operation.layer
    activation = None if _is_over_other_axis(operation, len(final.shape)) else _activation(operation)
    return Output(names, operation.name, activation, tuple(tensor.shape[1:]), (None, *final.shape)[-1])


def _final_tensor(tensor: Any) -> Any:
    """Return the first tensor with the values of ``tensor``: inside nested models, and before what changes only its shape."""
    history = tensor._keras_history
    operation = history.operation
    if isinstance(operation, keras.Model):
        graph = _graph_of(operation)
        return tensor if graph is None else _final_tensor(graph.outputs[history.tensor_index])
    is_linear = type(operation) is keras.layers.Activation and _ACTIVATION_NAMES.get(operation.activation) == "linear"
    if type(operation) in _SHAPE_LAYERS or is_linear:
        return _final_tensor(operation._inbound_nodes[history.node_index].input_tensors[0])
    return tensor


def _is_over_other_axis(operation: Any, rank: int) -> bool:
    """Return whether an operation with an axis, as a softmax, works along another one than the last."""
    return getattr(operation, "axis", -1) not in (-1, rank - 1)


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
