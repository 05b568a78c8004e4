"""Jaxpr utilities: evaluate a jaxpr with replaced equations, extract a subprogram, inline calls that contain a primitive, count
operations, and name the line of the user's program that an operation comes from.
"""

import math
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
        inputs = [read(atom) for atom in equation.invars]
        outputs = handler(equation, inputs)
        if outputs is None:
            outputs = run_equation(closed.jaxpr, equation, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def run_equation(jaxpr: Jaxpr, equation: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the outputs of one equation of ``jaxpr`` for these inputs; those that are literals in it stay as they are."""
    pairs = zip(equation.invars, inputs, strict=True)
    values = {atom: value for atom, value in pairs if not isinstance(atom, Literal)}
    return subprogram(jaxpr, [equation], list(values), equation.outvars)(*values.values())


def subprogram(
    jaxpr: Jaxpr, equations: list[JaxprEqn], inputs: list[Var], outputs: Sequence[Var]
) -> Callable[..., Any]:
    """Return some equations of ``jaxpr`` as a function."""
    own = jaxpr.replace(constvars=[], invars=inputs, outvars=list(outputs), eqns=equations)
    return jaxpr_as_fun(ClosedJaxpr(own, []))


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


def constants_within(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arrays, and other values with axes, that the jaxprs in an equation's parameters hold: their text does not tell them."""
    for value in jax.tree.leaves(list(params.values())):
        if isinstance(value, ClosedJaxpr):
            yield from value.consts
        if hasattr(value, "callback_func"):  # of jax.pure_callback: an object's text need not tell what it computes
            yield value.callback_func
        for jaxpr in jaxprs_in_params({"": value}):
            atoms = [*jaxpr.outvars, *(atom for equation in jaxpr.eqns for atom in equation.invars)]
            yield from (atom.val for atom in atoms if isinstance(atom, Literal) and np.ndim(atom.val))
            for equation in jaxpr.eqns:
                yield from constants_within(equation.params)


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


_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")})
_OWN = os.path.dirname(os.path.dirname(__file__))
_TRANSFORMATIONS = ("vmap", "jvp", "transpose", "checkpoint", "rematted_computation")


def source_location(equation: JaxprEqn) -> tuple[str, str]:
    """Return the layer and the line of the user's program that an operation comes from; empty if unknown."""
    info = equation.source_info
    names = [name for name in re.findall(r"[^/()]+", str(info.name_stack)) if name not in _TRANSFORMATIONS]
    frames: Sequence[Any] = info.traceback.frames if info.traceback is not None else ()
    users = (frame for frame in frames if not frame.file_name.startswith((*_INSTALLED, _OWN, "<frozen")))
    line = next((f"{os.path.basename(frame.file_name)}:{frame.line_num}" for frame in users), "")
    return "/".join(names), line
