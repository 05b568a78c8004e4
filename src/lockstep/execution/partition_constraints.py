"""Constraints on how XLA partitions a step: some operations must not be divided over devices along some of their axes.

jaxlib 0.10.2 computes wrong gradients, or ends the process, if it divides max pooling along overlapping windows, sorting along the
sorted axis, or slices whose start may be clamped along the cut axes: ``docs/decisions/0067``. A step is traced, and arguments and
results of these operations are constrained: each device has these axes whole, and XLA chooses for the others. Unsigned indices, as
the derivative of sorting has, become signed ones: with the others an uneven division ends the process.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun, jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.execution.jaxpr_utils import evaluate, run_equation
from lockstep.execution.train_state import Step

_WINDOWS = (
    "reduce_window",
    "reduce_window_max",
    "reduce_window_min",
    "select_and_scatter_add",
    "select_and_gather_add",
)


def constrain_partitioning(step: Step, mesh: Mesh) -> Step:
    """Return a step on arrays, to be compiled for the devices of ``mesh``, with these constraints; the step itself for one device."""
    if mesh.size == 1:
        return step

    @functools.wraps(step)
    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten((state, batch))

        def flat(*values: Any) -> Any:
            return step(*jax.tree.unflatten(structure, values))

        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        found = _evaluate(closed, leaves, mesh) if _is_divided_wrongly(closed.jaxpr) else jaxpr_as_fun(closed)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return run


def undivided_axes(equation: JaxprEqn) -> tuple[int, ...]:
    """Return the axes of an operation's arrays along which XLA must not divide it."""
    name, params = equation.primitive.name, equation.params
    if name == "sort":
        return (params["dimension"],)
    if name in _WINDOWS:
        pairs = zip(params["window_dimensions"], params["window_strides"], strict=True)
        return tuple(axis for axis, (window, stride) in enumerate(pairs) if window > stride)
    if name not in ("dynamic_slice", "dynamic_update_slice"):
        return ()
    is_read = name == "dynamic_slice"
    shape = _shape_of(equation.invars[0])
    part = params["slice_sizes"] if is_read else _shape_of(equation.invars[1])
    starts = equation.invars[1 if is_read else 2 :]
    lasts = [length - size for length, size in zip(shape, part, strict=True)]
    return tuple(axis for axis, last in enumerate(lasts) if last > 0 and not _is_within(starts[axis], last))


def _has_unsigned_indices(equation: JaxprEqn) -> bool:
    """Return whether an operation reads or writes entries at ``uint32`` indices."""
    is_indexed = equation.primitive.name == "gather" or equation.primitive.name.startswith("scatter")
    return is_indexed and _dtype_of(equation.invars[1]) == "uint32"


def _is_within(start: Any, last: int) -> bool:
    """Return whether the start of a slice is a known number of at most ``last``, so that it is not clamped."""
    return isinstance(start, Literal) and 0 <= int(start.val) <= last


def _shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


def _dtype_of(atom: Any) -> Any:
    return atom.aval.dtype


def _is_divided_wrongly(jaxpr: Jaxpr) -> bool:
    return any(undivided_axes(one) or _has_unsigned_indices(one) or _is_wrong_within(one) for one in jaxpr.eqns)


def _is_wrong_within(equation: JaxprEqn) -> bool:
    """Return whether the body of a loop, branch or call needs constraints; that of a ``shard_map`` is divided already."""
    is_shared = equation.primitive.name != "shard_map"
    return is_shared and any(map(_is_divided_wrongly, jaxprs_in_params(equation.params)))


def _evaluate(closed: ClosedJaxpr, arguments: Sequence[Any], mesh: Mesh) -> list[Any]:
    """Evaluate a jaxpr with the constraints."""

    def handle(equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any] | None:
        if axes := undivided_axes(equation):
            whole = [_constrained(value, axes, mesh) for value in inputs]
            outputs = run_equation(closed.jaxpr, equation, whole)
            return [_constrained(value, axes, mesh) for value in outputs]
        if _has_unsigned_indices(equation):
            operand, indices, *others = inputs
            return run_equation(closed.jaxpr, equation, [operand, indices.astype("int32"), *others])
        if _is_wrong_within(equation):
            params = {name: _with_constraints(value, mesh) for name, value in equation.params.items()}
            return run_equation(closed.jaxpr, equation.replace(params=params), inputs)
        return None

    return evaluate(closed, arguments, handle)


def _constrained(value: Any, axes: tuple[int, ...], mesh: Mesh) -> Any:
    if np.ndim(value) <= max(axes):  # the start of a slice, or the first value of a window
        return value
    spec = [None if axis in axes else PartitionSpec.UNCONSTRAINED for axis in range(np.ndim(value))]
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec(*spec)))


def _with_constraints(value: Any, mesh: Mesh) -> Any:
    """Return a parameter of an equation with the constraints in the jaxprs within it."""
    if isinstance(value, tuple):
        return tuple(_with_constraints(one, mesh) for one in value)
    if isinstance(value, Jaxpr):
        return _with_constraints(ClosedJaxpr(value, []), mesh).jaxpr
    if not isinstance(value, ClosedJaxpr):
        return value
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, weak_type=x.aval.weak_type) for x in value.jaxpr.invars]
    return jax.make_jaxpr(lambda *values: _evaluate(value, values, mesh))(*shapes)
