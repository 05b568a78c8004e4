"""Row axes of arrays, and pairs of equations from two traces with different numbers of rows."""

import inspect
import os
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from lockstep.execution.jaxpr_utils import equations_of, source_location


@dataclass(frozen=True)
class RowAxis:
    """Each entry along an axis of length ``outer * rows * inner`` depends on one row only.

    Entry ``(i * rows + row) * inner + j``, with ``i < outer`` and ``j < inner``, depends on ``row``.

    Attributes:
        axis: the axis.
        outer: number of consecutive blocks that each have all rows.
        inner: number of consecutive entries of one row.
        uniform: all entries along the axis are the same, or random, so that any ``outer`` and ``inner`` are right.
    """

    axis: int
    outer: int = 1
    inner: int = 1
    uniform: bool = False

    def shape(self, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """Return the shape of the value for another number of rows."""
        return (*shape[: self.axis], self.outer * rows * self.inner, *shape[self.axis + 1 :])


@dataclass(frozen=True)
class RowSum:
    """A sum over the rows of values that depend on one row each."""


@dataclass(frozen=True)
class RowMean:
    """A mean over the rows of values that depend on one row each."""


@dataclass(frozen=True)
class RowCount:
    """A number proportional to the number of rows."""


@dataclass(frozen=True)
class Seeded:
    """Independent of the batch, but different on each replica: the state of a seed generator, and what is computed from it."""


@dataclass(frozen=True)
class ReplicaStatistic(Seeded):
    """What a normalization finds in the rows of a replica, and what is computed from it: it stands for the mean over the replicas."""


@dataclass(frozen=True)
class NeverTrue:
    """A condition that is false for any number of rows, such as that there are none."""


@dataclass(frozen=True)
class Mixed:
    """Depends on several rows, on their number, or on the position of a row.

    Attributes:
        reason: the operation and what it does.
        layer: the layer that it is part of, if known.
        line: the line of the user's program, if known.
    """

    reason: str
    layer: str = ""
    line: str = ""

    def __str__(self) -> str:
        location = (f"layer {self.layer!r}" if self.layer else "", self.line)
        return ", ".join((self.reason, *filter(None, location)))

    def located_at(self, equation: JaxprEqn) -> "Mixed":
        """Return a copy with the layer and the line of an equation, if these are known."""
        layer, line = source_location(equation)
        return replace(self, layer=layer or self.layer, line=line or self.line)


# None: independent of the batch, and equal on all replicas.
RowDependence = RowAxis | RowSum | RowMean | RowCount | Seeded | NeverTrue | Mixed | None
RowDependences = list[RowDependence]


def is_fixed(dep: RowDependence) -> bool:
    """Return whether a value is independent of the batch."""
    return dep is None or isinstance(dep, Seeded)


def is_noise(dep: RowDependence) -> bool:
    """Return whether a value is drawn by each replica for itself, so that the mean over the replicas is another one."""
    return isinstance(dep, Seeded) and not isinstance(dep, ReplicaStatistic)


class MixedRowsError(Exception):
    """An operation combines several rows."""


def common_dependence(deps: RowDependences, what: str) -> RowDependence:
    """Return the dependence of a value whose entries are computed from the same entries of several others; None has no axis of rows."""
    named = [dep for dep in deps if not is_fixed(dep)]
    if not named:
        return max(deps, key=lambda dep: (is_noise(dep), dep is not None), default=None)
    if len(named) < len(deps) and any(isinstance(dep, (RowSum, RowCount, NeverTrue)) for dep in named):
        raise MixedRowsError(f"{what} combines a sum over the rows with another value")
    exact = [dep for dep in named if not (isinstance(dep, RowAxis) and dep.uniform)]
    found = exact[0] if exact else named[0]
    for dep in exact:
        if dep != found:
            raise MixedRowsError(f"{what} combines rows along different axes")
    if isinstance(found, RowAxis) and any(dep.axis != found.axis for dep in named if isinstance(dep, RowAxis)):
        raise MixedRowsError(f"{what} combines rows along different axes")
    return found


def move_rows_first(value: jax.Array, axis: RowAxis, rows: int) -> jax.Array:
    """Return a value, whose rows are along ``axis``, as ``(rows, …)``."""
    if axis.outer == axis.inner == 1:
        return jnp.moveaxis(value, axis.axis, 0)
    shape = (
        *value.shape[: axis.axis],
        axis.outer,
        rows,
        axis.inner,
        *value.shape[axis.axis + 1 :],
    )
    return jnp.moveaxis(value.reshape(shape), axis.axis + 1, 0)


def move_rows_back(value: jax.Array, axis: RowAxis) -> jax.Array:
    """Invert :func:`move_rows_first`."""
    if axis.outer == axis.inner == 1:
        return jnp.moveaxis(value, 0, axis.axis)
    moved = jnp.moveaxis(value, 0, axis.axis + 1)
    shape = moved.shape
    length = axis.outer * value.shape[0] * axis.inner
    return moved.reshape((*shape[: axis.axis], length, *shape[axis.axis + 3 :]))


# Operations with the numbers of a formula, whose derivative is another such operation.
KERNELS = ("dot_product_attention_fwd_wrapper", "pallas_call")
_LIBRARIES = tuple(os.path.join(module.__path__[0], "") for module in (jax, keras))


@dataclass(frozen=True)
class EquationPair:
    """The same equation in both traces, with their numbers of rows, and the variables of the first trace that hold zeros."""

    equations: tuple[JaxprEqn, JaxprEqn]
    rows: tuple[int, int]
    zeros: Set[Any] = frozenset()

    @property
    def name(self) -> str:
        """Name of the operation."""
        return self.equations[0].primitive.name

    @property
    def num_results(self) -> int:
        """Number of results."""
        return len(self.equations[0].outvars)

    def is_zero(self, number: int) -> bool:
        """Return whether an input that is the same in both traces holds zeros."""
        atom = self.equations[0].invars[number]
        if isinstance(atom, Literal):
            return np.ndim(atom.val) == 0 and not np.any(np.asarray(atom.val))
        return atom in self.zeros

    def is_never_less(self) -> bool:
        """Return whether this compares two numbers of which the first is not less: JAX asks so of the rows in ``x[:, t]``, for a traced t."""
        numbers = [
            atom.val for atom in self.equations[0].invars if isinstance(atom, Literal) and np.ndim(atom.val) == 0
        ]
        return self.name == "lt" and len(numbers) == 2 and not numbers[0] < numbers[1]

    def param(self, name: str) -> Any:
        """Return a parameter that :func:`check_params` found to be the same in both equations."""
        return self.equations[0].params[name]

    def params(self, name: str) -> tuple[Any, Any]:
        """Return a parameter of each equation."""
        return self.equations[0].params[name], self.equations[1].params[name]

    def shapes(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of an input."""
        avals: list[Any] = [equation.invars[number].aval for equation in self.equations]
        return avals[0].shape, avals[1].shape

    def result_shapes(self, number: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a result."""
        avals: list[Any] = [equation.outvars[number].aval for equation in self.equations]
        return avals[0].shape, avals[1].shape

    def dtypes(self) -> tuple[Any, Any]:
        """Return the dtypes of the first input and of the first result."""
        avals: list[Any] = [self.equations[0].invars[0].aval, self.equations[0].outvars[0].aval]
        return avals[0].dtype, avals[1].dtype

    def result_dtypes(self, number: int) -> tuple[Any, Any]:
        """Return the dtypes of a result."""
        avals: list[Any] = [equation.outvars[number].aval for equation in self.equations]
        return avals[0].dtype, avals[1].dtype

    def has_fixed_shapes(self) -> bool:
        """Return whether the shapes of all results are the same in both traces."""
        return all(len(set(self.result_shapes(number))) == 1 for number in range(self.num_results))

    def blocks(self, lengths: tuple[int, int], unit: int) -> int:
        """Return the factor between two lengths and the numbers of rows times ``unit``."""
        count = lengths[0] // (self.rows[0] * unit)
        if tuple(count * rows * unit for rows in self.rows) != tuple(lengths):
            raise MixedRowsError("it cuts the axis of the rows inside a batch")
        return count


def check_params(pair: EquationPair, row_dependent: Sequence[str] = ()) -> None:
    """Check that an operation is the same for both numbers of rows, except for parameters that its rule checks."""
    one, other = (equation.params for equation in pair.equations)
    for name in one.keys() | other.keys():
        given = one.get(name), other.get(name)
        called = [getattr(value, "callback_func", None) for value in given]
        if called[0] is not called[1]:  # of jax.pure_callback
            raise MixedRowsError(f"{pair.name} may call another function for another number of rows")
        if name not in row_dependent and not callable(given[0]) and not is_same(*given):
            raise MixedRowsError(f"{pair.name}: its {name} changes with the number of rows")


def backward_of(equation: JaxprEqn) -> ClosedJaxpr:
    """Return the jaxpr of the derivative of a function with a custom one: (inputs, cotangents) to results, and gradients of the inputs."""
    inputs: list[Any] = [atom for atom in dict.fromkeys(equation.invars) if not isinstance(atom, Literal)]
    results: list[Any] = equation.outvars
    called = equation.params["call_jaxpr"].jaxpr
    alone = Jaxpr([], inputs, results, [equation], equation.effects, debug_info=called.debug_info)
    function = jaxpr_as_fun(ClosedJaxpr(alone, []))

    def backward(primals: list[Any], cotangents: list[Any]) -> list[Any]:
        results, pull = jax.vjp(function, *primals)
        return [*results, *pull(cotangents)]

    return jax.make_jaxpr(backward)([one.aval for one in inputs], [one.aval for one in results])


def has_known_derivative(equation: JaxprEqn) -> bool:
    """Return whether a function with a custom derivative is one of JAX's or Keras's, whose derivatives are those of their formulas.

    A user may give one of these another derivative, so all parts must be in one file; that of ``defjvps`` is in none of them.
    ``jax.lax.custom_root`` and ``jax.custom_gradient`` get a part of their derivative from the user.
    """
    function, params = equation.params["call_jaxpr"].jaxpr, equation.params
    if equation.primitive.name == "custom_jvp_call":
        derivatives = [params["jvp_jaxpr_fun"]]
    elif any(each.primitive.name in KERNELS for each in equations_of(function)):
        derivatives = [params["fwd_jaxpr_thunk"], params["bwd"]]
    else:  # The proof reads it.
        return False
    sources = [str(info.func_src_info) for info in (function.debug_info, *(each.debug_info for each in derivatives))]
    files = {one.partition(" at ")[2].rpartition(":")[0] for one in sources}
    is_of_user = "custom_root" in sources[0] or inspect.getfile(jax.custom_gradient) in files
    return not is_of_user and len(files) == 1 and files.pop().startswith(_LIBRARIES)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two numbers, arrays or parameters are equal; a tracer equals only itself."""
    if one is other:
        return True
    if is_tracer(one, other):
        return False
    if isinstance(one, ClosedJaxpr) and isinstance(other, ClosedJaxpr):
        constants = len(one.consts) == len(other.consts) and all(map(is_same, one.consts, other.consts))
        return constants and str(one.jaxpr) == str(other.jaxpr)
    if isinstance(one, Jaxpr) and isinstance(other, Jaxpr):
        return str(one) == str(other)
    if isinstance(one, (jax.Array, np.ndarray)) and isinstance(other, (jax.Array, np.ndarray)):
        is_inexact = np.issubdtype(one.dtype, np.inexact)
        return one.dtype == other.dtype and bool(np.array_equal(one, other, equal_nan=is_inexact))
    try:
        return bool(one == other) or (one != one and other != other)  # both NaN
    except (TypeError, ValueError):
        return False


def is_tracer(*values: Any) -> bool:
    """Return whether any of the values is a tracer."""
    return any(isinstance(value, jax.core.Tracer) for value in values)
