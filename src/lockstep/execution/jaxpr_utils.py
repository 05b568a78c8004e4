"""Traces of JAX as programs to be taken apart: some equations as a function, and a run with others in their place."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

__all__ = ["EquationHandler", "evaluate", "is_literal", "subprogram"]

EquationHandler = Callable[
    [JaxprEqn, list[Any]], Sequence[Any] | None
]  # the outputs of an equation, or None: as it says


def evaluate(closed: ClosedJaxpr, arguments: Sequence[Any], instead: EquationHandler) -> list[Any]:
    """Run equation by equation.

    Args:
        closed: a trace.
        arguments: its inputs.
        instead: is asked before each equation.
    """
    values: dict[Var, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(closed.jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in closed.jaxpr.eqns:
        outputs = instead(equation, [read(atom) for atom in equation.invars])
        if outputs is None:
            inputs = list(dict.fromkeys(atom for atom in equation.invars if not is_literal(atom)))
            outputs = subprogram(closed.jaxpr, [equation], inputs, equation.outvars)(*map(read, inputs))
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def subprogram(
    jaxpr: Jaxpr, equations: list[JaxprEqn], inputs: list[Var], outputs: Sequence[Var]
) -> Callable[..., Any]:
    """Some equations of ``jaxpr`` as a function."""
    own = jaxpr.replace(constvars=[], invars=inputs, outvars=list(outputs), eqns=equations)
    return jaxpr_as_fun(ClosedJaxpr(own, []))


def is_literal(atom: Any) -> bool:
    """Whether an input of an equation is a number that stands in the trace."""
    return isinstance(atom, Literal)
