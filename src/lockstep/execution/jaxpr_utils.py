"""Jaxpr utilities: evaluate with replaced equations, extract a subprogram, inline calls, name the user's line of an operation."""

import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxpr_as_fun, jaxprs_in_params
from jax.extend.core.primitives import closed_call_p, jit_p, remat_p

# Returns the outputs of an equation, or None to evaluate it.
EquationHandler = Callable[[JaxprEqn, list[Any]], Sequence[Any] | None]

_PLAIN_CALLS = (jit_p.name, closed_call_p.name)  # From JAX 0.12 on the latter is "eval_jaxpr".
CALLS = (*_PLAIN_CALLS, remat_p.name)
CUSTOM_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call")
_COMPOSED = ("CheckpointName", "Einsum", "Frexp", "Ldexp", "Nonzero", "SearchSorted")


def called_jaxpr(equation: JaxprEqn) -> Any:
    """Return the jaxpr that a call, or a function with a custom derivative, evaluates, closed or not; None if there is none."""
    names = ("call_jaxpr", "jaxpr")
    return next((equation.params[name] for name in names if name in equation.params), None)


def scan_operands(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried values of a ``scan``, which are its first operands, in this order."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()  # from JAX 0.12 on
    return len(constants), len(carried)


def expanded(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Return the operations of one of JAX's primitives that is composed of others, from JAX 0.12 on; None for any other."""
    primitive: Any = equation.params.get("_prim")
    # Others hold functions of the user, who may give them a derivative.
    if type(primitive).__name__ not in _COMPOSED or not type(primitive).__module__.startswith("jax."):
        return None
    return jax.make_jaxpr(primitive.expand)(*(atom.aval for atom in equation.invars))


def evaluate(closed: ClosedJaxpr, arguments: Sequence[Any], handler: EquationHandler) -> list[Any]:
    """Evaluate a jaxpr equation by equation; ``handler`` is called before each, and may return other outputs for it."""
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


def variables_in(atoms: Iterable[Any]) -> list[Var]:
    """Return what is no literal of the inputs or results of an equation or jaxpr."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def inputs_of(equations: Sequence[JaxprEqn]) -> list[Var]:
    """Return the variables that some equations read and do not compute."""
    computed = {var for equation in equations for var in equation.outvars}
    read = (var for equation in equations for var in variables_in(equation.invars))
    return list(dict.fromkeys(var for var in read if var not in computed))


def live_equations(equations: Sequence[JaxprEqn], outputs: Iterable[Any]) -> tuple[list[JaxprEqn], set[Var]]:
    """Return, in order, the equations that have effects or that ``outputs`` depend on, and all variables that are read."""
    used = set(variables_in(outputs))
    needed = []
    for equation in reversed(equations):
        if not (equation.effects or used.intersection(equation.outvars)):
            continue
        used.update(variables_in(equation.invars))
        needed.append(equation)
    return needed[::-1], used


def is_inexact(value: Any) -> bool:
    """Return whether a value has floating-point or complex numbers."""
    return jnp.issubdtype(jnp.result_type(value), jnp.inexact)


def inline_calls(closed: ClosedJaxpr, primitive: Primitive, refuse: Callable[[str], Any]) -> ClosedJaxpr:
    """Return the jaxpr with each call (jit, custom derivative) that contains ``primitive`` replaced by its body; if that is impossible,
    ``refuse`` raises an error, given for example "inside jax.lax.scan".
    """
    return _inlined(closed, lambda equation: _contains(equation, primitive), refuse)


def inline_all_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the jaxpr with each call (jit, custom derivative) replaced by its body; rematerialized functions stay as they are."""
    names = (*_PLAIN_CALLS, *CUSTOM_DERIVATIVES)
    return _inlined(closed, lambda equation: equation.primitive.name in names, lambda where: None)


def _inlined(closed: ClosedJaxpr, is_inlined: Callable[[JaxprEqn], bool], refuse: Callable[[str], Any]) -> ClosedJaxpr:
    if not any(map(is_inlined, closed.jaxpr.eqns)):
        return closed
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in closed.jaxpr.invars]

    def inlined(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
        return evaluate(_body(equation, refuse), inputs, inlined) if is_inlined(equation) else None

    return jax.make_jaxpr(lambda *values: evaluate(closed, values, inlined))(*shapes)


def _contains(equation: JaxprEqn, primitive: Primitive) -> bool:
    return any(
        inner.primitive is primitive for jaxpr in jaxprs_in_params(equation.params) for inner in equations_of(jaxpr)
    )


def equations_of(jaxpr: Jaxpr, without: Sequence[str] = ()) -> Iterator[JaxprEqn]:
    """Yield the equations of a jaxpr, and after each those of the jaxprs within it, but for those within operations of these names."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in without:
            for inner in jaxprs_in_params(equation.params):
                yield from equations_of(inner, without)


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
