"""A deterministic step as several programs: trace it once, cut the jaxpr at isolated calls, compile each part for one device.

XLA compiles each part between two isolated calls on its own, for one device, and every device runs it on the same inputs; an
:class:`IsolatedCall` runs by its own method. The step, Keras's or a user's, needs no changes.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.interpreters import ad, batching

from lockstep._errors import ModelError
from lockstep.devices.placement import PlacedRows, Placement, global_batch, is_rows
from lockstep.execution.jaxpr_utils import inline_calls, subprogram
from lockstep.execution.spmd import PerDevice, PerDeviceProgram, to_per_device


class IsolatedCall(Protocol):
    """A part of a step that runs by itself instead of being compiled with the rest."""

    outputs: list[jax.ShapeDtypeStruct]

    def run(self, values: list[Any]) -> list[Any]:
        """Return the outputs, on the devices, from arrays that every device holds or from :class:`PlacedRows`."""


_isolated_p = Primitive("lockstep_isolated")
_isolated_p.multiple_results = True


_isolated_p.def_abstract_eval(
    lambda *_, call: [ShapedArray(output.shape, output.dtype) for output in _call_of(call).outputs]
)


def _as_jaxpr(call: IsolatedCall) -> ClosedJaxpr:
    """Return a jaxpr whose only constant is the call: JAX's caches keep jaxprs weakly, and other parameters as long as the process lives."""
    empty = jax.make_jaxpr(lambda _: ())(jax.ShapeDtypeStruct((), "float32")).jaxpr
    return ClosedJaxpr(empty.replace(constvars=empty.invars, invars=[]), [call])


def _call_of(jaxpr: ClosedJaxpr) -> IsolatedCall:
    (call,) = jaxpr.consts
    return call


def _refuse(what: str, *_: Any, **__: Any) -> Any:
    raise ModelError(
        f"With deterministic=True a model's forward pass cannot be {what}, because each replica runs as a program of its "
        "own. Fix: call the model directly in train_step, once for each derivative, or leave deterministic=True out."
    )


ad.primitive_jvps[_isolated_p] = partial(_refuse, "differentiated twice or in forward mode")
batching.primitive_batchers[_isolated_p] = partial(_refuse, "called under jax.vmap")


def bind_isolated(call: IsolatedCall, values: Sequence[Any]) -> list[Any]:
    """Insert ``call`` on ``values`` into the step that is being traced for :class:`ProgramPartition`."""
    return _isolated_p.bind(*values, call=_as_jaxpr(call))


class ProgramPartition:
    """Runs a step part by part; it is traced again for batches of other shapes.

    While ``step``, ``(state, batch) -> results``, is traced, a leaf of the batch that is :class:`PlacedRows` holds its joined array. If
    ``donated``, the results may reuse the memory of the state.
    """

    def __init__(self, step: Callable[[Any, Any], Any], placement: Placement, *, donated: bool) -> None:
        self._step, self._placement, self._donated = step, placement, donated
        self._partitioned: dict[Any, _PartitionedStep] = {}

    def __call__(self, state: Any, batch: Any) -> Any:
        """Return the step's results. Values of the state may be arrays or :class:`PerDevice`, and so are the results."""
        leaves, structure = jax.tree.flatten((state, batch), is_leaf=lambda x: isinstance(x, PerDevice) or is_rows(x))
        key = structure, *(_leaf_type(leaf) for leaf in leaves)
        if key not in self._partitioned:
            count = len(jax.tree.leaves(state)) if self._donated else 0
            self._partitioned[key] = _PartitionedStep(self._step, leaves, structure, count, self._placement)
        return self._partitioned[key](leaves)


class _PartitionedStep:
    """The parts of a step for batches of some shapes; the first ``donated`` leaves may be donated."""

    def __init__(
        self, step: Callable[..., Any], leaves: list[Any], structure: Any, donated: int, placement: Placement
    ) -> None:
        def flat(*values: Any) -> Any:
            own = [PlacedRows(v, leaf.layout) if is_rows(leaf) else v for v, leaf in zip(values, leaves, strict=True)]
            return step(*jax.tree.unflatten(structure, own))

        closed, results = jax.make_jaxpr(flat, return_shape=True)(*map(_global_shape, leaves))
        closed = inline_calls(closed, _isolated_p, lambda where: _refuse(f"called {where}"))
        self._inputs, self._results, self._placement = closed.jaxpr.invars, closed.jaxpr.outvars, placement
        self._structure = jax.tree.structure(results)
        self._constants = dict(zip(closed.jaxpr.constvars, placement.put(closed.consts), strict=True))
        self._parts = _partition(closed.jaxpr, set(self._inputs[:donated]), placement)
        self._join = jax.jit(global_batch, out_shardings=placement.replicated)

    def __call__(self, leaves: list[Any]) -> Any:
        values = self._constants | dict(zip(self._inputs, leaves, strict=True))
        for part in self._parts:
            inputs = [atom.val if isinstance(atom, Literal) else self._read(values, atom, part) for atom in part.inputs]
            donated = [inputs[position] for position in part.donated]
            for var in part.last_used:
                del values[var]
            values.update(zip(part.outputs, part.run(inputs), strict=True))
            for array in donated:
                if isinstance(array, jax.Array):
                    array.delete()  # Its shards were donated one by one; this marks the whole array as deleted.
        return jax.tree.unflatten(self._structure, self._collect_results(values))

    def _read(self, values: dict[Var, Any], atom: Var, part: "ProgramPart") -> Any:
        """Return a value; rows are joined first, except for isolated calls."""
        if is_rows(values[atom]) and not part.is_isolated:
            values[atom] = self._join(values[atom])
        return values[atom]

    def _collect_results(self, values: dict[Var, Any]) -> list[Any]:
        """Return the results, each with memory of its own, because the next step may donate its state."""
        found = []
        returned: set[Any] = set(self._constants)
        for atom in self._results:
            if isinstance(atom, Literal):
                found.append(self._placement.put(atom.val))
                continue
            value = self._join(values[atom]) if is_rows(values[atom]) else values[atom]
            if atom in returned:
                value = PerDevice(map(_copy, value)) if isinstance(value, PerDevice) else _copy(value)
            found.append(value)
            returned.add(atom)
        return found


class ProgramPart:
    """Consecutive equations: one isolated call, or others that are compiled to one program."""

    def __init__(self, equations: list[JaxprEqn], live: set[Var]) -> None:
        self.equations = equations
        defined = {var for equation in equations for var in equation.outvars}
        used = [
            atom
            for equation in equations
            for atom in equation.invars
            if isinstance(atom, Literal) or atom not in defined
        ]
        self.is_isolated = equations[0].primitive is _isolated_p
        self.inputs: list[Any] = (
            used if self.is_isolated else list(dict.fromkeys(x for x in used if not isinstance(x, Literal)))
        )
        outputs = [var for equation in equations for var in equation.outvars]
        self.outputs: list[Var] = outputs if self.is_isolated else [var for var in outputs if var in live]
        self.last_used = {x for x in self.inputs if not isinstance(x, Literal) and x not in live}
        self.donated: tuple[int, ...] = ()  # positions of the inputs whose memory the outputs reuse
        self.run: Callable[[list[Any]], list[Any]]
        if self.is_isolated:
            self.run = _call_of(equations[0].params["call"]).run

    def compile(self, jaxpr: Jaxpr, donated: set[Var], placement: Placement) -> None:
        """Make the program of equations that are no isolated call; ``donated`` inputs may be donated to it."""
        function = subprogram(jaxpr, self.equations, self.inputs, self.outputs)
        self.donated = self._matching_donations(donated)
        program = PerDeviceProgram(function, placement, self.donated)
        self.run = lambda values: program(*(to_per_device(value, placement) for value in values))

    def _matching_donations(self, donated: set[Var]) -> tuple[int, ...]:
        """Return the inputs whose memory fits an output; JAX would warn about others."""
        room = Counter(str(var.aval) for var in self.outputs)
        chosen = []
        for position, var in enumerate(self.inputs):
            of_type = str(var.aval)
            if var in donated and var in self.last_used and room[of_type]:
                room[of_type] -= 1
                chosen.append(position)
        return tuple(chosen)


def _partition(jaxpr: Jaxpr, donated: set[Var], placement: Placement) -> list[ProgramPart]:
    results = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    live = set(results)
    groups: list[list[JaxprEqn]] = []
    for equation in reversed(jaxpr.eqns):
        if not equation.effects and live.isdisjoint(equation.outvars):
            continue  # dead code
        live.update(atom for atom in equation.invars if not isinstance(atom, Literal))
        if not groups or _isolated_p in (equation.primitive, groups[-1][-1].primitive):
            groups.append([])
        groups[-1].append(equation)
    parts, live = [], results
    for group in groups:
        part = ProgramPart(group[::-1], live)
        if not part.is_isolated:
            part.compile(jaxpr, donated, placement)
        live = live | {atom for atom in part.inputs if not isinstance(atom, Literal)}
        parts.append(part)
    return parts[::-1]


def _copy(value: jax.Array | None) -> jax.Array | None:
    return None if value is None else jax.numpy.copy(value)


def _leaf_type(leaf: Any) -> Any:
    """Return what a step is traced for. It is the same for an array on all devices and for the copies that a step leaves."""
    return _global_shape(leaf), leaf.layout if is_rows(leaf) else None


def _global_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    if is_rows(leaf):
        return jax.ShapeDtypeStruct((leaf.layout.rows, *leaf.array.shape[1:]), leaf.array.dtype)
    of_type = jax.typeof(leaf.own if isinstance(leaf, PerDevice) else leaf)
    return jax.ShapeDtypeStruct(of_type.shape, of_type.dtype, weak_type=of_type.weak_type)
