"""A deterministic step as several programs: trace it once, cut the jaxpr at isolated calls, compile each part for one device.

XLA compiles each part between two isolated calls on its own, for one device, and every device runs it on the same inputs; an
:class:`IsolatedCall` runs by its own method. The step, Keras's or a user's, needs no changes.

If a call leaves its rows with the replicas, equations that work along the rows run there, too (``deterministic_rows.py``), and the others
run as late as their results allow, so that there are few parts.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.interpreters import ad, batching

from lockstep._errors import ModelError
from lockstep.devices.batch_layout import BatchLayout
from lockstep.devices.placement import PlacedRows, Placement, is_rows
from lockstep.execution.deterministic_rows import ReplicaRows, RowwiseEquations, RowwiseProgram, join_rows
from lockstep.execution.jaxpr_utils import (
    inline_all_calls,
    inline_calls,
    inputs_of,
    live_equations,
    subprogram,
    variables_in,
)
from lockstep.execution.spmd import PerDevice, PerDeviceProgram, to_per_device


class IsolatedCall(Protocol):
    """A part of a step that runs by itself instead of being compiled with the rest.

    Attributes:
        outputs: shapes of the outputs.
        layout: of the rows that it reads.
        row_inputs: positions of the values of which it reads rows.
        kept_rows: number of the outputs, the first ones, that are :class:`ReplicaRows`.
    """

    outputs: list[jax.ShapeDtypeStruct]
    layout: BatchLayout
    row_inputs: frozenset[int]
    kept_rows: int

    def run(self, values: list[Any]) -> list[Any]:
        """Return the outputs, on the devices, from arrays that every device holds, or from rows of its layout where these are."""


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
        "own. Fix: call the model itself in train_step instead of its stateless_call, which runs it on the global batch, or leave "
        "deterministic=True out."
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
        layout = next((call.layout for _, call in _isolated_calls(closed.jaxpr) if call.kept_rows), None)
        rowwise = None
        if layout is not None and not _is_ordered(closed.jaxpr):
            closed = inline_all_calls(closed)
            rowwise = _rowwise_equations(closed.jaxpr, layout, leaves, placement)
        self._inputs, self._results, self._placement = closed.jaxpr.invars, closed.jaxpr.outvars, placement
        self._structure = jax.tree.structure(results)
        self._constants = dict(zip(closed.jaxpr.constvars, placement.put(closed.consts), strict=True))
        self._parts = _partition(closed.jaxpr, set(self._inputs[:donated]), placement, rowwise)
        self._join = jax.jit(PlacedRows.global_batch, out_shardings=placement.replicated)

    def __call__(self, leaves: list[Any]) -> Any:
        values = self._constants | dict(zip(self._inputs, leaves, strict=True))
        for part in self._parts:
            self._join_rows(values, part.reads_joined(values))
            inputs = [atom.val if isinstance(atom, Literal) else values[atom] for atom in part.inputs]
            donated = [inputs[position] for position in part.donated]
            for var in part.last_used:
                del values[var]
            values.update(zip(part.outputs, part.run(inputs), strict=True))
            for array in donated:
                if isinstance(array, jax.Array):
                    array.delete()  # Its shards were donated one by one; this marks the whole array as deleted.
        return jax.tree.unflatten(self._structure, self._collect_results(values))

    def _join_rows(self, values: dict[Var, Any], variables: Iterable[Var]) -> None:
        """Replace the values of variables that are rows by joined ones."""
        by_layout: dict[BatchLayout, list[Var]] = defaultdict(list)
        for var in dict.fromkeys(variables):
            if isinstance(values[var], ReplicaRows):
                by_layout[values[var].layout].append(var)
            elif is_rows(values[var]):
                values[var] = self._join(values[var])
        for own in by_layout.values():
            values.update(zip(own, join_rows([values[var] for var in own], self._placement), strict=True))

    def _collect_results(self, values: dict[Var, Any]) -> list[Any]:
        """Return the results, each with memory of its own, because the next step may donate its state."""
        found = []
        returned: set[Any] = set(self._constants)
        self._join_rows(values, variables_in(self._results))
        for atom in self._results:
            if isinstance(atom, Literal):
                found.append(self._placement.put(atom.val))
                continue
            value = values[atom]
            if atom in returned:
                value = PerDevice(map(_copy, value)) if isinstance(value, PerDevice) else _copy(value)
            found.append(value)
            returned.add(atom)
        return found


class ProgramPart:
    """A part of a step.

    Args:
        run: returns the outputs from the inputs.
        inputs: variables, and literals of an isolated call.
        outputs: variables.
        live: variables that are read after it.
        layouts: by position of the input layouts of rows that it reads where they are; it reads all others joined.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], list[Any]],
        inputs: Sequence[Any],
        outputs: Sequence[Var],
        live: set[Var],
        layouts: Mapping[int, BatchLayout] | None = None,
    ) -> None:
        self.run, self.inputs, self.outputs, self.layouts = run, inputs, outputs, layouts or {}
        self.last_used = set(variables_in(inputs)) - live
        self.donated: tuple[int, ...] = ()  # positions of the inputs whose memory the outputs reuse

    def reads_joined(self, values: Mapping[Var, Any]) -> list[Var]:
        """Return the variables among the inputs that are rows, and that it does not read where these are."""
        return [
            atom
            for position, atom in enumerate(self.inputs)
            if not isinstance(atom, Literal) and _layout_of(values[atom]) not in (None, self.layouts.get(position))
        ]


def _compiled_part(
    jaxpr: Jaxpr, equations: list[JaxprEqn], live: set[Var], donated: set[Var], placement: Placement
) -> ProgramPart:
    """Return the part of equations that are no isolated call; ``donated`` inputs may be donated to it."""
    inputs = inputs_of(equations)
    outputs = [var for one in equations for var in one.outvars if var in live]
    part = ProgramPart(lambda values: program(*(to_per_device(v, placement) for v in values)), inputs, outputs, live)
    part.donated = _matching_donations(part, donated)
    program = PerDeviceProgram(subprogram(jaxpr, equations, inputs, outputs), placement, part.donated)
    return part


def _matching_donations(part: ProgramPart, donated: set[Var]) -> tuple[int, ...]:
    """Return the inputs whose memory fits an output; JAX would warn about others."""
    room = Counter(str(var.aval) for var in part.outputs)
    chosen = []
    for position, var in enumerate(part.inputs):
        of_type = str(var.aval)
        if var in donated and var in part.last_used and room[of_type]:
            room[of_type] -= 1
            chosen.append(position)
    return tuple(chosen)


def _partition(
    jaxpr: Jaxpr, donated: set[Var], placement: Placement, rowwise: RowwiseEquations | None
) -> list[ProgramPart]:
    live = set(variables_in(jaxpr.outvars))
    equations, _ = live_equations(jaxpr.eqns, jaxpr.outvars)
    parts = []
    for group in reversed(Schedule(jaxpr, equations, rowwise).groups() if rowwise else [*_in_order(equations)]):
        if isinstance(group, JaxprEqn):
            call = _call_of(group.params["call"])
            layouts = dict.fromkeys(call.row_inputs, call.layout)
            part = ProgramPart(call.run, group.invars, group.outvars, live, layouts)
        elif isinstance(group, RowwiseProgram):
            part = ProgramPart(group.run, group.inputs, group.outputs, live, group.layouts)
        else:
            part = _compiled_part(jaxpr, group, live, donated, placement)
        live = live.union(variables_in(part.inputs))
        parts.append(part)
    return parts[::-1]


# What becomes one part: an isolated call, equations that are compiled together, or those that work along the rows.
Group = JaxprEqn | list[JaxprEqn] | RowwiseProgram


def _in_order(equations: Iterable[JaxprEqn]) -> Iterator[Group]:
    together: list[JaxprEqn] = []
    for equation in equations:
        if equation.primitive is not _isolated_p:
            together.append(equation)
            continue
        if together:
            yield together
        together = []
        yield equation
    if together:
        yield together


class Schedule:
    """The order of the parts of a step in which some equations work along the rows.

    A value has a stage: that of the part that computes it. Parts that read it have later ones, but for equations that are compiled
    together, or along the rows of one stage. An equation that works along the rows is computed in each part that needs it, unless another
    part has read its result.
    """

    def __init__(self, jaxpr: Jaxpr, equations: list[JaxprEqn], rowwise: RowwiseEquations) -> None:
        self._rowwise = rowwise
        self._equations = [one for one in equations if not rowwise.includes(one)]
        self._results = variables_in(jaxpr.outvars)
        self._stages: dict[Var, tuple[int, bool]] = {}  # of each computed value, and whether it is compiled with others
        self._along_rows: dict[Var, int] = {}  # stages of the values that are computed along the rows for another part
        self._earliest: dict[int, int] = {}  # stages by equation

    def groups(self) -> list[Group]:
        """Return the groups in their order."""
        for equation in self._equations:
            self._set_earliest(equation)
        for var in self._results:
            self._request(var)
        by_stage: dict[int, list[Group]] = defaultdict(list)
        for stage, equations in self._latest().items():
            by_stage[stage].append(equations)
        for equation in self._equations:
            if equation.primitive is _isolated_p:
                by_stage[self._earliest[id(equation)]].append(equation)
        rows: dict[int, list[Var]] = defaultdict(list)
        for var, stage in self._along_rows.items():
            rows[stage].append(var)
        for stage, variables in rows.items():
            by_stage[stage].append(self._rowwise.program(variables, self._before(stage)))
        return [group for stage in sorted(by_stage) for group in by_stage[stage]]

    def _is_request(self, var: Var, of_rows: bool = False) -> bool:
        """Return whether a part that reads this value, or its rows, reads the result of a part that works along the rows."""
        return self._rowwise.computes(var) and (of_rows or var in self._rowwise.depends_on_rows)

    def _before(self, stage: int) -> set[Var]:
        """Return the values that are computed along the rows in earlier stages."""
        return {var for var, own in self._along_rows.items() if own < stage}

    def _sources(self, var: Var, known: Container[Var] = ()) -> list[Var]:
        """Return what is read to compute a value along the rows, if those known are not computed."""
        return self._rowwise.behind([var], known)[1]

    def _after(self, var: Var, is_compiled: bool) -> int:
        """Return the first stage of a part that reads a value which no equation along the rows computes."""
        stage, with_others = self._stages.get(var, (-1, False))
        return stage if is_compiled and with_others else stage + 1

    def _request(self, var: Var, by_isolated: bool = False, of_rows: bool = False) -> int:
        """Return the first stage after a value; one that is computed along the rows is computed for other parts from now on."""
        if not self._is_request(var, of_rows):
            return max((self._after(source, not by_isolated) for source in self._sources(var)), default=0)
        if var not in self._along_rows:
            sources = self._sources(var, self._along_rows)
            stages = [self._along_rows[x] if x in self._along_rows else self._after(x, False) for x in sources]
            stage = max(stages, default=0)
            for copy in self._rowwise.copies_of(var):
                self._along_rows.setdefault(copy, stage)
        return self._along_rows[var] + 1

    def _set_earliest(self, equation: JaxprEqn) -> None:
        is_isolated = equation.primitive is _isolated_p
        rows = _call_of(equation.params["call"]).row_inputs if is_isolated else ()
        stages = [
            self._request(atom, is_isolated, position in rows)
            for position, atom in enumerate(equation.invars)
            if not isinstance(atom, Literal)
        ]
        stage = max(stages, default=0)
        self._earliest[id(equation)] = stage
        self._stages.update(dict.fromkeys(equation.outvars, (stage, not is_isolated)))

    def _latest(self) -> dict[int, list[JaxprEqn]]:
        """Return by stage the equations that are compiled together, each as late as its results allow, or with all of an earlier stage."""
        last = 1 + max((stage for stage, _ in self._stages.values()), default=0)
        limits: dict[Var, int] = dict.fromkeys(self._results, last)
        for var, stage in self._along_rows.items():
            self._limit(limits, self._sources(var, self._before(stage)), stage - 1)
        found: dict[int, list[JaxprEqn]] = defaultdict(list)
        for equation in reversed(self._equations):
            if equation.primitive is _isolated_p:
                self._limit(limits, variables_in(equation.invars), self._earliest[id(equation)] - 1)
                continue
            stage = min((limits.get(var, last) for var in equation.outvars), default=last)
            found[stage].append(equation)
            for var in variables_in(equation.invars):
                if not self._is_request(var):
                    self._limit(limits, self._sources(var), stage)
        for stage, before in pairwise(sorted(found, reverse=True)):
            if all(self._earliest[id(one)] <= before for one in found[stage]):
                found[before] += found.pop(stage)
        return {stage: self._with_rowwise(equations) for stage, equations in found.items()}

    @staticmethod
    def _limit(limits: dict[Var, int], variables: Iterable[Var], stage: int) -> None:
        for var in variables:
            limits[var] = min(limits.get(var, stage), stage)

    def _with_rowwise(self, equations: list[JaxprEqn]) -> list[JaxprEqn]:
        """Return equations with those along the rows that compute what they read, of the whole batch."""
        read = [var for one in equations for var in variables_in(one.invars) if not self._is_request(var)]
        return self._rowwise.in_order([*self._rowwise.behind(read)[0], *equations])


def _copy(value: jax.Array | None) -> jax.Array | None:
    return None if value is None else jax.numpy.copy(value)


def _rowwise_equations(
    jaxpr: Jaxpr, layout: BatchLayout, leaves: Sequence[Any], placement: Placement
) -> RowwiseEquations:
    rows = [var for var, leaf in zip(jaxpr.invars, leaves, strict=True) if _layout_of(leaf) == layout]
    whole = variables_in(jaxpr.outvars)
    for equation, call in _isolated_calls(jaxpr):
        rows += equation.outvars[: call.kept_rows] if call.layout == layout else []
        whole += [
            atom
            for position, atom in enumerate(equation.invars)
            if position not in call.row_inputs and not isinstance(atom, Literal)
        ]
    return RowwiseEquations(jaxpr, layout, placement, rows, whole)


def _is_ordered(jaxpr: Jaxpr) -> bool:
    """Return whether a step has side effects whose order the user has asked for: then the equations stay in their order."""
    return any("Ordered" in type(effect).__name__ for effect in jaxpr.effects)


def _isolated_calls(jaxpr: Jaxpr) -> list[tuple[JaxprEqn, IsolatedCall]]:
    return [(one, _call_of(one.params["call"])) for one in jaxpr.eqns if one.primitive is _isolated_p]


def _layout_of(value: Any) -> BatchLayout | None:
    """Return the layout of rows that are where they are; None if a value is something else."""
    return value.layout if isinstance(value, (PlacedRows, ReplicaRows)) else None


def _leaf_type(leaf: Any) -> Any:
    """Return what a step is traced for. It is the same for an array on all devices and for the copies that a step leaves."""
    return _global_shape(leaf), leaf.layout if is_rows(leaf) else None


def _global_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    if is_rows(leaf):
        return jax.ShapeDtypeStruct((leaf.layout.rows, *leaf.array.shape[1:]), leaf.array.dtype)
    of_type = jax.typeof(leaf.own if isinstance(leaf, PerDevice) else leaf)
    return jax.ShapeDtypeStruct(of_type.shape, of_type.dtype, weak_type=of_type.weak_type)
