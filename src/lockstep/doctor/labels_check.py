"""Whether targets are such as the loss expects, and whether inputs and targets are numbers at all."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from lockstep._keras.graph import is_keras_class, outputs_of
from lockstep._keras.layers import layers_of, operations_of
from lockstep.doctor.classification_outputs import ClassificationOutput, heads_of
from lockstep.doctor.finding import Finding
from lockstep.doctor.fit_call import FitCall, in_memory, spread, step_of

__all__ = ["about_finite_inputs", "about_finite_labels", "about_form_of_labels", "about_range_of_labels"]

# What may make something of a NaN, or leaves rows out.
_ANYTHING = (keras.layers.Lambda, keras.layers.Masking, keras.layers.Discretization)


def about_form_of_labels(program: FitCall) -> Iterator[Finding]:
    """About numbers of classes where a row for each class is expected, and the reverse."""
    for head in heads_of(program):
        shape, labels = head.output.shape, head.labels
        if labels is None or not shape or shape[-1] in (None, 1):
            continue
        where = f"y for {head.where}, {program.at_fit}"
        if head.loss.kind == "sparse" and labels.shape[1:] == shape:
            yield Finding(
                "one-hot-labels",
                f"{head.loss.shown} expects numbers of classes, and the labels have the shape {labels.shape}",
                where,
                "they have a column for each class, which is another loss's form",
                "Take CategoricalCrossentropy, or y.argmax(-1)",
            )
        if head.loss.kind == "categorical" and labels.shape[1:] in (shape[:-1], (*shape[:-1], 1)):
            yield Finding(
                "labels-not-one-hot",
                f"{head.loss.shown} expects a column for each of {shape[-1]} classes, and the labels have the shape {labels.shape}",
                where,
                "they are numbers of classes, which is another loss's form",
                "Take SparseCategoricalCrossentropy, or keras.utils.to_categorical(y)",
            )


def about_range_of_labels(program: FitCall) -> Iterator[Finding]:
    """About classes that the output does not have, and targets of a binary loss outside 0 … 1."""
    for head in heads_of(program):
        if head.labels is None or head.labels.dtype.kind not in "iufb" or not len(head.labels):
            continue
        if head.loss.kind == "sparse":
            yield from _classes(head, program)
        if head.loss.kind == "binary":
            yield from _binary(head, program)


def about_finite_labels(program: FitCall) -> Iterator[Finding]:
    """About NaN and Inf among the targets."""
    for head in heads_of(program):
        if head.labels is None or head.labels.dtype.kind != "f":
            continue
        labels, said = spread(head.labels, program.numbers)
        if not np.isfinite(labels).all():
            yield Finding(
                "labels-not-finite",
                f"labels that are NaN or Inf, in {_rows_with(~np.isfinite(labels))} of {said}",
                f"y for {head.where}, {program.at_fit}",
                "one of them makes the loss of its batch NaN, and then all weights, also with a sample_weight of 0",
                "Leave these rows out, or put numbers in their place",
            )


def about_finite_inputs(program: FitCall) -> Iterator[Finding]:
    """About NaN and Inf among the inputs of a model that has nothing to deal with them."""
    if not _takes_numbers_only(program.model):
        return
    for path, leaf in keras.tree.flatten_with_path(program.x):
        array = in_memory(leaf)
        if array is None or array.dtype.kind != "f" or not np.ndim(array):
            continue
        inputs, said = spread(array, program.numbers)
        if not np.isfinite(inputs).all():
            yield Finding(
                "inputs-not-finite",
                f"inputs that are NaN or Inf, in {_rows_with(~np.isfinite(inputs))} of {said}",
                f"x{''.join(f'[{key!r}]' for key in path)}, {program.at_fit}",
                "one of them makes the loss of its batch NaN, and then all weights",
                "Leave these rows out, or put numbers in their place; lockstep.callbacks.NanGuard names others while training runs",
            )


def _classes(head: ClassificationOutput, program: FitCall) -> Iterator[Finding]:
    shape = head.output.shape
    if not shape or shape[-1] is None or shape[-1] == 1 or head.labels.shape[1:] not in (shape[:-1], (*shape[:-1], 1)):
        return
    classes = shape[-1]
    if len(shape) > 1 and any(isinstance(x, keras.layers.Masking) or _masks(x) for x in layers_of(program.model)):
        return  # Steps that are masked may have any label.
    wrong, said = _wrong(head, program, lambda y: (y < 0) | (y >= classes) | (y != np.floor(y)), head.loss.ignored)
    if wrong.size:
        yield Finding(
            "labels-out-of-range",
            f"labels such as {_shown(wrong)} for {classes} classes, in {said}",
            f"y for {head.where}, {program.at_fit}",
            "on JAX a row whose class is none adds 0 to the loss and teaches nothing, without an error",
            f"Number the classes from 0 to {classes - 1} without a gap, or give the layer a unit for each; ignore_class=… leaves one out",
        )


def _binary(head: ClassificationOutput, program: FitCall) -> Iterator[Finding]:
    wrong, said = _wrong(head, program, lambda y: (y < 0) | (y > 1))
    if wrong.size:
        yield Finding(
            "labels-out-of-range",
            f"labels such as {_shown(wrong)} for a binary cross-entropy, in {said}",
            f"y for {head.where}, {program.at_fit}",
            "the loss falls below 0 there, and drives the outputs to their extremes",
            "Bring the labels to 0 and 1",
        )


def _wrong(
    head: ClassificationOutput, program: FitCall, is_wrong: Callable[[Any], Any], ignored: int | None = None
) -> Any:
    """Labels that are wrong and have a weight, and what was looked at."""
    labels, said = spread(head.labels, program.numbers)
    labels = labels.astype("float64")
    counts = np.ones(len(labels), bool)
    if program.sample_weight is not None:
        weights = None if head.weights is None or len(head.weights) != len(head.labels) else head.weights
        every = step_of(head.labels, program.numbers)
        counts = counts & (weights is not None and np.asarray(weights[::every]).reshape(len(labels), -1).any(-1))
    wrong = is_wrong(labels) & np.isfinite(labels) & (True if ignored is None else labels != ignored)
    return labels[counts][wrong[counts]], said


def _masks(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Embedding) and layer.mask_zero


def _shown(values: np.ndarray) -> str:
    return ", ".join(f"{value:g}" for value in np.unique(values)[:3])


def _rows_with(bad: np.ndarray) -> int:
    return int(bad.reshape(len(bad), -1).any(-1).sum())


def _takes_numbers_only(model: keras.Model) -> bool:
    """Whether all that the model computes is done by layers of Keras's that pass a NaN on."""
    outputs = outputs_of(model)
    return outputs is not None and all(
        is_keras_class(type(layer)) and isinstance(layer, keras.layers.Layer) and not isinstance(layer, _ANYTHING)
        for layer in operations_of(model)
    )
