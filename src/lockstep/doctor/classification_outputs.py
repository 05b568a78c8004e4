"""The outputs of a model, each with its cross-entropy and its targets: what the checks of losses and labels look at."""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from lockstep._keras.graph import Output, outputs_of, overrides_any
from lockstep.doctor.fit_call import FitCall, in_memory

__all__ = ["ClassificationOutput", "CrossEntropy", "heads_of"]

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


@dataclass(frozen=True)
class CrossEntropy:
    """A loss of Keras's that compares probabilities.

    Args:
        kind: ``"sparse"``, ``"categorical"`` or ``"binary"``.
        from_logits: whether it takes logits instead.
        ignored: the class that does not count, if any.
        shown: as messages name it.
    """

    kind: str
    from_logits: bool
    ignored: int | None
    shown: str


@dataclass(frozen=True)
class ClassificationOutput:
    """An output with its loss.

    Args:
        output: what gives it.
        loss: of it.
        labels: its targets, ``(rows, …)``, where they lie in memory; else None.
        weights: of the rows, likewise.
    """

    output: Output
    loss: CrossEntropy
    labels: Any = None
    weights: Any = None

    @property
    def where(self) -> str:
        """For messages."""
        return f"layer {self.output.layer!r}" if self.output.layer else "the output"


def heads_of(program: FitCall) -> list[ClassificationOutput]:
    """The outputs whose loss is a cross-entropy of Keras's, in a model that trains as Keras does; others are left out."""
    model = program.model
    if overrides_any(model, "train_step", "compute_loss", "compute_loss_and_updates"):
        return []
    single = Output(("",))
    outputs = outputs_of(model) or [single]
    found = []
    for number, output in enumerate(outputs):
        pick = functools.partial(_part, number=number, outputs=outputs)
        loss = _cross_entropy(pick(model.loss, is_shared=True))
        if loss is not None:
            found.append(
                ClassificationOutput(output, loss, in_memory(pick(program.y)), in_memory(pick(program.sample_weight)))
            )
    return found


def _part(tree: Any, number: int, outputs: list[Output], is_shared: bool = False) -> Any:
    """What belongs to one output; None where that is not clear."""
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
        except ValueError:  # Keras says so itself.
            return None
    if isinstance(loss, keras.losses.Loss):
        return _described(type(loss), loss.get_config() if type(loss) in _KINDS else {}, shown)
    if isinstance(loss, functools.partial):
        return _described(loss.func, loss.keywords, shown) if not loss.args else None
    return _described(loss, {}, shown)


def _described(kind: Callable[..., Any], options: dict[str, Any], shown: str | None) -> CrossEntropy | None:
    name = _KINDS.get(kind) if isinstance(kind, Hashable) else None
    if name is None or options.get("axis", -1) != -1:
        return None
    from_logits = bool(np.asarray(options.get("from_logits", False)))
    shown = f"loss={shown}" if shown else f"{kind.__name__}(from_logits={from_logits})"
    return CrossEntropy(name, from_logits, options.get("ignore_class"), shown)
