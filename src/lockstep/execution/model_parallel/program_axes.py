"""Read the logical axes of a program from its jaxpr, through the calls, loops and branches in it."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from lockstep.execution.model_parallel.axis_rules import RULES, EquationLinks, broken
from lockstep.execution.model_parallel.logical_axes import ArrayNode, LogicalAxes


def read_program(program: ClosedJaxpr, ways: int) -> LogicalAxes:
    """Return the logical axes of a program.

    Args:
        program: the traced program.
        ways: number of shards.
    """
    axes = LogicalAxes(ways)
    axes.inputs = [axes.new(atom.aval) for atom in program.jaxpr.invars]
    axes.results = [array for array in _ProgramReader(axes).closed(program, axes.inputs) if array is not None]
    return axes


class _ProgramReader:
    """Reads jaxprs; each call of a jaxpr has its own arrays."""

    def __init__(self, axes: LogicalAxes) -> None:
        self._axes = axes

    def closed(self, closed: ClosedJaxpr | Jaxpr, given: Sequence[ArrayNode | None]) -> list[ArrayNode | None]:
        """Read a jaxpr on these inputs and return its results; None stands for a literal."""
        jaxpr = closed.jaxpr if isinstance(closed, ClosedJaxpr) else closed
        known: dict[Any, ArrayNode | None] = {atom: self._axes.new(atom.aval) for atom in jaxpr.constvars}
        known.update(zip(jaxpr.invars, given, strict=True))

        def read(atom: Any) -> ArrayNode | None:
            return None if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            self._axes.calls = (*self._axes.calls, equation)
            operands = [read(atom) for atom in equation.invars]
            known.update(zip(equation.outvars, self._equation(equation, operands), strict=True))
            self._axes.calls = self._axes.calls[:-1]
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: JaxprEqn, operands: list[ArrayNode | None]) -> list[ArrayNode | None]:
        name = equation.primitive.name
        if name in _CALLS:
            body = next(equation.params[key] for key in ("call_jaxpr", "fun_jaxpr", "jaxpr") if key in equation.params)
            return self.closed(body, operands)
        results = [self._axes.new(atom.aval) for atom in equation.outvars]
        if name in _BODIES:
            _BODIES[name](self, equation.params, operands, results)
        else:
            RULES.get(name, broken)(EquationLinks(self._axes, equation, operands, results))
        return list(results)

    def scan(self, params: dict[str, Any], operands: list[ArrayNode | None], results: list[ArrayNode]) -> None:
        """Read a loop along the first axis of its last operands."""
        constants, carried = params["num_consts"], params["num_carry"]
        before, slices = operands[constants : constants + carried], operands[constants + carried :]
        own = [self._axes.new(atom.aval) for atom in params["jaxpr"].jaxpr.invars[constants:]]
        for array, carry in zip(before, own, strict=False):
            self._link_all(array, carry)
        for array, entry in zip(slices, own[carried:], strict=True):
            self._link_entry(array, entry)
        outside, self._axes.repeats = self._axes.repeats, self._axes.repeats * params["length"]
        after = self.closed(params["jaxpr"], [*operands[:constants], *own])
        for array, carry, result in zip(after[:carried], own, results, strict=False):
            self._link_carry(array, carry, result)
        self._axes.repeats = outside
        for stacked, array in zip(results[carried:], after[carried:], strict=True):
            if array is not None:
                for axis in range(len(array.shape)):
                    self._axes.link(array, axis, stacked, axis + 1)

    def loop(self, params: dict[str, Any], operands: list[ArrayNode | None], results: list[ArrayNode]) -> None:
        """Read a loop of unknown length as one repetition."""
        of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
        begin = of_condition + of_body
        own = [self._axes.new(atom.aval) for atom in params["body_jaxpr"].jaxpr.invars[of_body:]]
        for array, carry in zip(operands[begin:], own, strict=True):
            self._link_all(array, carry)
        self.closed(params["cond_jaxpr"], [*operands[:of_condition], *own])
        after = self.closed(params["body_jaxpr"], [*operands[of_condition:begin], *own])
        for array, carry, result in zip(after, own, results, strict=True):
            self._link_carry(array, carry, result)

    def cond(self, params: dict[str, Any], operands: list[ArrayNode | None], results: list[ArrayNode]) -> None:
        """Read all branches."""
        for branch in params["branches"]:
            for array, result in zip(self.closed(branch, operands[1:]), results, strict=True):
                self._link_all(array, result)

    def _link_carry(self, after: ArrayNode | None, carry: ArrayNode, result: ArrayNode) -> None:
        self._link_all(after, carry)
        self._link_all(carry, result)

    def _link_entry(self, array: ArrayNode | None, entry: ArrayNode) -> None:
        """Link the axes of what a loop reads in each repetition; the loop runs along the first axis."""
        if array is not None:
            self._axes.need("all-gather", array, 0, array)
            for axis in range(len(entry.shape)):
                self._axes.link(array, axis + 1, entry, axis, is_view=True)

    def _link_all(self, one: ArrayNode | None, other: ArrayNode | None) -> None:
        """Link each axis of an array with the same axis of another one."""
        if one is not None and other is not None:
            for axis in range(len(one.shape)):
                self._axes.link(one, axis, other, axis)


_CALLS = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
        *("custom_jvp_call", "custom_vjp_call"),
    )
)
_BODIES: dict[str, Callable[..., None]] = {
    "cond": _ProgramReader.cond,
    "scan": _ProgramReader.scan,
    "while": _ProgramReader.loop,
}
