"""Jaxpr utilities: evaluate a jaxpr with replaced equations, extract a subprogram, inline calls that contain a primitive, count operations,
and find those that XLA divides wrongly.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxpr_as_fun, jaxprs_in_params

# Returns the outputs of an equation, or None to evaluate it.
EquationHandler = Callable[[JaxprEqn, list[Any]], Sequence[Any] | None]


def evaluate(closed: ClosedJaxpr, arguments: Sequence[Any], handler: EquationHandler) -> list[Any]:
    """Evaluate a jaxpr equation by equation.

    Args:
        closed: the jaxpr.
        arguments: its inputs.
        handler: called before each equation; may return other outputs for it.
    """
    values: dict[Var, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(closed.jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in closed.jaxpr.eqns:
        outputs = handler(equation, [read(atom) for atom in equation.invars])
        if outputs is None:
            inputs = list(dict.fromkeys(atom for atom in equation.invars if not is_literal(atom)))
            outputs = subprogram(closed.jaxpr, [equation], inputs, equation.outvars)(*map(read, inputs))
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def subprogram(
    jaxpr: Jaxpr, equations: list[JaxprEqn], inputs: list[Var], outputs: Sequence[Var]
) -> Callable[..., Any]:
    """Return some equations of ``jaxpr`` as a function."""
    own = jaxpr.replace(constvars=[], invars=inputs, outvars=list(outputs), eqns=equations)
    return jaxpr_as_fun(ClosedJaxpr(own, []))


def is_literal(atom: Any) -> bool:
    """Return whether an input of an equation is a literal of the jaxpr."""
    return isinstance(atom, Literal)


def is_inexact(value: Any) -> bool:
    """Return whether a value has floating-point or complex numbers."""
    return jnp.issubdtype(jnp.result_type(value), jnp.inexact)


def inline_calls(closed: ClosedJaxpr, primitive: Primitive, refuse: Callable[[str], Any]) -> ClosedJaxpr:
    """Return the jaxpr with each call (jit, custom derivative) that contains ``primitive`` replaced by its body.

    Args:
        closed: the jaxpr.
        primitive: the primitive that must be at the top level.
        refuse: raises an error if that is impossible; gets, for example, "inside jax.lax.scan".
    """
    if not any(_contains(equation, primitive) for equation in closed.jaxpr.eqns):
        return closed
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in closed.jaxpr.invars]

    def inlined(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
        return evaluate(_body(equation, refuse), inputs, inlined) if _contains(equation, primitive) else None

    return jax.make_jaxpr(lambda *values: evaluate(closed, values, inlined))(*shapes)


def _contains(equation: JaxprEqn, primitive: Primitive) -> bool:
    return any(
        inner.primitive is primitive for jaxpr in jaxprs_in_params(equation.params) for inner in equations_of(jaxpr)
    )


def equations_of(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations of a jaxpr, and after each those of the jaxprs within it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations_of(inner)


def operations_of_products(jaxpr: Jaxpr, *, is_repeated: bool) -> float:
    """Return the floating-point operations of all matrix products and convolutions, where padding counts as numbers.

    Args:
        jaxpr: the program.
        is_repeated: whether the body of a loop counts as often as it runs, or as often as it is in the compiled program. The result is infinite
            if products are in a loop that ends at a condition.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in _OPERATIONS:
            arrays: list[Any] = [*equation.invars[:2], *equation.outvars]
            total += _OPERATIONS[name](params, *(array.aval.shape for array in arrays))
        elif name != "pallas_call":  # a custom kernel
            inner = [operations_of_products(one, is_repeated=is_repeated) for one in jaxprs_in_params(params)]
            found = max(inner, default=0.0) if name == "cond" else sum(inner)
            total += found * _repetitions(equation, is_repeated) if found else 0.0
    return total


def _of_dot(params: dict[str, Any], left: Sequence[int], right: Sequence[int], out: Sequence[int]) -> float:
    (contracted, _), _ = params["dimension_numbers"]
    return 2.0 * math.prod(out) * math.prod(left[axis] for axis in contracted)


def _of_convolution(params: dict[str, Any], left: Sequence[int], right: Sequence[int], out: Sequence[int]) -> float:
    _, *summed = params["dimension_numbers"].rhs_spec  # channels of the input, then the window
    return 2.0 * math.prod(out) * math.prod(right[axis] for axis in summed) / math.prod(params["lhs_dilation"])


_OPERATIONS = {"dot_general": _of_dot, "conv_general_dilated": _of_convolution}


def _repetitions(equation: JaxprEqn, is_repeated: bool) -> float:
    """Return how often the body of an equation runs; or how often it is in the program: a scan joins ``unroll`` rounds, and then the rest."""
    if equation.primitive.name == "while":
        return math.inf if is_repeated else 1
    if equation.primitive.name != "scan":
        return 1
    length, joined = equation.params["length"], equation.params["unroll"]
    if is_repeated or not 0 < joined < length:
        return int(length)
    return int(joined + length % joined)


def _body(equation: JaxprEqn, refuse: Callable[[str], Any]) -> ClosedJaxpr:
    name = equation.primitive.name
    if name in ("scan", "while", "cond", "shard_map"):
        refuse(f"inside jax.lax.{name} or a loop that compiles to it")
    closed = next(value for value in equation.params.values() if isinstance(value, (Jaxpr, ClosedJaxpr)))
    return closed if isinstance(closed, ClosedJaxpr) else ClosedJaxpr(closed, [])


# Operations that jaxlib 0.10.2 divides over devices with wrong gradients along some axes, or not at all: decision 66.
_WINDOWS = (
    "reduce_window",
    "reduce_window_max",
    "reduce_window_min",
    "select_and_scatter_add",
    "select_and_gather_add",
)
MISDIVIDED = frozenset({*_WINDOWS, "sort", "dynamic_slice", "dynamic_update_slice"})


def is_misdivided(equation: JaxprEqn, other: JaxprEqn | None) -> bool:
    """Return whether an operation must not be divided along an axis whose length differs in another trace.

    Args:
        equation: the operation.
        other: the same one in the other trace; None: any axis may differ.
    """
    name, params = equation.primitive.name, equation.params
    if name not in MISDIVIDED:
        return False
    shape = _shape_of(equation.invars[0])
    lengths = _shape_of(other.invars[0]) if other else (None,) * len(shape)
    if len(lengths) != len(shape):
        return True
    axes = [axis for axis, (length, its) in enumerate(zip(shape, lengths, strict=True)) if length != its]
    if name == "sort":
        return len(shape) > 1 and params["dimension"] in axes
    if name in _WINDOWS:
        return any(params["window_dimensions"][axis] > params["window_strides"][axis] for axis in axes)
    is_read = name == "dynamic_slice"
    part = params["slice_sizes"] if is_read else _shape_of(equation.invars[1])
    starts = equation.invars[1 if is_read else 2 :]
    return any(not _is_within(starts[axis], shape[axis] - part[axis]) for axis in axes if part[axis] < shape[axis])


def _is_within(start: Any, most: int) -> bool:
    """Return whether the start of a slice is a known number of at most ``most``, so that it is not clamped."""
    return is_literal(start) and 0 <= int(start.val) <= most


def _shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)
