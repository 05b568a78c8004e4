"""Zeros in a jaxpr: which of its results are zero, as derivatives are that a function leaves out or that follow from zeros only."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from lockstep.execution.jaxpr_utils import called_jaxpr

Sign = int | None  # 0: zero; 1 and -1: at least and at most zero, as a bound of ``clip`` is; None: unknown
_KEEP_SIGNS = frozenset(("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose"))
_OF_FIRST = frozenset(  # Zero if their first operand is.
    (
        *("abs", "asin", "asinh", "atan", "atanh", "cbrt", "ceil", "conj", "cummax", "cummin", "cumprod", "cumsum"),
        *("dynamic_slice", "erf", "erf_inv", "expm1", "floor", "imag", "log1p", "name", "neg", "real", "reduce_max"),
        *("reduce_min", "reduce_precision", "reduce_prod", "reduce_sum", "rev", "round", "sharding_constraint", "sign"),
        *("sin", "sinh", "slice", "sqrt", "square", "stop_gradient", "tan", "tanh"),
    )
)
_OF_ANY = frozenset(("and", "conv_general_dilated", "dot_general", "mul"))  # Zero if one operand is.
_OF_ALL = frozenset(("add", "add_any", "concatenate", "or", "pad", "sub"))


def are_zero(jaxpr: Jaxpr, given: Sequence[bool]) -> list[bool]:
    """Return which results are zero if the ``given`` inputs are; False if it is not known."""
    return [sign == 0 for sign in _signs(jaxpr, [0 if zero else None for zero in given])]


def _signs(jaxpr: Jaxpr, given: Sequence[Sign]) -> list[Sign]:
    signs: dict[Any, Sign] = dict(zip(jaxpr.invars, given, strict=True))

    def sign_of(atom: Any) -> Sign:
        if isinstance(atom, Literal):
            return _sign_of_number(np.asarray(atom.val))
        return 0 if atom.aval.dtype == jax.dtypes.float0 else signs.get(atom)

    for equation in jaxpr.eqns:
        found = _results(equation, list(map(sign_of, equation.invars)))
        signs.update(zip(equation.outvars, found, strict=True))
    return list(map(sign_of, jaxpr.outvars))


def _sign_of_number(value: np.ndarray) -> Sign:
    if not np.any(value):
        return 0
    return 1 if np.all(value >= 0) else -1 if np.all(value <= 0) else None


def _results(equation: JaxprEqn, given: list[Sign]) -> list[Sign]:
    name, count = equation.primitive.name, len(equation.outvars)
    if name in _RULES:
        return _RULES[name](equation, given)
    called = called_jaxpr(equation)
    if called is not None and name not in ("scan", "while", "pallas_call"):
        return _signs(called.jaxpr if isinstance(called, ClosedJaxpr) else called, given)
    if name in _KEEP_SIGNS:
        return given[:1]
    zeros = [sign == 0 for sign in given]
    is_zero = (name in _OF_FIRST and zeros[0]) or (name in _OF_ANY and any(zeros)) or (name in _OF_ALL and all(zeros))
    return [0 if is_zero else None] * count


def _quotient(equation: JaxprEqn, given: list[Sign]) -> list[Sign]:
    return [0 if given[0] == 0 != given[1] else None]  # 0 / 0 is NaN.


def _power(equation: JaxprEqn, given: list[Sign]) -> list[Sign]:
    return [0 if given[0] == 0 and equation.params["y"] > 0 else None]


def _selection(equation: JaxprEqn, given: list[Sign]) -> list[Sign]:
    return [0 if all(sign == 0 for sign in given[1:]) else None]


def _extremum(bound: int) -> Callable[[JaxprEqn, list[Sign]], list[Sign]]:
    """Return the rule of ``max`` (``bound`` -1) or ``min`` (1) of zero and a bound."""
    return lambda _, given: [0 if 0 in given and all(sign in (0, bound) for sign in given) else None]


def _clamped(equation: JaxprEqn, given: list[Sign]) -> list[Sign]:
    least, value, most = given
    return [0 if value == 0 and least in (0, -1) and most in (0, 1) else None]


def _branches(equation: JaxprEqn, given: list[Sign]) -> list[Sign]:
    found = [_signs(branch.jaxpr, given[1:]) for branch in equation.params["branches"]]
    return [0 if all(sign == 0 for sign in each) else None for each in zip(*found, strict=True)]


_RULES: dict[str, Callable[[JaxprEqn, list[Sign]], list[Sign]]] = {
    "clamp": _clamped,
    "cond": _branches,
    "div": _quotient,
    "integer_pow": _power,
    "max": _extremum(-1),
    "min": _extremum(1),
    "optimization_barrier": lambda _, given: given,
    "rem": _quotient,
    "select_n": _selection,
}
