"""Jaxpr utilities: evaluate a jaxpr with replaced equations, extract a subprogram, inline calls that contain a primitive."""

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


def _body(equation: JaxprEqn, refuse: Callable[[str], Any]) -> ClosedJaxpr:
    name = equation.primitive.name
    if name in ("scan", "while", "cond", "shard_map"):
        refuse(f"inside jax.lax.{name} or a loop that compiles to it")
    closed = next(value for value in equation.params.values() if isinstance(value, (Jaxpr, ClosedJaxpr)))
    return closed if isinstance(closed, ClosedJaxpr) else ClosedJaxpr(closed, [])
