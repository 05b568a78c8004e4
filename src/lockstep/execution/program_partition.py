"""A step as a row of programs: it is traced once and cut wherever a part of it is marked to run apart.

XLA compiles each piece between two marks alone, for one device, and every device runs it on the same inputs; what is
marked runs as its own :class:`IsolatedCall` says. The step itself, Keras's or a user's, knows nothing of it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxprs_in_params
from jax.interpreters import ad, batching

from lockstep._errors import ModelError
from lockstep.data.device_placement import PlacedRows, Placement, join_rows
from lockstep.execution.jaxpr_utils import evaluate, is_literal, subprogram
from lockstep.execution.per_device import PerDevice, PerDeviceProgram, local, whole_array

__all__ = ["IsolatedCall", "ProgramPart", "ProgramPartition", "bind_isolated", "inline_marked"]


class IsolatedCall(Protocol):
    """A part of a step that is not compiled into it but run by itself."""

    outputs: list[jax.ShapeDtypeStruct]

    def run(self, values: list[Any]) -> list[Any]:
        """The outputs, on the devices, from arrays that every device holds or from :class:`PlacedRows`."""


_isolated_p = Primitive("lockstep_apart")
_isolated_p.multiple_results = True


_isolated_p.def_abstract_eval(lambda *_, work: [ShapedArray(output.shape, output.dtype) for output in work.outputs])


def _refuse(what: str, *_: Any, **__: Any) -> Any:
    raise ModelError(
        f"With deterministic=True a model's forward pass cannot be {what}, because each replica runs as a program of its "
        "own. Call the model directly in train_step, once for each derivative, or leave deterministic=True out."
    )


ad.primitive_jvps[_isolated_p] = partial(_refuse, "differentiated twice or in forward mode")
batching.primitive_batchers[_isolated_p] = partial(_refuse, "called under jax.vmap")


def bind_isolated(work: IsolatedCall, values: Sequence[Any]) -> list[Any]:
    """Mark ``work`` on ``values`` to run apart; used while a step is traced for :class:`ProgramPartition`."""
    return _isolated_p.bind(*values, work=work)


class ProgramPartition:
    """Runs a step by pieces, traced anew for each kind of batch.

    Args:
        step: ``(state, batch) -> results``. A leaf of the batch that is :class:`PlacedRows` holds its joined array while the
            step is traced.
        placement: the devices.
        donated: whether the memory of the state may be used for the results.
    """

    def __init__(self, step: Callable[[Any, Any], Any], placement: Placement, *, donated: bool) -> None:
        self._step, self._placement, self._donated = step, placement, donated
        self._known: dict[Any, _Traced] = {}

    def __call__(self, state: Any, batch: Any) -> Any:
        """The step's results."""
        leaves, structure = jax.tree.flatten((state, batch), is_leaf=_is_rows)
        key = structure, *(_kind(leaf) for leaf in leaves)
        if key not in self._known:
            count = len(jax.tree.leaves(state)) if self._donated else 0
            self._known[key] = _Traced(self._step, leaves, structure, count, self._placement)
        return self._known[key](leaves)


class _Traced:
    """The pieces of a step for one kind of batch; the first ``donated`` leaves may be used up."""

    def __init__(
        self, step: Callable[..., Any], leaves: list[Any], structure: Any, donated: int, on: Placement
    ) -> None:
        def flat(*values: Any) -> Any:
            own = [PlacedRows(v, leaf.layout) if _is_rows(leaf) else v for v, leaf in zip(values, leaves, strict=True)]
            return step(*jax.tree.unflatten(structure, own))

        closed, results = jax.make_jaxpr(flat, return_shape=True)(*map(_global_shape, leaves))
        closed = inline_marked(closed, _isolated_p, lambda where: _refuse(f"called {where}"))
        self._inputs, self._results, self._on = closed.jaxpr.invars, closed.jaxpr.outvars, on
        self._structure = jax.tree.structure(results)
        self._constants = dict(zip(closed.jaxpr.constvars, on.put(closed.consts), strict=True))
        self._pieces = _cut(closed.jaxpr, set(self._inputs[:donated]), on)
        self._join = jax.jit(join_rows, out_shardings=on.replicated)

    def __call__(self, leaves: list[Any]) -> Any:
        values = self._constants | dict(zip(self._inputs, leaves, strict=True))
        for piece in self._pieces:
            inputs = [
                atom.val if isinstance(atom, Literal) else self._joined(values, atom, piece) for atom in piece.inputs
            ]
            given = [inputs[position] for position in piece.donated]
            for var in piece.last_used:
                del values[var]
            values.update(zip(piece.outputs, piece.run(inputs), strict=True))
            for array in given:
                if isinstance(array, jax.Array):
                    array.delete()  # Its parts were given away, one by one; now the array knows it too.
        return jax.tree.unflatten(self._structure, self._found(values))

    def _joined(self, values: dict[Var, Any], atom: Var, piece: "ProgramPart") -> Any:
        """A value; rows that lie on the devices are joined, but for what takes them as they lie."""
        if _is_rows(values[atom]) and not piece.is_apart:
            values[atom] = self._join(values[atom])
        return values[atom]

    def _found(self, values: dict[Var, Any]) -> list[Any]:
        """The results, each an array of its own: the next step may use up the memory of its state."""
        found = []
        handed_out: set[Any] = set(self._constants)
        for atom in self._results:
            if isinstance(atom, Literal):
                found.append(self._on.put(atom.val))
                continue
            value = self._join(values[atom]) if _is_rows(values[atom]) else values[atom]
            array = whole_array(value, self._on.replicated) if isinstance(value, PerDevice) else value
            found.append(jax.numpy.copy(array) if atom in handed_out else array)
            handed_out.add(atom)
        return found


class ProgramPart:
    """Some equations in a row: one marked to run apart, or others, which are one program."""

    def __init__(self, equations: list[JaxprEqn], live: set[Var]) -> None:
        self.equations = equations
        made = {var for equation in equations for var in equation.outvars}
        used = [atom for equation in equations for atom in equation.invars if is_literal(atom) or atom not in made]
        self.is_apart = equations[0].primitive is _isolated_p
        self.inputs: list[Any] = used if self.is_apart else list(dict.fromkeys(x for x in used if not is_literal(x)))
        outputs = [var for equation in equations for var in equation.outvars]
        self.outputs: list[Var] = outputs if self.is_apart else [var for var in outputs if var in live]
        self.last_used = {x for x in self.inputs if not is_literal(x) and x not in live}
        self.donated: tuple[int, ...] = ()  # positions of the inputs that the outputs take their memory from
        self.run: Callable[[list[Any]], list[Any]]
        if self.is_apart:
            self.run = equations[0].params["work"].run

    def compile(self, jaxpr: Jaxpr, donated: set[Var], on: Placement) -> None:
        """Make the program of equations that are not marked; ``donated`` inputs give their memory to outputs."""
        function = subprogram(jaxpr, self.equations, self.inputs, self.outputs)
        self.donated = self._usable(donated)
        program = PerDeviceProgram(function, on, self.donated)
        self.run = lambda values: program(*(local(value, on) for value in values))

    def _usable(self, donated: set[Var]) -> tuple[int, ...]:
        """The inputs whose memory fits an output; JAX warns of others."""
        room = Counter(str(var.aval) for var in self.outputs)
        chosen = []
        for position, var in enumerate(self.inputs):
            kind = str(var.aval)
            if var in donated and var in self.last_used and room[kind]:
                room[kind] -= 1
                chosen.append(position)
        return tuple(chosen)


def _cut(jaxpr: Jaxpr, donated: set[Var], on: Placement) -> list[ProgramPart]:
    results = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    live = set(results)
    groups: list[list[JaxprEqn]] = []
    for equation in reversed(jaxpr.eqns):
        if not equation.effects and live.isdisjoint(equation.outvars):
            continue  # Nobody needs it.
        live.update(atom for atom in equation.invars if not isinstance(atom, Literal))
        if not groups or _isolated_p in (equation.primitive, groups[-1][-1].primitive):
            groups.append([])
        groups[-1].append(equation)
    pieces, live = [], results
    for group in groups:
        piece = ProgramPart(group[::-1], live)
        if not piece.is_apart:
            piece.compile(jaxpr, donated, on)
        live = live | {atom for atom in piece.inputs if not is_literal(atom)}
        pieces.append(piece)
    return pieces[::-1]


# --- marks inside functions that were called: jit, custom derivatives -------------------------------------------------


def inline_marked(closed: ClosedJaxpr, mark: Primitive, refuse: Callable[[str], Any]) -> ClosedJaxpr:
    """The same trace with the calls opened that hide a mark.

    Args:
        closed: a trace.
        mark: the primitive that must not be hidden.
        refuse: raises an error, given "inside jax.lax.scan" for example.
    """
    if not any(_hides(equation, mark) for equation in closed.jaxpr.eqns):
        return closed
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in closed.jaxpr.invars]

    def opened(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
        return evaluate(_body(equation, refuse), inputs, opened) if _hides(equation, mark) else None

    return jax.make_jaxpr(lambda *values: evaluate(closed, values, opened))(*shapes)


def _hides(equation: JaxprEqn, mark: Primitive) -> bool:
    return any(
        inner.primitive is mark or _hides(inner, mark)
        for jaxpr in jaxprs_in_params(equation.params)
        for inner in jaxpr.eqns
    )


def _body(equation: JaxprEqn, refuse: Callable[[str], Any]) -> ClosedJaxpr:
    name = equation.primitive.name
    if name in ("scan", "while", "cond", "shard_map"):
        refuse(f"inside jax.lax.{name} or a loop that compiles to it")
    closed = next(value for value in equation.params.values() if isinstance(value, (Jaxpr, ClosedJaxpr)))
    return closed if isinstance(closed, ClosedJaxpr) else ClosedJaxpr(closed, [])


# --- leaves -----------------------------------------------------------------------------------------------------------


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, PlacedRows)


def _kind(leaf: Any) -> Any:
    return (jax.typeof(leaf.array), leaf.layout) if _is_rows(leaf) else jax.typeof(leaf)


def _global_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    if _is_rows(leaf):
        return jax.ShapeDtypeStruct((leaf.layout.rows, *leaf.array.shape[1:]), leaf.array.dtype)
    kind = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)
