"""How one call of the model is taken apart into replicas, and what came back is put together.

A call is taken apart where it is proved (``rowwise/``) that each row of each result follows from its own row of the batch, or
that a result is a mean over the rows or the same for all. Else, or where the model does not run on a part of its batch, the model
runs on the global batch. BatchNormalization, which normalizes over the rows of a replica by design, and random draws do not count.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._keras import trainer
from lockstep._keras.layers import arrays_kept, keep_arrays, without_batch_statistics
from lockstep.execution.replica import OutputMerge, ReplicaResult
from lockstep.execution.rowwise import (
    Mixed,
    Place,
    RowAxis,
    RowMean,
    Trace,
    places_of,
    traced,
    with_rows_back,
    with_rows_first,
)

__all__ = ["CallSplitter", "CannotSplitError", "merge_of"]


_DRAWS = ("random_bits", "random_gamma", "random_seed", "random_wrap", "random_split", "random_fold_in")


class CannotSplitError(Exception):  # a way to go on, not an error that anyone sees
    """The call must see the global batch; the message says why."""


class CallSplitter:
    """One call of a model's ``stateless_call``, to be made once for each replica.

    What layers keep in their attributes while they are called is a result like others: the rest of a step may use it.

    Args:
        model: the model.
        original: its own ``stateless_call``.
        arguments: positional and keyword arguments after the two lists of values. Arrays among them that have as many entries as
            the first has rows are cut like it: where they are something else, the proof says so.
    """

    def __init__(self, model: keras.Model, original: Callable[..., Any], arguments: Any) -> None:
        self.model, self.original = model, original
        self.leaves, self.structure = jax.tree.flatten(arguments)
        inputs = len(jax.tree.leaves(arguments[0][:1]))  # of the first argument, which are rows if anything is
        self.rows = next((np.shape(leaf)[0] for leaf in self.leaves[:inputs] if np.ndim(leaf)), 0)
        self.cut = [np.ndim(leaf) > 0 and np.shape(leaf)[0] == self.rows for leaf in self.leaves]
        self.unstated: list[str] = []  # paths of variables that change and do not say how replicas meet
        self.has_stated = False  # whether others change
        self.normalized: list[Any] = []  # layers that ask for statistics of their rows
        self.outputs: Any = None  # structure of the outputs; it and the next are known after `learn`
        self.masked: list[bool] = []
        self.kept: list[Any] = []  # the attributes
        # For outputs, then losses, then what is kept, then masks: where the rows are; None: it has none, and is averaged.
        self.places: list[RowAxis | None] = []
        self.dtypes: list[Any] = []

    @property
    def inputs(self) -> list[Any]:
        """The arguments that are cut into rows."""
        return [leaf for leaf, cut in zip(self.leaves, self.cut, strict=True) if cut]

    @property
    def shared(self) -> list[Any]:
        """The arguments that each replica gets whole; numbers and flags, which are no arrays, are left out."""
        return [
            leaf for leaf, cut in zip(self.leaves, self.cut, strict=True) if not cut and isinstance(leaf, jax.Array)
        ]

    def look(self, trainable: list[Any], non_trainable: list[Any]) -> None:
        """Trace the call on all rows, which says in how many calls it may be made.

        Raises:
            CannotSplitError: that is not possible. Where the step is compiled, the call will then say the same.
        """
        self._values = trainable, non_trainable
        try:
            self._whole = self._traced(self.rows)
        except Exception as error:
            raise CannotSplitError(f"it cannot be traced ({_reason(error)})") from error

    def _traced(self, rows: int) -> Trace:
        """The call on so many rows, with BatchNormalization that uses its moving statistics."""
        trainable, non_trainable = self._values
        variables = self.model.non_trainable_variables

        def call(fixed: list[Any], inputs: list[Any]) -> list[Any]:
            count = len(trainable), len(trainable) + len(non_trainable)
            values = fixed[: count[0]], fixed[count[0] : count[1]]
            found, masks, state = self._call(*values, inputs, fixed[count[1] :])
            changed = [
                (variable, new)
                for variable, new, old in zip(variables, state, values[1], strict=True)
                if new is not old
            ]
            unstated = [one for one in changed if trainer.has_no_stated_aggregation(self.model, one[0])]
            self.unstated = [variable.path for variable, _ in unstated]
            self.has_stated = len(unstated) < len(changed)
            return [*found, *masks, *(jnp.asarray(new) for _, new in unstated)]

        with without_batch_statistics(self.model) as self.normalized:
            return traced(call, [*trainable, *non_trainable, *self.shared], self.inputs, rows)

    @property
    def tells_replicas_apart(self) -> bool:
        """Whether by design each replica has something of its own: statistics of its rows, random draws, or its part of a variable."""
        return bool(self.normalized) or self.has_stated or not self._whole.operations.keys().isdisjoint(_DRAWS)

    @property
    def has_convolution(self) -> bool:
        """Whether XLA for CPUs has work here that it does not divide well."""
        return "conv_general_dilated" in self._whole.operations

    @property
    def operations(self) -> int:
        """How many a call has, which is what compiling takes."""
        return self._whole.operations.total()

    def learn(self, sizes: set[int]) -> None:
        """Prove of each result how it follows from the rows, and see that calls with ``sizes`` rows run.

        Raises:
            CannotSplitError: a result follows from several rows, or a call does not run.
        """
        whole = self._whole
        # Of one row a call is traced in other words, as an axis of one may be stretched: what is proved then is another number.
        asked = sorted({size for size in sizes if size > 1} or {2 if self.rows > 2 else 3}, reverse=True)
        parts = []
        for size in (*asked, *(sizes - {*asked})):
            with self._runs_on(size):
                parts.append(self._traced(size))
        shapes = whole.shapes[: len(whole.shapes) - len(self.unstated)]
        found = []
        for part in parts[: len(asked)]:
            places = _followed(whole, part)
            for path, place in zip(self.unstated, places[len(shapes) :], strict=True):
                _check_state(path, place)
            found.append([_place(*one) for one in zip(shapes, places, strict=False)])
        self.dtypes, self.places = [one.dtype for one in shapes], found[0]
        for part in parts:
            expected = [_shape(*one, part.rows) for one in zip(shapes, self.places, strict=True)]
            got = [one.shape for one in part.shapes[: len(shapes)]]
            if got != expected or any(places != self.places for places in found):
                raise CannotSplitError(
                    f"what it returns for {part.rows} of its rows lies otherwise than what it returns for all"
                )

    @contextlib.contextmanager
    def _runs_on(self, size: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is: the same call has run on all rows
            raise CannotSplitError(
                f"it runs on {self.rows} rows but not on {size} of them ({_reason(error)})"
            ) from error

    def __call__(
        self, trainable: list[Any], non_trainable: list[Any], inputs: list[Any], shared: list[Any]
    ) -> ReplicaResult:
        """One replica's forward pass."""
        values, masks, state = self._call(trainable, non_trainable, inputs, shared)
        placed = list(zip((*values, *masks), self.places, strict=True))
        rows = len(inputs[0])
        return ReplicaResult(
            rows=[with_rows_first(value, place, rows) for value, place in placed if place is not None],
            means=[value for value, place in placed if place is None],
            state=[None if new is old else jnp.asarray(new) for new, old in zip(state, non_trainable, strict=True)],
        )

    def _call(
        self, trainable: list[Any], non_trainable: list[Any], inputs: list[Any], shared: list[Any]
    ) -> tuple[list[Any], ...]:
        """Outputs, losses and what is kept; masks; and new non-trainable values, each as a flat list."""
        own, whole = iter(inputs), iter(shared)
        leaves = [
            next(own) if cut else next(whole) if isinstance(leaf, jax.Array) else leaf
            for leaf, cut in zip(self.leaves, self.cut, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        before = arrays_kept(self.model)
        outputs, state, losses = self.original(trainable, non_trainable, *args, return_losses=True, **kwargs)
        kept = {place: array for place, array in arrays_kept(self.model).items() if array is not before.get(place)}
        self.kept = list(kept)
        outputs, self.outputs = jax.tree.flatten(outputs)
        masks = [trainer.get_keras_mask(leaf) for leaf in outputs]
        self.masked = [mask is not None for mask in masks]
        return (
            [jnp.asarray(value) for value in (*outputs, *losses, *kept.values())],
            [mask for mask in masks if mask is not None],
            state,
        )

    def joined(self, result: ReplicaResult) -> tuple[Any, list[Any]]:
        """Outputs, with their masks, and losses, of the whole batch; what is kept is left in its attributes."""
        rows, means = iter(result.rows), iter(result.means)
        values = [
            next(means).astype(dtype) if place is None else with_rows_back(next(rows), place)
            for place, dtype in zip(self.places, self.dtypes, strict=True)
        ]
        masks = iter(values[len(values) - sum(self.masked) :])
        values = values[: len(values) - sum(self.masked)]
        count = len(values) - len(self.kept)
        outputs, losses = values[: self.outputs.num_leaves], values[self.outputs.num_leaves : count]
        keep_arrays(self.kept, values[count:])
        for output, masked in zip(outputs, self.masked, strict=True):
            if masked:
                trainer.set_keras_mask(output, next(masks))
        return jax.tree.unflatten(self.outputs, outputs), losses


def _followed(whole: Trace, part: Trace) -> list[Place]:
    """The proof; what it stumbles over, as over an operation that JAX has changed, is not proved."""
    try:
        return places_of(whole, part)
    except Exception as error:
        raise CannotSplitError(f"its rows cannot be followed ({type(error).__name__}: {_reason(error)})") from error


def _place(whole: jax.ShapeDtypeStruct, place: Place) -> RowAxis | None:
    """Where the rows of a result are, or None for what replicas average."""
    if isinstance(place, RowAxis):
        return place
    if isinstance(place, Mixed):
        raise CannotSplitError(f"it mixes the rows of its batch: {place}")
    is_averaged = place is None or isinstance(place, RowMean)
    if not is_averaged or not jnp.issubdtype(whole.dtype, jnp.floating):
        raise CannotSplitError(
            f"it returns {whole.dtype}{list(whole.shape)}, which is neither one for each row nor an average over the rows"
        )
    return None


def _check_state(path: str, place: Place) -> None:
    """That replicas may be averaged in a variable whose layer does not say how they meet."""
    if not (place is None or isinstance(place, RowMean)):
        reason = place if isinstance(place, Mixed) else "it gets no average over the rows"
        raise CannotSplitError(f"variable {path!r} has no aggregation, and {reason}")


def _shape(whole: jax.ShapeDtypeStruct, place: RowAxis | None, rows: int) -> tuple[int, ...]:
    """That of a result for a part of the rows."""
    return whole.shape if place is None else place.shape(whole.shape, rows)


def _reason(error: Exception) -> str:
    """The line of an exception that says what is wrong; Keras puts where it was before it, and what was given behind it."""
    if "_error_repr" in str(error) and isinstance(error.__context__, Exception):
        error = (
            error.__context__
        )  # Keras (3.15) makes JAX's exceptions anew with a text, which some of them do not take.
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith("Exception encountered when calling")]
    # One line for all batches: their shapes are left out.
    return re.sub(r" with shape \S+$", "", said[0]) if said else type(error).__name__


def merge_of(variable: keras.Variable) -> OutputMerge:
    """How the replicas' values of a non-trainable variable become one."""
    if trainer.is_seed(variable):
        return OutputMerge.SEED
    if variable.aggregation == "sum":
        return OutputMerge.SUM
    if variable.aggregation == "only_first_replica" or "float" not in variable.dtype:
        return OutputMerge.FIRST
    return OutputMerge.MEAN
