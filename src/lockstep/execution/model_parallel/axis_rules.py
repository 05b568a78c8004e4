"""Rules of logical axes: which axes of its operands and results each primitive links, and which collectives it needs.

``read_program`` applies them to a jaxpr, through the calls, loops and branches in it.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from lockstep.execution.jaxpr_utils import CALLS, CUSTOM_DERIVATIVES, called_jaxpr, expanded, scan_operands
from lockstep.execution.model_parallel.logical_axes import ArrayNode, LogicalAxes
from lockstep.execution.rowwise.rules import (
    CUMULATIVE,
    ENTRYWISE,
    KEY_OPERATIONS,
    PLACEMENTS,
    REDUCTIONS,
    SCATTERS,
    WINDOWS,
)


@dataclass(frozen=True)
class EquationLinks:
    """One equation, for its rule; an operand is None for a literal."""

    axes: LogicalAxes
    equation: JaxprEqn
    operands: list[ArrayNode | None]
    results: list[ArrayNode]

    def param(self, name: str) -> Any:
        """Return a parameter of the equation."""
        return self.equation.params[name]

    @property
    def arrays(self) -> Iterator[ArrayNode]:
        """The operands that are arrays."""
        return (array for array in self.operands if array is not None)

    def link(self, one: ArrayNode | None, axis: int, its: int, result: ArrayNode | None = None) -> None:
        """Link an axis of an operand with one of a result, the first if none is named."""
        is_view = self.equation.primitive.name in VIEWS
        self.axes.link(one, axis, result or self.results[0], its, is_view=is_view)

    def reduce(self, one: ArrayNode | None, axis: int) -> None:
        """Record that the equation sums over an axis of an operand."""
        for result in self.results:
            self.axes.need("all-reduce", one, axis, result)

    def gather(self, one: ArrayNode | None, axis: int) -> None:
        """Record that the equation needs all entries along an axis of an operand."""
        if one is not None:
            self.axes.need("all-gather", one, axis, one)


def broken(own: EquationLinks) -> None:
    """Gather each operand whole; the rule of operations that have no other."""
    for array in own.arrays:
        for axis in range(len(array.shape)):
            own.gather(array, axis)


def _no_links(own: EquationLinks) -> None:
    """Nothing: the results are made from a key or from nothing, on each device its part."""


def _entrywise(own: EquationLinks) -> None:
    for result in own.results:
        for array in own.arrays:
            if len(array.shape) == len(result.shape):
                _link_equal_axes(own, array, result)


def _link_equal_axes(own: EquationLinks, array: ArrayNode, result: ArrayNode) -> None:
    """Link axes of equal length, and gather along the others."""
    for axis, (length, its) in enumerate(zip(array.shape, result.shape, strict=True)):
        if length == its:
            own.link(array, axis, axis, result)
        elif length != 1:
            own.gather(array, axis)


def _one_to_one(own: EquationLinks) -> None:
    """Link the axes of each result with those of its operand that have their length; further operands are starts of slices."""
    for array, result in zip(own.operands, own.results, strict=False):
        if array is not None:
            _link_equal_axes(own, array, result)


def _transpose(own: EquationLinks) -> None:
    for its, axis in enumerate(own.param("permutation")):
        own.link(own.operands[0], axis, its)


def _broadcast(own: EquationLinks) -> None:
    array = own.operands[0]
    if array is not None:
        for axis, its in enumerate(own.param("broadcast_dimensions")):
            if array.shape[axis] == own.results[0].shape[its]:
                own.link(array, axis, its)


def _squeeze(own: EquationLinks) -> None:
    array = own.operands[0]
    if array is not None:
        _link_kept(own, array, {axis % len(array.shape) for axis in own.param("dimensions")})


def _link_kept(own: EquationLinks, array: ArrayNode, gone: Container[int]) -> None:
    """Link the axes that an operation keeps, in their order."""
    kept = [axis for axis in range(len(array.shape)) if axis not in gone]
    for result in own.results:
        for its, axis in enumerate(kept):
            own.link(array, axis, its, result)


def _reshape(own: EquationLinks) -> None:
    """Link the outermost factors of axes that are merged or split; an inner factor is gathered."""
    array = own.operands[0]
    if array is None:
        return
    for axes, its in _factors(array.shape, own.results[0].shape):
        own.link(array, axes[0], its[0])
        for axis in axes[1:]:
            own.gather(array, axis)


def _factors(one: tuple[int, ...], other: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest groups of axes of two shapes whose products are the same; axes of length 1 are in none."""
    if prod(one) == 0:
        return  # Nothing is moved.
    left = [axis for axis, length in enumerate(one) if length != 1]
    right = [axis for axis, length in enumerate(other) if length != 1]
    while left and right:
        axes, its = [left.pop(0)], [right.pop(0)]
        while (before := prod(one[axis] for axis in axes)) != (after := prod(other[axis] for axis in its)):
            if before < after:
                axes.append(left.pop(0))
            else:
                its.append(right.pop(0))
        yield axes, its


def _dot_general(own: EquationLinks) -> None:
    (left_axes, right_axes), (left_batch, right_batch) = own.param("dimension_numbers")
    left, right = own.operands
    for one, other in zip(left_axes, right_axes, strict=True):
        own.axes.link_operands(left, one, right, other)
        own.reduce(left, one)
        own.reduce(right, other)
    for its, (one, other) in enumerate(zip(left_batch, right_batch, strict=True)):
        own.link(left, one, its)
        own.link(right, other, its)
    its = len(left_batch)
    for array, summed, batch in ((left, left_axes, left_batch), (right, right_axes, right_batch)):
        for axis in range(len(array.shape) if array is not None else 0):
            if axis not in (*summed, *batch):
                own.link(array, axis, its)
                its += 1


def _convolution(own: EquationLinks) -> None:
    """Features are linked as in a product of matrices, groups of features as one axis of all three arrays."""
    array, kernel = own.operands
    numbers, groups = own.param("dimension_numbers"), own.param("feature_group_count")
    (rows, features, *spatial), (outputs, inputs, *window) = numbers.lhs_spec, numbers.rhs_spec
    for axis in spatial:
        own.gather(array, axis)
    for axis in window:
        own.gather(kernel, axis)
    if own.param("batch_group_count") != 1:
        broken(own)
        return
    own.link(array, rows, numbers.out_spec[0])
    if groups == 1:
        own.axes.link_operands(array, features, kernel, inputs)
        own.reduce(array, features)
        own.reduce(kernel, inputs)
        own.link(kernel, outputs, numbers.out_spec[1])
    elif own.axes.is_divisible(groups):
        own.gather(kernel, inputs)
        own.link(array, features, numbers.out_spec[1])
        own.link(kernel, outputs, numbers.out_spec[1])
    else:
        for one, axis in ((kernel, inputs), (kernel, outputs), (array, features)):
            own.gather(one, axis)


def _gather(own: EquationLinks) -> None:
    """A lookup: each device looks for the indices in its shard, and an all-reduce adds what they find."""
    array, indices = own.operands
    numbers, sizes = own.param("dimension_numbers"), own.param("slice_sizes")
    batch = [axis for axis in range(len(own.results[0].shape)) if axis not in numbers.offset_dims]
    for axis, its in enumerate(batch):
        own.link(indices, axis, its)
    offsets = iter(numbers.offset_dims)
    for axis, length in enumerate(array.shape if array is not None else ()):
        if axis in numbers.operand_batching_dims:
            paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
            own.link(array, axis, batch[paired])
        elif axis in numbers.collapsed_slice_dims:
            own.reduce(array, axis)
        else:
            its = next(offsets)
            if sizes[axis] == length:
                own.link(array, axis, its)
            else:
                own.gather(array, axis)


def _scatter(own: EquationLinks) -> None:
    """Axes that are written as a whole are linked, the others are gathered."""
    array, _, updates = own.operands
    if array is None or updates is None:
        broken(own)
        return
    numbers = own.param("dimension_numbers")
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = dict(zip([a for a in range(len(array.shape)) if a not in gone], numbers.update_window_dims, strict=True))
    whole = {axis: its for axis, its in windows.items() if updates.shape[its] == array.shape[axis]}
    for axis in range(len(array.shape)):
        if axis in whole:
            own.link(array, axis, axis)
            own.link(updates, whole[axis], axis)
        else:
            own.gather(array, axis)
    for axis in set(range(len(updates.shape))) - set(whole.values()):
        own.gather(updates, axis)


def _reduction(own: EquationLinks) -> None:
    axes = own.param("dimensions" if own.equation.primitive.name == "reduce" else "axes")
    for array in own.arrays:
        if array.shape:
            for axis in axes:
                own.reduce(array, axis)
            _link_kept(own, array, axes)


def _choice(own: EquationLinks) -> None:
    """Positions of the largest or smallest entries: along the axis these are gathered."""
    for array in own.arrays:
        for axis in own.param("axes"):
            own.gather(array, axis)
        _link_kept(own, array, own.param("axes"))


def _along_an_axis(own: EquationLinks) -> None:
    params, ndim = own.equation.params, len(own.results[0].shape)
    broken = params.get("axis", params.get("dimension", ndim - 1)) % ndim
    for array in own.arrays:
        own.gather(array, broken)
        for axis in range(ndim):
            if axis != broken:
                for result in own.results:
                    own.link(array, axis, axis, result)


def _reverse(own: EquationLinks) -> None:
    for axis in range(len(own.results[0].shape)):
        if axis in own.param("dimensions"):
            own.gather(own.operands[0], axis)
        else:
            own.link(own.operands[0], axis, axis)


def _update(own: EquationLinks) -> None:
    """Axes that a slice fills are linked, the others are gathered."""
    array, slice = own.operands[:2]
    for axis, length in enumerate(own.results[0].shape):
        for one in (array, slice):
            if slice is None or slice.shape[axis] != length:
                own.gather(one, axis)
            else:
                own.link(one, axis, axis)


def _padding(own: EquationLinks) -> None:
    for axis, sizes in enumerate(own.param("padding_config")):
        if tuple(sizes) == (0, 0, 0):
            own.link(own.operands[0], axis, axis)
        else:
            own.gather(own.operands[0], axis)


def _stack(own: EquationLinks) -> None:
    new = own.param("axis") % len(own.results[0].shape)
    for array in own.arrays:
        for axis in range(len(array.shape)):
            own.link(array, axis, axis + (axis >= new))


def _unstack(own: EquationLinks) -> None:
    (array,) = own.arrays
    gone = own.param("axis") % len(array.shape)
    own.gather(array, gone)
    _link_kept(own, array, {gone})


def _fused_attention(own: EquationLinks) -> None:
    """Link rows and heads in cuDNN's attention, which needs the other axes of query, key and value whole."""
    layout = own.param("layout")
    heads = 2 if getattr(layout, "value", layout) == 0 else 1  # (rows, time, heads, …), or (rows, heads, time, …)
    output, *statistics = own.results
    for number, array in enumerate(own.operands):
        for axis in range(len(array.shape) if array is not None else 0):
            if number < 3 and axis in (0, heads):
                own.link(array, axis, axis, output)
            else:
                own.gather(array, axis)
    for result in statistics:  # (rows, heads, time)
        own.link(own.operands[0], 0, 0, result)
        own.link(own.operands[0], heads, 1, result)


def _window(own: EquationLinks) -> None:
    """Windows of one entry are linked, larger ones gathered."""
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    sizes = [own.equation.params.get(name) for name in names]
    for array in own.arrays:
        for axis in range(len(array.shape)):
            if all(values is None or values[axis] == 1 for values in sizes):
                own.link(array, axis, axis)
            else:
                own.gather(array, axis)


VIEWS = frozenset(
    ("broadcast_in_dim", "convert_element_type", "copy", "name", "reshape", "squeeze", "stop_gradient", "transpose")
)
RULES: dict[str, Callable[[EquationLinks], None]] = {
    **dict.fromkeys(ENTRYWISE, _entrywise),
    **dict.fromkeys((*PLACEMENTS, "dynamic_slice", "slice", "tile"), _one_to_one),
    **dict.fromkeys((*REDUCTIONS, "reduce"), _reduction),
    **dict.fromkeys(("argmax", "argmin"), _choice),
    **dict.fromkeys((*CUMULATIVE, "concatenate", "sort", "split", "top_k"), _along_an_axis),
    **dict.fromkeys((*KEY_OPERATIONS, "random_bits", "random_split"), _no_links),
    **dict.fromkeys(("threefry2x32", "rng_bit_generator", "rng_uniform", "iota"), _no_links),
    **dict.fromkeys(("debug_callback", "create_token", "empty2"), _no_links),
    **dict.fromkeys(WINDOWS, _window),
    **dict.fromkeys(SCATTERS, _scatter),
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _convolution,
    "dot_general": _dot_general,
    **dict.fromkeys(("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"), _fused_attention),
    "dynamic_update_slice": _update,
    "gather": _gather,
    "pad": _padding,
    "reshape": _reshape,
    "rev": _reverse,
    "squeeze": _squeeze,
    "stack": _stack,
    "transpose": _transpose,
    "unstack": _unstack,
}


def read_program(program: ClosedJaxpr, num_shards: int) -> LogicalAxes:
    """Return the logical axes of a traced program."""
    axes = LogicalAxes(num_shards)
    axes.inputs = [axes.new_array(atom.aval) for atom in program.jaxpr.invars]
    axes.results = [array for array in _ProgramReader(axes).closed(program, axes.inputs) if array is not None]
    return axes


class _ProgramReader:
    """Reads jaxprs; each call of a jaxpr has its own arrays."""

    def __init__(self, axes: LogicalAxes) -> None:
        self._axes = axes

    def closed(self, closed: ClosedJaxpr | Jaxpr, given: Sequence[ArrayNode | None]) -> list[ArrayNode | None]:
        """Read a jaxpr on these inputs and return its results; None stands for a literal."""
        jaxpr = closed.jaxpr if isinstance(closed, ClosedJaxpr) else closed
        known: dict[Any, ArrayNode | None] = {atom: self._axes.new_array(atom.aval) for atom in jaxpr.constvars}
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
        if name in CALLS or name in CUSTOM_DERIVATIVES:
            return self.closed(called_jaxpr(equation), operands)
        if (composed := expanded(equation)) is not None:
            return self.closed(composed, operands)
        results = [self._axes.new_array(atom.aval) for atom in equation.outvars]
        if name in _BODIES:
            _BODIES[name](self, equation.params, operands, results)
        else:
            RULES.get(name, broken)(EquationLinks(self._axes, equation, operands, results))
        return list(results)

    def scan(self, params: dict[str, Any], operands: list[ArrayNode | None], results: list[ArrayNode]) -> None:
        """Read a loop along the first axis of its last operands."""
        constants, carried = scan_operands(params)
        before, slices = operands[constants : constants + carried], operands[constants + carried :]
        own = [self._axes.new_array(atom.aval) for atom in params["jaxpr"].jaxpr.invars[constants:]]
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
        own = [self._axes.new_array(atom.aval) for atom in params["body_jaxpr"].jaxpr.invars[of_body:]]
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


_BODIES: dict[str, Callable[..., None]] = {
    "cond": _ProgramReader.cond,
    "scan": _ProgramReader.scan,
    "while": _ProgramReader.loop,
}
