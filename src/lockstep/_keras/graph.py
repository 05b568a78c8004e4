"""The seam for what a model computes last: like ``_keras.py``, what Keras does not document.

What is used, all seen in Keras 3.15: ``_keras_history`` of symbolic tensors, ``_inbound_nodes`` of operations and the input tensors of
a node, the names and the structure of a functional model's outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import keras

__all__ = ["Output", "is_keras_class", "layers_of", "outputs_of", "overrides_any"]

_SHAPES_ONLY = (keras.layers.Reshape, keras.layers.Flatten, keras.layers.Permute)
_WITH_ACTIVATION = (
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
_KNOWN: dict[Callable[..., Any], str] = {
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
        names: by which losses and targets may be given for it.
        layer: what computes its values last, by name; "" where that is not known.
        ending: ``"softmax"``, ``"sigmoid"``, ``"linear"``, or None: something else, or not known.
        shape: without the rows; None: not known.
    """

    names: tuple[str, ...]
    layer: str = ""
    ending: str | None = None
    shape: tuple[int | None, ...] | None = None


def outputs_of(model: keras.Model) -> list[Output] | None:
    """The outputs, where Keras has the graph of the model and nobody has written another ``call``; else None."""
    graph = _graph_of(model)
    if graph is None:
        return None
    return [_output(names, tensor) for names, tensor in zip(_names(graph), graph.outputs, strict=True)]


def overrides_any(model: keras.Model, *methods: str) -> bool:
    """Whether the class of a model has one of these methods for itself."""
    owners = [next(cls for cls in type(model).__mro__ if name in vars(cls)) for name in methods]
    return not all(is_keras_class(owner) for owner in owners)


def is_keras_class(kind: type) -> bool:
    """Whether a class is one of Keras's."""
    return kind.__module__.partition(".")[0] == "keras"


def layers_of(model: keras.Model) -> list[Any]:
    """The layers at all depths, without the models that hold them."""
    return [layer for layer in model._flatten_layers() if not isinstance(layer, keras.Model)]


def _graph_of(model: keras.Model) -> Any:
    """The functional model that computes what ``model`` gives; None where there is none, or something may come after it."""
    if overrides_any(model, "call", "__call__"):
        return None
    graph = model._functional if isinstance(model, keras.Sequential) else model
    return graph if graph is not None and "_outputs_struct" in vars(graph) else None


def _names(graph: Any) -> list[tuple[str, ...]]:
    own: list[tuple[str, ...]] = [(name,) for name in graph.output_names]
    struct = graph._outputs_struct
    if not isinstance(struct, dict):
        return own
    places = {id(tensor): key for key, tensor in struct.items()}
    return [(*names, places.get(id(tensor), names[0])) for names, tensor in zip(own, graph.outputs, strict=True)]


def _output(names: tuple[str, ...], tensor: Any) -> Output:
    operation = _last(tensor)
    return Output(names, operation.name, _ending(operation), tuple(tensor.shape[1:]))


def _last(tensor: Any) -> Any:
    """What decides the values of a tensor: nested models are gone into, and what changes only its shape is left out."""
    history = tensor._keras_history
    operation = history.operation
    if isinstance(operation, keras.Model):
        graph = _graph_of(operation)
        return operation if graph is None else _last(graph.outputs[history.tensor_index])
    does_nothing = type(operation) is keras.layers.Activation and _KNOWN.get(operation.activation) == "linear"
    if type(operation) in _SHAPES_ONLY or does_nothing:
        return _last(operation._inbound_nodes[history.node_index].input_tensors[0])
    return operation.layer if type(operation) is keras.layers.TimeDistributed else operation


def _ending(operation: Any) -> str | None:
    kind = type(operation)
    if kind is keras.layers.Softmax or (kind.__module__ == "keras.src.ops.nn" and kind.__name__ == "Softmax"):
        return "softmax"
    if kind.__module__ == "keras.src.ops.nn" and kind.__name__ == "Sigmoid":
        return "sigmoid"
    if kind is keras.layers.Activation:
        return _KNOWN.get(operation.activation)
    if kind not in _WITH_ACTIVATION:
        return None
    ending = _KNOWN.get(operation.activation)
    return None if ending == "linear" and not _is_free(operation) else ending


def _is_free(layer: Any) -> bool:
    """Whether a layer may give any number: one with a constraint, or that is not trained, may keep probabilities what they are."""
    constraints = [weight.constraint for weight in layer.weights]
    return bool(layer.trainable) and all(constraint is None for constraint in constraints)
