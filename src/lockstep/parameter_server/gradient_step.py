"""One gradient step on servers: how a batch is cut into parts of rows, and the gradients that a worker computes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._array_encoding import ArraySpec
from lockstep._errors import ModelError, OptionError, summary_of
from lockstep._keras import trainer
from lockstep._keras.graph import get_keras_mask, global_batch_reason, models_of
from lockstep._keras.patches import STATELESS_CALL, patched_method
from lockstep._keras.trainer import variables_of
from lockstep.devices.batch_layout import rows_of_replicas
from lockstep.devices.placement import Placement, is_rows
from lockstep.execution.call_splitter import CannotSplitError, ModelCall, infer_output_spec, state_merge, trace_call
from lockstep.execution.compiled_step import apply_changes
from lockstep.execution.gradient_extraction import GradientPrograms
from lockstep.execution.replica import StateMerge
from lockstep.execution.step_functions import StepFunctions
from lockstep.parameter_server.variable_store import UpdateRules

_TOLERANCE = 1e-4  # Of a loss in float32, added up in another order.


def count_batch_rows(batch: Any) -> int:
    """Return the number of rows of a batch, on the host or on devices."""
    first = jax.tree.leaves(batch, is_leaf=is_rows)[0]
    return int(first.shape[0])


def nonempty_parts(rows: int, parts: int) -> int:
    """Return how many of the parts have rows.

    Example:
        >>> nonempty_parts(6, 4), nonempty_parts(7, 2)
        (3, 2)
    """
    return sum(count > 0 for count in rows_of_replicas(rows, parts))


def part_of(batch: Any, part: int, parts: int) -> Any:
    """Return the rows of one part: those that the replica of that number would have.

    Example:
        >>> part_of((np.arange(7),), 1, 2)
        (array([4, 5, 6]),)
    """
    sizes = rows_of_replicas(count_batch_rows(batch), parts)
    start = sum(sizes[:part])
    return jax.tree.map(lambda leaf: leaf[start : start + sizes[part]], batch)


def check_can_split(model: keras.Model, batch: Any, parts: int) -> None:
    """Refuse a model that must see all rows of a batch at once, which ``MirroredStrategy`` runs on the global batch for the same reasons.

    The batch is on the host.

    Raises:
        ModelError: its parts would not give the numbers of the batch.
    """
    reason = global_batch_reason(model)
    if reason is None:
        state = tuple([variable.value for variable in kind] for kind in variables_of(model))
        try:
            with patched_method(STATELESS_CALL, models_of(model), _SplitProof(parts, count_batch_rows(batch)).around):
                jax.eval_shape(model.train_step, state, batch)
        except CannotSplitError as error:
            reason = str(error)
    if reason is not None:
        raise ModelError(
            f"Model {model.name!r} must run on the global batch, and with max_staleness=0 each worker computes a part of it: {reason}. Fix: use "
            "MultiWorkerMirroredStrategy, which runs it on the global batch, or another max_staleness."
        )


class _SplitProof:
    """Proves for each call of a model in a traced step that parts of its rows give the same results."""

    def __init__(self, parts: int, rows: int) -> None:
        self._parts, self._rows, self._is_in_call = parts, rows, False

    def around(self, model: keras.Model, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``stateless_call`` of a model, which raises CannotSplitError if there is no proof."""

        def call(
            trainable: list[Any], non_trainable: list[Any], *args: Any, return_losses: bool = False, **kwargs: Any
        ) -> Any:
            if not self._is_in_call:  # Else a model calls another one, which is part of the proof for the first.
                arguments = trainable, non_trainable, (args, kwargs)
                self._prove(ModelCall.from_arguments(model, original, *arguments, return_losses, self._rows))
            return original(trainable, non_trainable, *args, return_losses=return_losses, **kwargs)

        return call

    def _prove(self, call: ModelCall) -> None:
        sizes = [rows for rows in rows_of_replicas(call.rows, self._parts) if rows]
        self._is_in_call = True
        try:
            if len(sizes) > 1:
                infer_output_spec(call, trace_call(call), set(sizes))
        finally:
            self._is_in_call = False


def compare_losses_of_parts(model: keras.Model, batch: Any, parts: int) -> str:
    """Refuse a model whose loss of a batch is not the mean of the losses of its rows, because parts would change the gradient.

    The batch is on the host.

    Returns:
        Why the losses cannot be compared; "" if they were, or if there is none.

    Raises:
        ModelError: the loss of the batch is not the mean of the losses of its parts.
    """
    trainable, non_trainable, _, metrics = [[variable.value for variable in kind] for kind in variables_of(model)]
    state = trainable, non_trainable, metrics
    rows, nonempty = count_batch_rows(batch), nonempty_parts(count_batch_rows(batch), parts)
    try:
        steps = [model.test_step(state, own) for own in (batch, *(part_of(batch, n, parts) for n in range(nonempty)))]
        whole, *losses = [float(np.asarray(logs["loss"])) if "loss" in logs else None for logs, _ in steps]
        triples = list(zip(model.non_trainable_variables, non_trainable, steps[0][1][1], strict=True))
    except Exception as error:  # Only its train_step is needed: its evaluation may be another one, or be missing.
        return f"its test_step fails: {summary_of(error)}"
    if whole is None:
        return ""
    if any(state_merge(one) is StateMerge.SEED and np.any(old != new) for one, old, new in triples):
        _check_divisor(model, state, batch)
        return "it draws random numbers also in evaluation"
    sizes = rows_of_replicas(rows, parts)[:nonempty]
    mean = sum((loss or 0.0) * size for loss, size in zip(losses, sizes, strict=True)) / rows
    if abs(mean - whole) > _TOLERANCE * max(1.0, abs(whole)):
        raise ModelError(
            f"Model {model.name!r}: the loss of a batch is {whole:.6g}, and the mean of the losses of its {nonempty} parts, by rows, {mean:.6g}. "
            f"{_NEEDS_MEAN}"
        )
    _check_divisor(model, state, batch)
    return ""


_NEEDS_MEAN = (
    "With max_staleness=0 each worker computes the gradient of a part, which is the gradient of the batch only if the loss is a mean "
    "over rows: no mask, no reduction='sum', no loss that compares rows. Fix: use MultiWorkerMirroredStrategy, or another max_staleness."
)


def _check_divisor(model: keras.Model, state: Any, batch: Any) -> None:
    """Refuse a loss that Keras divides by something that may differ from part to part of another batch."""
    masks: list[Any] = []

    def around(_: keras.Model, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            outputs, *others = original(*args, **kwargs)
            masks.extend(get_keras_mask(leaf) for leaf in jax.tree.leaves(outputs))
            return outputs, *others

        return call

    with patched_method(STATELESS_CALL, [model], around):
        jax.eval_shape(model.test_step, state, batch)
    divisor = "the unmasked entries of its outputs" if any(mask is not None for mask in masks) else ""
    reductions = [getattr(loss, "reduction", None) for loss in keras.tree.flatten(model.loss)]
    has_weights = keras.utils.unpack_x_y_sample_weight(batch)[2] is not None
    if not divisor and has_weights and "mean_with_sample_weight" in reductions:
        divisor = "its weights (reduction='mean_with_sample_weight')"
    if divisor:
        raise ModelError(f"Model {model.name!r}: the loss of a batch is divided by {divisor}. {_NEEDS_MEAN}")


Values = Sequence[np.ndarray]


@dataclass(frozen=True)
class GradientResult:
    """Results of one step.

    Args:
        gradients: gradients of the trainable variables, by name.
        logs: as ``train_step`` returned them.
        metric_logs: results of the metrics alone, by the names of the logs.
        non_trainable: new values of the non-trainable variables.
        metrics: new values of the metrics' variables.
    """

    gradients: dict[str, np.ndarray]
    logs: dict[str, Any]
    metric_logs: dict[str, Any]
    non_trainable: list[np.ndarray]
    metrics: list[np.ndarray]


def has_nan(result: GradientResult) -> bool:
    """Return whether gradients, logs or metrics of a step have NaN."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves((result.gradients, result.logs, result.metrics))]
    return any(np.isnan(array).any() for array in arrays if jnp.issubdtype(array.dtype, jnp.inexact))


class GradientStep:
    """Gradient step of one worker, on the devices of its process.

    Raises:
        ModelError: the model must not be compiled; or, when it is called, its ``train_step`` updates variables in other ways than
            ``optimizer.stateless_apply``.
    """

    def __init__(self, model: keras.Model, functions: StepFunctions, placement: Placement) -> None:
        if not trainer.is_compiled(model):
            raise ModelError(
                f"Model {model.name!r}: run_eagerly=True and jit_compile=False do not go with variables on servers, as gradients come out "
                "of a compiled step. Fix: leave them out, or train it under a MirroredStrategy."
            )
        self._model, self._names, self._placement = model, names_of(model), placement
        self._keras_step = functions.build_step(functions.executor, "train")
        self._programs = GradientPrograms(self._step_with_metric_logs, model, placement, donated=False)
        self._optimizer = [np.asarray(variable.value) for variable in variables_of(model)[2]]
        self._iterations = iterations_of(model)

    @property
    def replicas(self) -> int:
        """Number of replicas of this worker: one on each of its devices."""
        return self._placement.replicas

    def set_optimizer(self, scalars: Mapping[str, float]) -> None:
        """Set numbers of the optimizer, such as the learning rate, by their places among its variables, for a ``train_step`` that reads them."""
        for number, value in scalars.items():
            self._optimizer[int(number)] = np.asarray(value, self._optimizer[int(number)].dtype)

    def __call__(
        self, values: Mapping[str, Any], non_trainable: Values, metrics: Values, batch: Any, steps: int
    ) -> GradientResult:
        """Compute the gradient; the model does not change.

        Args:
            values: values of the trainable variables, by name.
            non_trainable: values of the non-trainable variables.
            metrics: values of the metrics' variables.
            batch: as Keras passes it to ``train_step``, on the host.
            steps: number of steps of the optimizer that made the values.
        """
        optimizer = list(self._optimizer)
        if self._iterations is not None:
            optimizer[self._iterations] = np.asarray(steps, optimizer[self._iterations].dtype)
        state = [[values[name] for name in self._names], list(non_trainable), optimizer, list(metrics)]
        placed = self._placement.place(batch)
        program = self._programs.program_for(state, placed)
        pairs = zip(state, program.is_used, strict=True)
        read = [[value if is_read else None for value, is_read in zip(*pair, strict=True)] for pair in pairs]
        gradients, (logs, metric_logs), changes = program(self._placement.put(read), placed)
        new = apply_changes((state[1], state[3]), changes)
        new_non_trainable, new_metrics = [[np.asarray(value) for value in kind] for kind in new]
        named = {name: np.asarray(gradient) for name, gradient in zip(self._names, gradients, strict=True)}
        own_logs, others = logs_as_json(dict(logs)), logs_as_json(dict(metric_logs))
        return GradientResult(named, own_logs, others, new_non_trainable, new_metrics)

    def _step_with_metric_logs(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Run Keras's step, and return the results of the metrics besides its logs."""
        logs, new = self._keras_step(state, batch)
        return (logs, metric_logs_of(self._model, new[3])), new


def metric_logs_of(model: keras.Model, metrics: Sequence[Any]) -> dict[str, Any]:
    """Return the results of a model's metrics for these values of their variables."""
    pairs = list(zip(model.metrics_variables, metrics, strict=True))
    with keras.StatelessScope(state_mapping=pairs):
        return model.get_metrics_result()


def iterations_of(model: keras.Model) -> int | None:
    """Return the number of ``optimizer.iterations`` among the optimizer's variables; None if gradients are accumulated: Keras then computes it."""
    if model.optimizer.gradient_accumulation_steps:
        return None
    found = [number for number, one in enumerate(variables_of(model)[2]) if one is model.optimizer.iterations]
    return found[0] if found else None


def names_of(model: keras.Model) -> list[str]:
    """Return a unique name for each trainable variable: its path, with a number if another variable has the same path."""
    names: list[str] = []
    for variable in model.trainable_variables:
        twins = sum(name.partition("#")[0] == variable.path for name in names)
        names.append(f"{variable.path}#{twins + 1}" if twins else variable.path)
    return names


def specs_of(model: keras.Model) -> list[ArraySpec]:
    """Return the specs of the trainable variables of a model, in their order."""
    pairs = zip(names_of(model), model.trainable_variables, strict=True)
    return [ArraySpec(name, tuple(variable.shape), str(variable.dtype)) for name, variable in pairs]


def rules_of(model: keras.Model) -> UpdateRules:
    """Return what the optimizer asks of the trainable variables of a model besides their values.

    Raises:
        OptionError: a variable gets its value in place of a gradient.
    """
    pairs = list(zip(names_of(model), model.trainable_variables, strict=True))
    overwritten = [name for name, variable in pairs if getattr(variable, "overwrite_with_gradient", False)]
    if overwritten:
        raise OptionError(
            f"Model {model.name!r}: {overwritten[0]!r} gets a new value in place of a gradient (float8), of which servers would take the mean. Fix: "
            "train without float8, or under another strategy."
        )
    constraints = {name: variable.constraint for name, variable in pairs if variable.constraint is not None}
    return UpdateRules(constraints, frozenset(trainer.names_without_decay(model.optimizer, pairs)))


def logs_as_json(found: Any) -> Any:
    """Return numbers, lists and dicts as JSON values."""
    return keras.tree.map_structure(lambda value: np.asarray(value).tolist(), found)
