"""Split the forward call of a model into calls for replicas, and join their results into those of the whole batch.

A call is split if ``rowwise/`` proves that each row of each result depends only on its own row of the batch, or that a result
is a mean over the rows or independent of them. Otherwise, or if the model does not run on a part of its batch, the model runs
on the global batch. The proof ignores BatchNormalization, which normalizes over the rows of a replica by design, and draws from seed
generators.

In order of use: :func:`trace_call`, :func:`infer_output_spec`, :func:`split`, :func:`join`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._keras.batch_normalization import disable_batch_statistics, moments_of_first_rows
from lockstep._keras.graph import cause_of, flatten_in_order, get_keras_mask, is_seed, lacks_aggregation, set_keras_mask
from lockstep._keras.layer_attributes import (
    attribute_arrays,
    attribute_numbers,
    attributes_kept,
    changed_numbers,
    is_equal_number,
    set_attribute_leaves,
)
from lockstep.execution.replica import ReplicaCall, ReplicaResult, StateMerge, halves, join_halves
from lockstep.execution.rowwise.proof import (
    RowProof,
    Trace,
    draws_for_each_row,
    prove_rows,
    statistic_of_replica,
    trace_for_rows,
)
from lockstep.execution.rowwise.row_axes import (
    Mixed,
    RowAxis,
    RowDependence,
    RowMean,
    is_fixed,
    is_noise,
    move_rows_back,
    move_rows_first,
)
from lockstep.execution.rowwise.rules import DRAWS, KEY_OPERATIONS


class CannotSplitError(Exception):  # caught by the caller, which runs the model on the global batch
    """The call needs the global batch; the message gives the reason."""


@dataclass(frozen=True)
class ModelCall:
    """One call of a model's ``stateless_call``.

    Attributes:
        model: the model.
        function: its original ``stateless_call``.
        trainable: values of the trainable variables.
        non_trainable: values of the non-trainable variables.
        leaves: the other arguments, flattened, then the Keras masks of those that have one.
        structure: tree structure of the arguments.
        masked: positions of the arguments that have a mask.
        rows: number of rows; 0 if no argument is an array with axes.
        has_losses: whether the call returns losses; else layers add none.
        is_cut: for each leaf whether replicas get only their rows of it.
    """

    model: keras.Model
    function: Callable[..., Any]
    trainable: list[Any]
    non_trainable: list[Any]
    leaves: list[Any]
    structure: Any
    masked: tuple[int, ...]
    rows: int
    has_losses: bool
    is_cut: list[bool]

    @classmethod
    def from_arguments(
        cls,
        model: keras.Model,
        function: Callable[..., Any],
        trainable: list[Any],
        non_trainable: list[Any],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        has_losses: bool,
        rows: int | None = None,
    ) -> "ModelCall":
        """Describe a call with positional and keyword ``arguments`` after the two lists of values; it returns losses if ``has_losses``.

        There are ``rows`` rows if an array has as many entries, else as many as the first array with axes has. Each array with as
        many entries is cut; if these entries are not rows, the proof fails.
        """
        leaves, structure = flatten_in_order(arguments)
        lengths = [np.shape(leaf)[0] for leaf in leaves if np.ndim(leaf)]
        if rows is None or rows not in lengths:
            rows = lengths[0] if lengths else 0
        masked = tuple(
            n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and get_keras_mask(leaf) is not None
        )
        leaves = [*leaves, *(jnp.asarray(get_keras_mask(leaves[position])) for position in masked)]
        is_cut = [np.ndim(leaf) > 0 and np.shape(leaf)[0] == rows for leaf in leaves]
        return cls(model, function, trainable, non_trainable, leaves, structure, masked, rows, has_losses, is_cut)

    def make(self) -> tuple[Any, list[Any], list[Any]]:
        """Make the call as it is; return outputs, new values of the non-trainable variables, and losses."""
        return self.make_with(self.trainable, self.non_trainable, self.leaves)

    def make_with(self, trainable: list[Any], non_trainable: list[Any], leaves: list[Any]) -> Any:
        """Make the call with other values of the variables and other ``leaves``."""
        args, kwargs = self.arguments(leaves)
        if self.has_losses:
            return self.function(trainable, non_trainable, *args, return_losses=True, **kwargs)
        return *self.function(trainable, non_trainable, *args, **kwargs), []

    def arguments(self, leaves: list[Any]) -> Any:
        """Return the arguments, positional and by keyword, of ``leaves``, to which their masks are attached."""
        count = len(leaves) - len(self.masked)
        for position, mask in zip(self.masked, leaves[count:], strict=True):
            set_keras_mask(leaves[position], mask)
        return jax.tree.unflatten(self.structure, leaves[:count])

    @property
    def inputs(self) -> list[Any]:
        """The arguments, and masks, that are cut into rows."""
        return [leaf for leaf, is_cut in zip(self.leaves, self.is_cut, strict=True) if is_cut]

    @property
    def shared(self) -> list[Any]:
        """The arrays among the arguments that every replica gets whole; numbers and flags are left out."""
        leaves = zip(self.leaves, self.is_cut, strict=True)
        return [leaf for leaf, is_cut in leaves if not is_cut and isinstance(leaf, jax.Array)]


@dataclass(frozen=True)
class _ResultForm:
    """Structure of what a call returns.

    Attributes:
        outputs: tree structure of the outputs.
        constants: the outputs that are numbers of Python, by their positions.
        has_mask: for each output, then each array in ``attributes``, whether it has a Keras mask.
        attributes: where layers store arrays in attributes while they are called; the rest of a step may use these.
        numbers: the numbers that layers store in attributes, likewise, and where.
    """

    outputs: Any
    constants: dict[int, Any]
    has_mask: tuple[bool, ...]
    attributes: tuple[Any, ...]
    numbers: dict[Any, Any]


@dataclass(frozen=True)
class _AveragedVariable:
    """A non-trainable variable that a call changes, and whose value is the mean over the replicas.

    Attributes:
        position: among the non-trainable variables.
        path: path of the variable.
        reason: why its new value must be proved to be a mean over the rows, or the same on each replica; "" if it need not be.
    """

    position: int
    path: str
    reason: str


@dataclass(frozen=True)
class CallTrace:
    """A call traced on some number of rows, with BatchNormalization that uses its moving statistics.

    Attributes:
        trace: its results are outputs, losses and stored attributes, masks, then the variables ``averaged``.
        form: structure of the results.
        averaged: variables that change.
        changed: positions of all non-trainable variables that change.
        has_replica_state: whether each replica has statistics of its rows, or its part of a variable other than a seed.
        has_state_of_rows: whether a variable other than a seed changes that is not averaged, or a subclass may have other statistics.
        draws: whether random numbers are drawn.
    """

    trace: Trace
    form: _ResultForm
    averaged: tuple[_AveragedVariable, ...]
    changed: tuple[int, ...]
    has_replica_state: bool
    has_state_of_rows: bool
    draws: bool

    @property
    def depends_on_replica(self) -> bool:
        """Whether each replica has something of its own, so that it needs a call of its own."""
        return self.has_replica_state or self.draws

    @property
    def has_convolution(self) -> bool:
        """Whether it contains an operation that XLA for CPUs does not parallelize well."""
        return "conv_general_dilated" in self.trace.operations

    @property
    def operations(self) -> int:
        """Number of operations, which determines the time to compile."""
        return self.trace.operations.total()


@dataclass(frozen=True)
class OutputSpec:
    """How the results of a call follow from the rows of its batch.

    Attributes:
        form: structure of the results.
        row_axes: for outputs, then losses, then stored attributes, then masks: where the rows are, or None if the result has no
            rows: replicas average it, or have the same whole numbers or bools.
        dtypes: dtypes of the same results.
        first_state: positions of the non-trainable variables that get the value of the first replica: it is proved to be that of
            each, or random numbers, which have no mean.
        allows_padding: whether rows after those of a replica change none of its results, if normalizations leave them out of their
            statistics.
    """

    form: _ResultForm
    row_axes: tuple[RowAxis | None, ...]
    dtypes: tuple[Any, ...]
    first_state: frozenset[int]
    allows_padding: bool


def trace_call(call: ModelCall) -> CallTrace:
    """Trace a call on all rows, to decide in how many calls it is made.

    Raises:
        CannotSplitError: the call cannot be traced. If the step is compiled, the call itself will then fail likewise.
    """
    try:
        return _trace(call, call.rows)
    except Exception as error:
        raise CannotSplitError(f"it cannot be traced ({cause_of(error)})") from error


def infer_output_spec(call: ModelCall, whole: CallTrace, sizes: set[int]) -> OutputSpec:
    """Prove for each result how it follows from the rows, and check that calls with ``sizes`` rows, those of the replicas, run.

    Raises:
        CannotSplitError: a result depends on several rows, or a call does not run.
    """
    # JAX traces other operations for one row, as an axis of length 1 may be broadcast: the proof uses another number.
    proved = sorted({size for size in sizes if size > 1} or {2 if call.rows > 2 else 3}, reverse=True)
    parts, constants = [], whole.form.constants
    for size in (*proved, *(sizes - {*proved})):
        with _explaining_size(call.rows, size):
            part_call = _trace(call, size)
        _check_numbers(whole.form.numbers, part_call.form.numbers, call.rows, size)
        _check_changed(call.model, whole, part_call)
        constants = {place: value for place, value in constants.items() if part_call.form.constants.get(place) == value}
        parts.append(part_call.trace)
    shapes = whole.trace.shapes[: len(whole.trace.shapes) - len(whole.averaged)]
    found, allows_padding = [], not whole.has_state_of_rows
    first_state = {variable.position for variable in whole.averaged}
    for part in parts[: len(proved)]:
        proof = _follow_rows(whole.trace, part)
        deps = proof.results
        first_state &= _first_state(whole.averaged, deps[len(shapes) :])
        found.append(tuple(_row_axis(*one) for one in zip(shapes, deps, strict=False)))
        _check_noise(whole.form, deps[: len(shapes) - sum(whole.form.has_mask)])
        has_mean = any(isinstance(dep, RowMean) for dep in deps)
        allows_padding &= not has_mean and all(map(is_fixed, deps[len(shapes) :]))
        allows_padding &= proof.has_statistics_of_leading_rows
        allows_padding &= not whole.draws or draws_for_each_row(whole.trace, part)
    for part in parts:
        pairs = zip(shapes, found[0], strict=True)
        expected = [one.shape if axis is None else axis.shape(one.shape, part.rows) for one, axis in pairs]
        got = [one.shape for one in part.shapes[: len(shapes)]]
        if got != expected or any(row_axes != found[0] for row_axes in found):
            raise CannotSplitError(
                f"its results for {part.rows} of its rows have other axes of rows than those for all"
            )
    form = replace(whole.form, constants=constants)
    return OutputSpec(form, found[0], tuple(one.dtype for one in shapes), frozenset(first_state), allows_padding)


def state_merges(call: ModelCall) -> tuple[StateMerge, ...]:
    """Return how the values of each non-trainable variable are merged if each replica makes this call with rows of its own.

    Raises:
        CannotSplitError: a variable without an aggregation is proved neither a mean over the rows nor the same on each replica.
    """
    variables = call.model.non_trainable_variables
    first: set[int] = set()
    if any(reason_for_proof(call.model, variable) for variable in variables):
        rows = max(call.rows, 2)
        with _explaining_size(call.rows, rows):
            part = _trace(call, rows)
        if any(variable.reason for variable in part.averaged):
            with _explaining_size(call.rows, 2 * rows):
                whole = _trace(call, 2 * rows)
            _check_changed(call.model, whole, part)
            deps = _follow_rows(whole.trace, part.trace).results
            first = _first_state(whole.averaged, deps[len(deps) - len(whole.averaged) :])
    return merges_with(variables, first)


def merges_with(variables: list[keras.Variable], first_state: Set[int]) -> tuple[StateMerge, ...]:
    """Return how the replicas' values of non-trainable variables are merged, with the value of the first at these positions."""
    return tuple(
        StateMerge.FIRST if i in first_state else state_merge(variable) for i, variable in enumerate(variables)
    )


def _first_state(averaged: tuple[_AveragedVariable, ...], deps: Sequence[RowDependence]) -> set[int]:
    """Check that variables may be averaged where that must be proved; return the positions of those that get the value of the first replica."""
    first = set()
    for variable, dep in zip(averaged, deps, strict=True):
        if variable.reason and not (is_fixed(dep) or isinstance(dep, RowMean)):
            reason = dep if isinstance(dep, Mixed) else "its new value is no average over the rows"
            raise CannotSplitError(f"variable {variable.path!r} {variable.reason}, and {reason}")
        if dep is None or (variable.reason and is_noise(dep)):
            first.add(variable.position)
    return first


def _check_changed(model: keras.Model, whole: CallTrace, part: CallTrace) -> None:
    """Check that a call changes the same variables for two numbers of rows."""
    differ = sorted(set(whole.changed) ^ set(part.changed))
    if differ:
        path = model.non_trainable_variables[differ[0]].path
        raise CannotSplitError(f"it changes variable {path!r} for some numbers of rows only")


def _check_numbers(whole: dict[Any, Any], part: dict[Any, Any], rows: int, size: int) -> None:
    """Check that layers store the same numbers in attributes for ``rows`` and for ``size`` rows."""
    for layer, name, number in (*whole, *part):
        if not is_equal_number(whole.get((layer, name, number)), part.get((layer, name, number))):
            raise CannotSplitError(
                f"layer {layer.name!r} keeps another number in its attribute {name!r} for {rows} rows than for {size}"
            )


def split(spec: OutputSpec, call: ModelCall) -> ReplicaCall:
    """Return the forward pass of one replica: a function of its variables' values, its inputs, the shared arguments, and the number of rows
    that are used, if padding follows.
    """

    def run(
        trainable: list[Any], non_trainable: list[Any], inputs: list[Any], shared: list[Any], used: Any = None
    ) -> ReplicaResult:
        rows = len(inputs[0])
        has_padding = contextlib.nullcontext() if used is None else moments_of_first_rows(call.model, rows, used)
        with attributes_kept(call.model), has_padding:
            values, masks, state, _ = _run(call, trainable, non_trainable, inputs, shared)
        results = list(zip((*values, *masks), spec.row_axes, strict=True))
        return ReplicaResult(
            rows=[move_rows_first(value, axis, rows) for value, axis in results if axis is not None],
            means=[value if _is_floating(value) else halves(value) for value, axis in results if axis is None],
            state=[None if new is old else jnp.asarray(new) for new, old in zip(state, non_trainable, strict=True)],
        )

    return run


def join(spec: OutputSpec, result: ReplicaResult) -> tuple[Any, list[Any]]:
    """Return outputs, with their masks, and losses of the whole batch; store the arrays that layers keep in attributes."""
    rows, means = iter(result.rows), iter(result.means)
    values = [
        _from_mean(next(means), dtype) if axis is None else move_rows_back(next(rows), axis)
        for axis, dtype in zip(spec.row_axes, spec.dtypes, strict=True)
    ]
    form = spec.form
    masks = iter(values[len(values) - sum(form.has_mask) :])
    values = values[: len(values) - sum(form.has_mask)]
    count = len(values) - len(form.attributes)
    outputs, losses = values[: form.outputs.num_leaves], values[form.outputs.num_leaves : count]
    for value, has_mask in zip((*outputs, *values[count:]), form.has_mask, strict=True):
        if has_mask:
            set_keras_mask(value, next(masks))
    set_attribute_leaves([*form.attributes, *form.numbers], [*values[count:], *form.numbers.values()])
    outputs = [form.constants.get(place, value) for place, value in enumerate(outputs)]
    return jax.tree.unflatten(form.outputs, outputs), losses


def _from_mean(mean: jax.Array, dtype: Any) -> jax.Array:
    """Return a result without rows, of which the replicas' mean was taken."""
    return (mean if jnp.issubdtype(dtype, jnp.floating) else join_halves(mean)).astype(dtype)


def state_merge(variable: keras.Variable) -> StateMerge:
    """Return how the replicas' values of a non-trainable variable are merged, if nothing is proved of it."""
    if is_seed(variable):
        return StateMerge.SEED
    if variable.aggregation == "sum" and variable.dtype != "bool":
        return StateMerge.SUM
    if variable.aggregation == "only_first_replica" or not _is_inexact(variable):
        return StateMerge.FIRST
    return StateMerge.MEAN


def _is_floating(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def _is_inexact(variable: keras.Variable) -> bool:
    return bool(jnp.issubdtype(variable.dtype, jnp.inexact))


# --- tracing ----------------------------------------------------------------------------------------------------------


def _trace(call: ModelCall, rows: int) -> CallTrace:
    variables = call.model.non_trainable_variables
    trainable, state_end = len(call.trainable), len(call.trainable) + len(call.non_trainable)
    learned: dict[str, Any] = {}  # Python values that the traced function computes besides its arrays

    def function(fixed: list[Any], inputs: list[Any]) -> list[Any]:
        non_trainable = fixed[trainable:state_end]
        values, masks, state, form = _run(call, fixed[:trainable], non_trainable, inputs, fixed[state_end:])
        changed = [
            position for position, (new, old) in enumerate(zip(state, non_trainable, strict=True)) if new is not old
        ]
        reasons = [reason_for_proof(call.model, variables[position]) for position in changed]
        averaged = [
            _AveragedVariable(position, variables[position].path, reason)
            for position, reason in zip(changed, reasons, strict=True)
            if reason or state_merge(variables[position]) is StateMerge.MEAN
        ]
        learned.update(form=form, averaged=tuple(averaged), changed=tuple(changed))
        return [*values, *masks, *(jnp.asarray(state[one.position]) for one in averaged)]

    seeds = [trainable + position for position, variable in enumerate(variables) if is_seed(variable)]
    is_replaced = disable_batch_statistics(call.model, statistic_of_replica)
    with is_replaced as normalizations, attributes_kept(call.model):
        fixed = [*call.trainable, *call.non_trainable, *call.shared]
        trace = trace_for_rows(function, fixed, call.inputs, rows, seeds)
    draws = not trace.operations.keys().isdisjoint((*DRAWS, *KEY_OPERATIONS))
    averaged, changed = learned["averaged"], learned["changed"]
    others = [position for position in changed if not is_seed(variables[position])]
    has_state = bool(normalizations) or not all(reason_for_proof(call.model, variables[n]) for n in others)
    of_rows = not {one.position for one in averaged}.issuperset(others)
    of_rows |= any(type(layer) is not keras.layers.BatchNormalization for layer in normalizations)
    return CallTrace(trace, learned["form"], averaged, changed, has_state, of_rows, draws)


def reason_for_proof(model: keras.Model, variable: keras.Variable) -> str:
    """Return why the mean or sum over the replicas of a variable is right only if that is proved; "" if it is by definition."""
    if lacks_aggregation(model, variable):
        return "has no aggregation"
    if variable.aggregation == "mean" and not _is_inexact(variable):
        return f"is {variable.dtype}, which has no mean over the replicas"
    if variable.aggregation == "sum" and variable.dtype == "bool":
        return "is bool, which has no sum over the replicas"
    return ""


def _run(
    call: ModelCall, trainable: list[Any], non_trainable: list[Any], inputs: list[Any], shared: list[Any]
) -> tuple[list[Any], list[Any], list[Any], _ResultForm]:
    """Call the model; return outputs, losses and stored attributes; masks; new non-trainable values; and their form."""
    cut, whole = iter(inputs), iter(shared)
    leaves = [
        next(cut) if is_cut else next(whole) if isinstance(leaf, jax.Array) else leaf
        for leaf, is_cut in zip(call.leaves, call.is_cut, strict=True)
    ]
    before, numbers_before = attribute_arrays(call.model), attribute_numbers(call.model)
    tree, state, losses = call.make_with(trainable, non_trainable, leaves)
    stored = {place: array for place, array in attribute_arrays(call.model).items() if array is not before.get(place)}
    outputs, structure = flatten_in_order(tree)
    constants = {place: leaf for place, leaf in enumerate(outputs) if isinstance(leaf, (bool, int, float, complex))}
    read = {id(one): value for one, value in zip(call.model.trainable_variables, trainable, strict=True)}
    read |= {id(one): value for one, value in zip(call.model.non_trainable_variables, state, strict=True)}
    outputs = [read.get(id(leaf), leaf) for leaf in outputs]  # The model may return variables.
    masks = [get_keras_mask(leaf) for leaf in (*outputs, *stored.values())]
    numbers = changed_numbers(numbers_before, attribute_numbers(call.model))
    form = _ResultForm(structure, constants, tuple(mask is not None for mask in masks), tuple(stored), numbers)
    values = [jnp.asarray(value) for value in (*outputs, *losses, *stored.values())]
    return values, [mask for mask in masks if mask is not None], state, form


@contextlib.contextmanager
def _explaining_size(rows: int, size: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any type, as the same call has run on all rows
        raise CannotSplitError(f"it runs on {rows} rows but not on {size} of them ({cause_of(error)})") from error


# --- the proof --------------------------------------------------------------------------------------------------------


def _follow_rows(whole: Trace, part: Trace) -> RowProof:
    """Run the proof; an exception in it, as after a change of JAX's operations, means that nothing is proved."""
    try:
        return prove_rows(whole, part)
    except Exception as error:
        raise CannotSplitError(f"its rows cannot be followed ({type(error).__name__}: {cause_of(error)})") from error


def _row_axis(whole: jax.ShapeDtypeStruct, dep: RowDependence) -> RowAxis | None:
    """Return where the rows of a result are, or None if replicas average it."""
    if isinstance(dep, RowAxis):
        return dep
    if isinstance(dep, Mixed):
        raise CannotSplitError(f"it mixes the rows of its batch: {dep}")
    is_averaged = is_fixed(dep) or isinstance(dep, RowMean)
    is_same_number = dep is None and whole.dtype.kind in "biu" and whole.dtype.itemsize <= 4
    if not (is_averaged and _is_floating(whole)) and not is_same_number:
        raise CannotSplitError(
            f"it returns, or adds as a loss, {whole.dtype}{list(whole.shape)}, which is neither one for each row nor an average over the rows"
        )
    return None


def _check_noise(form: _ResultForm, deps: list[RowDependence]) -> None:
    """Check that no output and no stored array is noise that each replica draws for itself, as their mean would be other noise."""
    count = len(deps) - len(form.attributes)
    for dep in (*deps[: form.outputs.num_leaves], *deps[count:]):
        if is_noise(dep):
            raise CannotSplitError("it returns, or keeps in an attribute, random numbers that are not those of rows")
