"""Checks of losses, labels and layers: logits, form and range of labels, NaN among them, loss scaling for float16, arguments of layers."""

import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from lockstep._keras.graph import layers_of, overrides_any
from lockstep._keras.output_activations import Output, ignored_training_arguments, is_given_mask, outputs_of
from lockstep.doctor.base import Finding, FitCall, array_in_memory, sample_rows, sampling_stride
from lockstep.doctor.data_checks import count_bad_rows, not_finite_in

_KINDS: dict[Any, str] = {
    keras.losses.SparseCategoricalCrossentropy: "sparse",
    keras.losses.CategoricalCrossentropy: "categorical",
    keras.losses.CategoricalFocalCrossentropy: "categorical",
    keras.losses.BinaryCrossentropy: "binary",
    keras.losses.BinaryFocalCrossentropy: "binary",
    keras.losses.sparse_categorical_crossentropy: "sparse",
    keras.losses.categorical_crossentropy: "categorical",
    keras.losses.categorical_focal_crossentropy: "categorical",
    keras.losses.binary_crossentropy: "binary",
    keras.losses.binary_focal_crossentropy: "binary",
}
_OF_LOSS = ("train_step", "compute_loss", "compute_loss_and_updates")  # methods that may do what they like with it


@dataclass(frozen=True)
class CrossEntropy:
    """A cross-entropy of Keras.

    Args:
        kind: ``"sparse"``, ``"categorical"`` or ``"binary"``.
        from_logits: whether it takes logits, not probabilities.
        ignored: the class that is ignored, if any.
        shown: its text in messages.
    """

    kind: str
    from_logits: bool
    ignored: int | None
    shown: str


@dataclass(frozen=True)
class ClassificationOutput:
    """An output of a model whose loss is a cross-entropy.

    Args:
        spec: its layer, shape and last activation.
        loss: its loss.
        labels: its targets, ``(rows, …)``, if they are in memory; else None.
        weights: sample weights of the rows, likewise.
    """

    spec: Output
    loss: CrossEntropy
    labels: Any = None
    weights: Any = None

    @property
    def where(self) -> str:
        """The output's name in messages."""
        return f"layer {self.spec.layer!r}" if self.spec.layer else "the output"


def classification_outputs(call: FitCall) -> list[ClassificationOutput]:
    """Return the outputs whose loss is a cross-entropy of Keras; none if the model overrides ``train_step`` or ``compute_loss``."""
    model = call.model
    if overrides_any(model, *_OF_LOSS):
        return []
    single = Output(("",))
    outputs = outputs_of(model) or [single]
    found = []
    for number, output in enumerate(outputs):
        pick = functools.partial(_part_of_output, number=number, outputs=outputs)
        loss = _cross_entropy(pick(model.loss, is_shared=True))
        if loss is not None:
            labels, weights = (array_in_memory(pick(part)) for part in (call.y, call.sample_weight))
            found.append(ClassificationOutput(output, loss, labels, weights))
    return found


def _part_of_output(tree: Any, number: int, outputs: list[Output], is_shared: bool = False) -> Any:
    """Return the part of a tree that belongs to one output; None if that is ambiguous."""
    if isinstance(tree, dict):
        return next((tree[name] for name in outputs[number].names if name in tree), None)
    if isinstance(tree, (list, tuple)):
        return tree[number] if len(tree) == len(outputs) else None
    return tree if len(outputs) == 1 or is_shared else None


def _cross_entropy(loss: Any) -> CrossEntropy | None:
    shown = repr(loss) if isinstance(loss, str) else None
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:  # Keras reports it.
            return None
    if isinstance(loss, keras.losses.Loss):
        return _describe(type(loss), loss.get_config() if type(loss) in _KINDS else {}, shown)
    if isinstance(loss, functools.partial):
        return _describe(loss.func, loss.keywords, shown) if not loss.args else None
    return _describe(loss, {}, shown)


def _describe(kind: Callable[..., Any], options: dict[str, Any], shown: str | None) -> CrossEntropy | None:
    name = _KINDS.get(kind) if isinstance(kind, Hashable) else None
    if name is None or options.get("axis", -1) != -1:
        return None
    from_logits = bool(np.asarray(options.get("from_logits", False)))
    shown = f"loss={shown}" if shown else f"{kind.__name__}(from_logits={from_logits})"
    return CrossEntropy(name, from_logits, options.get("ignore_class"), shown)


def check_logits(call: FitCall) -> Iterator[Finding]:
    """Find probabilities that are used as logits, logits that are used as probabilities, and a softmax of one number.

    Keras's TensorFlow backend corrects the first by looking behind the activation; the JAX backend does not.
    """
    for output in classification_outputs(call):
        where = f"{output.where}, {call.at_compile}"
        activation = output.spec.activation
        if activation == "softmax" and output.spec.activated == 1:
            yield Finding(
                "softmax-of-one",
                "a softmax over one number",
                where,
                "it is always 1, whatever the weights are, and their gradient is always 0",
                'Use activation="sigmoid" with a binary cross-entropy, or a unit for each class',
            )
        elif activation in ("softmax", "sigmoid") and output.loss.from_logits:
            yield Finding(
                "softmax-from-logits",
                f"the output is a {activation}, and {output.loss.shown} takes it for logits",
                where,
                f"the loss then sees a {activation} of a {activation}: it cannot come near 0, and gradients are small, so that training is slow or stops",
                "Set from_logits=False, or leave out the activation",
            )
        elif activation == "linear" and not output.loss.from_logits:
            missing = "sigmoid" if output.loss.kind == "binary" else "softmax"
            yield Finding(
                "logits-as-probabilities",
                f"the output is linear, and {output.loss.shown} takes it for probabilities",
                where,
                "it is clipped to 0 … 1 before the logarithm: values outside, which any weights may give, have no gradient",
                f'Set from_logits=True, or give the layer activation="{missing}"',
            )


def check_loss_scale(call: FitCall) -> Iterator[Finding]:
    """Find layers that compute in float16 with an optimizer that does not scale the loss."""
    optimizer = call.model.optimizer
    if optimizer is None or isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor:
        return
    half = [x.name for x in layers_of(call.model) if x.trainable_variables and x.compute_dtype == "float16"]
    if half:
        yield Finding(
            "float16-without-loss-scale",
            f"{len(half)} layer{'s compute' if len(half) > 1 else ' computes'} in float16, and {type(optimizer).__name__} does not scale the loss",
            f"layer {half[0]!r}, {call.at_compile}",
            "gradients below 6e-8 become 0, and their weights are not trained (Micikevicius et al., Mixed Precision Training, 2018)",
            "Leave compile(auto_scale_loss=True) as it is with the policy for the whole model, wrap the optimizer in "
            'keras.optimizers.LossScaleOptimizer, or use "mixed_bfloat16"',
        )


_DROPPING = (keras.layers.Dropout, keras.layers.AlphaDropout, keras.layers.GaussianDropout)


def check_training_arguments(call: FitCall) -> Iterator[Finding]:
    """Find layers of functional models with training=False, which has no effect on Keras 3.15, but would change what they compute."""
    if overrides_any(call.model, "train_step"):
        return
    for called in ignored_training_arguments(call.model):
        layers = [layer for layer in called._flatten_layers() if _depends_on_training(layer)]
        if layers:
            count = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
            yield Finding(
                "training-argument-ignored",
                f"training=False is given where {called.name!r} is called, and Keras replaces it by that of fit, which is True",
                f"layer {layers[0].name!r}{count}, {call.at_fit}",
                "a dropout then drops, and a BatchNormalization that is trainable uses and moves the statistics of the batch",
                "Make the call in the call method of a layer, where the argument holds; for a BatchNormalization trainable=False is enough",
            )
            return


def _depends_on_training(layer: Any) -> bool:
    is_normalization = isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    return is_normalization or (isinstance(layer, _DROPPING) and layer.rate > 0)


def check_label_format(call: FitCall) -> Iterator[Finding]:
    """Find class numbers if the loss expects a column for each class, and the reverse."""
    for output in classification_outputs(call):
        shape, labels = output.spec.shape, output.labels
        if labels is None or not shape or shape[-1] in (None, 1):
            continue
        where = f"y for {output.where}, {call.at_fit}"
        if output.loss.kind == "sparse" and _fits(labels, shape):
            yield Finding(
                "one-hot-labels",
                f"{output.loss.shown} expects numbers of classes, and the labels have the shape {labels.shape}",
                where,
                "they have a column for each class, which is another loss's form",
                "Use CategoricalCrossentropy, or y.argmax(-1)",
            )
        if output.loss.kind == "categorical" and _are_numbers(labels, shape):
            yield Finding(
                "labels-not-one-hot",
                f"{output.loss.shown} expects a column for each of {shape[-1]} classes, and the labels have the shape {labels.shape}",
                where,
                "they are numbers of classes, which is another loss's form",
                "Use SparseCategoricalCrossentropy, or keras.utils.to_categorical(y)",
            )


def check_label_range(call: FitCall) -> Iterator[Finding]:
    """Find classes that the output does not have, and targets of a binary loss outside 0 … 1."""
    for output in classification_outputs(call):
        if output.labels is None or output.labels.dtype.kind not in "iufb" or not len(output.labels):
            continue
        may_mask = is_given_mask(call.model) or any(map(_masks, layers_of(call.model)))
        if len(output.spec.shape or ()) > 1 and may_mask:
            continue  # Masked time steps may have any label.
        if output.loss.kind == "sparse":
            yield from _check_classes(output, call)
        if output.loss.kind == "binary":
            yield from _check_binary(output, call)


def check_finite_labels(call: FitCall) -> Iterator[Finding]:
    """Find NaN and Inf among the targets."""
    for output in classification_outputs(call):
        if output.labels is None or output.labels.dtype.kind != "f":
            continue
        labels, which_rows = sample_rows(output.labels, call.max_values)
        bad = ~np.isfinite(labels)
        if output.loss.kind == "sparse":  # As an integer it has a finite loss, which a weight of 0 leaves out.
            bad &= _is_counted(labels, output, call)
        if bad.any():
            yield Finding(
                "labels-not-finite",
                f"labels that are NaN or Inf, in {count_bad_rows(bad)} of {which_rows}",
                f"y for {output.where}, {call.at_fit}",
                "as integers they are other classes, which are trained on"
                if output.loss.kind == "sparse"
                else "one of them makes the loss of its batch NaN, and then all weights, also with a sample_weight of 0",
                "Leave these rows out or replace the values",
            )


def check_finite_sample_weights(call: FitCall) -> Iterator[Finding]:
    """Find NaN and Inf among the sample weights."""
    if overrides_any(call.model, *_OF_LOSS):
        return
    for path, rows in not_finite_in(call.sample_weight, call.max_values):
        yield Finding(
            "sample-weights-not-finite",
            f"sample weights that are NaN or Inf, in {rows}",
            f"sample_weight{path}, {call.at_fit}",
            "one of them makes the loss of its batch NaN or Inf, and then all weights of the model",
            "Give a row that does not count the weight 0",
        )


def _check_classes(output: ClassificationOutput, call: FitCall) -> Iterator[Finding]:
    shape = output.spec.shape
    if not shape or shape[-1] in (None, 1) or not _are_numbers(output.labels, shape):
        return
    classes = shape[-1]
    wrong, rows = _wrong_labels(
        output, call, lambda y: (y < 0) | (y >= classes) | (y != np.floor(y)), output.loss.ignored
    )
    if wrong.size:
        yield Finding(
            "labels-out-of-range",
            f"labels such as {_shown(wrong)} for {classes} classes, in {rows}",
            f"y for {output.where}, {call.at_fit}",
            "on JAX a row with an unknown class adds 0 to the loss, as if its output were right, without an error",
            f"Number the classes from 0 to {classes - 1} without a gap, or give the layer a unit for each; ignore_class=… leaves one out",
        )


def _fits(labels: Any, shape: tuple[int | None, ...]) -> bool:
    """Return whether the rows of labels have this shape, in which None is any length."""
    own = labels.shape[1:]
    return len(own) == len(shape) and all(size in (None, one) for size, one in zip(shape, own, strict=True))


def _are_numbers(labels: Any, shape: tuple[int | None, ...]) -> bool:
    """Return whether labels are numbers of classes for outputs of this shape, which has a column for each class."""
    return _fits(labels, shape[:-1]) or _fits(labels, (*shape[:-1], 1))


_ROUNDING = 1e-6  # by which targets that were computed miss 0 and 1


def _check_binary(output: ClassificationOutput, call: FitCall) -> Iterator[Finding]:
    wrong, rows = _wrong_labels(output, call, lambda y: (y < -_ROUNDING) | (y > 1 + _ROUNDING))
    if wrong.size:
        yield Finding(
            "labels-out-of-range",
            f"labels such as {_shown(wrong)} for a binary cross-entropy, in {rows}",
            f"y for {output.where}, {call.at_fit}",
            "the loss falls below 0 there, and drives the outputs to their extremes",
            "Bring the labels to 0 and 1",
        )


def _wrong_labels(
    output: ClassificationOutput, call: FitCall, is_wrong: Callable[[Any], Any], ignored: int | None = None
) -> Any:
    """Return wrong labels with a weight other than 0, and the text of in how many rows they are."""
    labels, which_rows = sample_rows(output.labels, call.max_values)
    labels = labels.astype("float64")
    wrong = is_wrong(labels) & np.isfinite(labels) & (True if ignored is None else labels != ignored)
    wrong &= _is_counted(labels, output, call)
    return labels[wrong], f"{count_bad_rows(wrong)} of {which_rows}"


def _is_counted(labels: np.ndarray, output: ClassificationOutput, call: FitCall) -> Any:
    """Return which of the sampled labels have a weight other than 0, by the sample weights or else by their class."""
    if call.sample_weight is not None:
        every = sampling_stride(output.labels, call.max_values)
        return _counts(labels, None if output.weights is None else output.weights[::every])
    if labels.size != len(labels):
        return True
    weights = call.arguments.get("class_weight") or {}
    return ~np.isin(labels, [number for number, weight in weights.items() if weight == 0])


def _counts(labels: np.ndarray, weights: Any) -> Any:
    """Return which labels have a weight other than 0, given for each of them or for each row; none if the weights are unknown."""
    if weights is None or len(weights) != len(labels):
        return False
    own = np.asarray(weights) != 0
    if own.shape == (*labels.shape, 1):
        own = own[..., 0]
    elif own.shape != labels.shape[: own.ndim]:
        own = own.reshape(len(own), -1).any(-1)
    return own.reshape(*own.shape, *[1] * (labels.ndim - own.ndim))


def _masks(layer: Any) -> bool:
    is_masking = isinstance(layer, keras.layers.Masking) or overrides_any(layer, "compute_mask")
    return is_masking or (isinstance(layer, keras.layers.Embedding) and layer.mask_zero)


def _shown(values: np.ndarray) -> str:
    return ", ".join(f"{value:g}" for value in np.unique(values)[:3])
