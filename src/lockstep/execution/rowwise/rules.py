"""Rules of the proof: how each primitive carries the row axis."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from lockstep.execution.rowwise.row_axes import (
    EquationPair,
    MixedRowsError,
    NeverTrue,
    RowAxis,
    RowCount,
    RowDependence,
    RowDependences,
    RowMean,
    RowSum,
    common_dependence,
)


def _uniform_dependence(pair: EquationPair) -> RowDependence:
    """Return the dependence of an array whose entries are equal, or random, along the axis whose length depends on the rows."""
    one, other = pair.result_shapes()
    changing = [axis for axis, lengths in enumerate(zip(one, other, strict=True)) if len(set(lengths)) > 1]
    if not changing:
        return None
    if len(changing) > 1:
        raise MixedRowsError(
            f"{pair.name} makes an array {list(one)} with several axes that depend on the number of rows"
        )
    (axis,) = changing
    count = pair.blocks((one[axis], other[axis]), 1)
    return RowAxis(axis, 1, count, uniform=True)


def _concatenation(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Concatenated batches are an axis with a larger ``outer``; anything else between them mixes rows."""
    dimension = pair.param("dimension")
    along = [dep for dep in inputs if isinstance(dep, RowAxis)]
    if not any(dep.axis == dimension for dep in along):
        return [common_dependence(inputs, "concatenate")]
    outer = 0
    inner = {dep.inner for dep in along if not dep.uniform} or {1}
    if len(along) < len(inputs) or len(inner) > 1 or any(dep.axis != dimension for dep in along):
        raise MixedRowsError("concatenate inserts other entries between the rows")
    (unit,) = inner
    for number in range(len(inputs)):
        one, other = pair.shapes(number)
        outer += pair.blocks((one[dimension], other[dimension]), unit)
    return [RowAxis(dimension, outer, unit)]


def _stack(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Add an axis before, between or after the others."""
    dep, axis = common_dependence(inputs, "stack"), pair.param("axis")
    return [replace(dep, axis=dep.axis + (axis <= dep.axis)) if isinstance(dep, RowAxis) else dep]


def _slice(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Allow slices of whole batches, or of one of several entries of each row."""
    (dep,) = inputs
    if not isinstance(dep, RowAxis):
        return [dep]
    axis, (starts, stops) = dep.axis, (pair.params("start_indices"), pair.params("limit_indices"))
    strides = pair.param("strides")
    for one, other in (starts, stops):
        if (*one[:axis], *one[axis + 1 :]) != (*other[:axis], *other[axis + 1 :]):
            raise MixedRowsError("slice has bounds that depend on the number of rows")
    start, stop = tuple(each[axis] for each in starts), tuple(each[axis] for each in stops)
    stride = 1 if strides is None else strides[axis]
    if stride == dep.inner > 1 == dep.outer and start[0] == start[1] < stride:
        return [replace(dep, inner=1)]
    if stride != 1:
        raise MixedRowsError("slice takes some of the rows")
    try:
        count = pair.blocks(stop, dep.inner) - pair.blocks(start, dep.inner)
    except MixedRowsError:
        raise MixedRowsError("slice takes some of the rows") from None
    return [replace(dep, outer=count)]


def _split(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Allow the same as :func:`_slice`, for each part."""
    (dep,) = inputs
    if not isinstance(dep, RowAxis) or dep.axis != pair.param("axis"):
        return [dep] * pair.num_results
    sizes = zip(*pair.params("sizes"), strict=True)
    return [replace(dep, outer=pair.blocks(size, dep.inner)) for size in sizes]


def _padding(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Allow padding of other axes than that of the rows."""
    dep, value = inputs
    if value is not None:
        raise MixedRowsError("pad fills with a value that depends on the rows")
    if isinstance(dep, RowAxis) and tuple(pair.param("padding_config")[dep.axis]) != (0, 0, 0):
        raise MixedRowsError("pad adds entries between or beside the rows")
    return [dep]


def _dynamic_slice(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Allow starts that do not depend on the batch, and only the whole axis of rows."""
    dep, starts = inputs[0], inputs[1:]
    if any(start is not None for start in starts):
        raise MixedRowsError("dynamic_slice has a start that depends on the rows")
    if isinstance(dep, RowAxis):
        sizes, shapes = pair.params("slice_sizes"), pair.shapes(0)
        if any(size[dep.axis] != shape[dep.axis] for size, shape in zip(sizes, shapes, strict=True)):
            raise MixedRowsError("dynamic_slice takes some of the rows")
    return [dep]


def _dynamic_update(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Allow updates with the same axis of rows as the operand."""
    dep, update, starts = inputs[0], inputs[1], inputs[2:]
    if any(start is not None for start in starts):
        raise MixedRowsError("dynamic_update_slice has a start that depends on the rows")
    found = common_dependence([dep, update], pair.name)
    if isinstance(found, RowAxis):
        lengths = [[shape[found.axis] for shape in pair.shapes(number)] for number in (0, 1)]
        if lengths[0] != lengths[1]:
            raise MixedRowsError("dynamic_update_slice writes to some of the rows")
    return [found]


def _gather(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Allow indices by rows, an operand by rows, or both paired row by row."""
    operand, indices = inputs
    numbers = pair.param("dimension_numbers")
    rank = len(pair.result_shapes()[0])
    batch = [axis for axis in range(rank) if axis not in numbers.offset_dims]
    found: RowDependences = []
    if isinstance(indices, RowAxis):
        if indices.axis == len(pair.shapes(1)[0]) - 1:
            raise MixedRowsError("gather has index vectors along the rows")
        found.append(replace(indices, axis=batch[indices.axis]))
    if isinstance(operand, RowAxis):
        axis = operand.axis
        if axis in numbers.operand_batching_dims:
            paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
            found.append(replace(operand, axis=batch[paired]))
        else:
            sizes, shapes = pair.params("slice_sizes"), pair.shapes(0)
            is_whole = all(size[axis] == shape[axis] for size, shape in zip(sizes, shapes, strict=True))
            # A whole axis starts at its first entry, or out of bounds for all rows alike.
            is_whole = is_whole and (indices is None or axis not in numbers.start_index_map)
            if not is_whole or axis in numbers.collapsed_slice_dims:
                raise MixedRowsError("gather reads other rows")
            gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
            kept = [other for other in range(len(shapes[0])) if other not in gone]
            found.append(replace(operand, axis=numbers.offset_dims[kept.index(axis)]))
    return [common_dependence(found, "gather")]


def _scatter(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Allow writes within each row."""
    operand, indices, updates = inputs
    numbers = pair.param("dimension_numbers")
    if not isinstance(operand, RowAxis) or not isinstance(updates, RowAxis):
        raise MixedRowsError(f"{pair.name} may write values of several rows to one entry")
    rank = len(pair.shapes(2)[0])
    outside = [axis for axis in range(rank) if axis not in numbers.update_window_dims]
    if operand.axis in numbers.operand_batching_dims:
        paired = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(operand.axis)]
        if updates.axis != outside[paired] or (isinstance(indices, RowAxis) and indices.axis != paired):
            raise MixedRowsError(f"{pair.name} writes to other rows")
    elif indices is not None or operand.axis in numbers.scatter_dims_to_operand_dims:
        raise MixedRowsError(f"{pair.name} writes to indices that depend on the rows")
    else:
        gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        kept = [axis for axis in range(len(pair.shapes(0)[0])) if axis not in gone]
        if operand.axis in gone or updates.axis != numbers.update_window_dims[kept.index(operand.axis)]:
            raise MixedRowsError(f"{pair.name} writes to other rows")
    if {operand.inner, operand.outer} != {1} or {updates.inner, updates.outer} != {1}:
        raise MixedRowsError(f"{pair.name} writes to rows that are merged with another axis")
    return [replace(operand, uniform=False)]


def _tile(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Repeat a value; along the axis of rows this multiplies ``outer``."""
    (dep,) = inputs
    if dep is None:
        new = _uniform_dependence(pair)
        if isinstance(new, RowAxis):
            length = pair.shapes(0)[0][new.axis]
            new = RowAxis(new.axis, new.inner // length, length, uniform=length == 1)
        return [new]
    repeats = pair.param("reps")
    if isinstance(dep, RowAxis):
        dep = replace(dep, outer=dep.outer * repeats[dep.axis])
    return [dep]


def _unstack(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Allow unstacking of other axes than that of the rows."""
    (dep,) = inputs
    axis = pair.param("axis")
    if isinstance(dep, RowAxis):
        if dep.axis == axis:
            raise MixedRowsError("unstack separates the rows")
        dep = replace(dep, axis=dep.axis - (axis < dep.axis))
    return [dep] * pair.num_results


def _entrywise(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    return [common_dependence(inputs, pair.name)] * pair.num_results


def _identity(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    return list(inputs)


def _reduction(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    axes = pair.param("dimensions" if pair.name == "reduce" else "axes")
    dep = common_dependence(inputs[: pair.num_results], pair.name)
    if not isinstance(dep, RowAxis):
        return [dep] * pair.num_results
    if dep.axis in axes:
        if pair.name == "reduce_sum" and dep.outer == 1:
            return [RowSum()]
        raise MixedRowsError(f"{pair.name} works over the rows")
    return [replace(dep, axis=dep.axis - sum(axis < dep.axis for axis in axes))] * pair.num_results


def _axis_operation(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    params = pair.equations[0].params
    ndim = len(pair.shapes(0)[0])
    axis = params.get("axis", params.get("dimension", ndim - 1))
    dep = common_dependence(inputs, pair.name)
    if isinstance(dep, RowAxis) and dep.axis == axis % ndim:
        raise MixedRowsError(f"{pair.name} works along the rows")
    return [dep] * pair.num_results


def _reverse(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    (dep,) = inputs
    if isinstance(dep, RowAxis) and dep.axis in pair.param("dimensions") and not dep.uniform:
        raise MixedRowsError("rev reverses the order of the rows")
    return [dep]


def _transpose(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    (dep,) = inputs
    order = tuple(pair.param("permutation"))
    return [replace(dep, axis=order.index(dep.axis)) if isinstance(dep, RowAxis) else dep]


def _squeeze(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    (dep,) = inputs
    gone = pair.param("dimensions")
    if isinstance(dep, RowAxis):
        dep = replace(dep, axis=dep.axis - sum(axis < dep.axis for axis in gone))
    return [dep]


def _reshape(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    (dep,) = inputs[:1]
    if not isinstance(dep, RowAxis):
        return [dep]
    if pair.param("dimensions") is not None:
        raise MixedRowsError("reshape permutes the axes, too")
    shape, target = pair.shapes(0)[0], pair.result_shapes()
    before = prod(shape[: dep.axis]) * dep.outer
    after = dep.inner * prod(shape[dep.axis + 1 :])
    changing = [axis for axis, lengths in enumerate(zip(*target, strict=True)) if len(set(lengths)) > 1]
    if len(target[0]) != len(target[1]) or len(changing) != 1:
        raise MixedRowsError(f"reshape of {list(shape)} to {list(target[0])} splits rows")
    (axis,) = changing
    in_front, behind = prod(target[0][:axis]), prod(target[0][axis + 1 :])
    if before % in_front or after % behind:
        raise MixedRowsError(f"reshape of {list(shape)} to {list(target[0])} splits rows")
    # If another axis is merged into the new one, its entries differ, and it is not uniform.
    is_within = in_front % prod(shape[: dep.axis]) == 0 and behind % prod(shape[dep.axis + 1 :]) == 0
    uniform = dep.uniform and is_within
    return [RowAxis(axis, before // in_front, after // behind, uniform)]


def _broadcast(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    dep, dimensions = inputs[0], pair.param("broadcast_dimensions")
    if isinstance(dep, RowAxis):
        return [replace(dep, axis=dimensions[dep.axis])]
    return [dep if dep is not None else _uniform_dependence(pair)]


def _iota(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    dep = _uniform_dependence(pair)
    if isinstance(dep, RowAxis) and dep.axis == pair.param("dimension"):
        raise MixedRowsError("iota counts the rows")
    return [dep]


def _random_values(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    # A key for each row, or parameters of the distribution.
    of_rows: RowDependences = [dep for dep in inputs if isinstance(dep, RowAxis)]
    if of_rows:
        return [common_dependence(of_rows, pair.name)] * pair.num_results
    return [_uniform_dependence(pair)]


def _dot_general(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    (left_axes, right_axes), (left_batch, right_batch) = pair.param("dimension_numbers")
    left, right = inputs
    if not (isinstance(left, RowAxis) or isinstance(right, RowAxis)):
        return [None]
    ranks = [len(pair.shapes(number)[0]) for number in (0, 1)]
    free = [
        [axis for axis in range(rank) if axis not in (*own, *batch)]
        for rank, own, batch in ((ranks[0], left_axes, left_batch), (ranks[1], right_axes, right_batch))
    ]
    result = []
    for dep, own, batch, others, offset in (
        (left, left_axes, left_batch, free[0], len(left_batch)),
        (right, right_axes, right_batch, free[1], len(left_batch) + len(free[0])),
    ):
        if not isinstance(dep, RowAxis):
            continue
        if dep.axis in own:
            both_summed = isinstance(left, RowAxis) and isinstance(right, RowAxis)
            raise MixedRowsError(f"dot_general sums over the rows{' of both its inputs' if both_summed else ''}")
        axis = batch.index(dep.axis) if dep.axis in batch else offset + others.index(dep.axis)
        result.append(replace(dep, axis=axis))
    try:
        return [common_dependence(list(result), "dot_general")]
    except MixedRowsError:
        raise MixedRowsError("dot_general multiplies each row with all rows") from None


def _convolution(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    rows, kernel = inputs
    numbers = pair.param("dimension_numbers")
    if kernel is not None or pair.param("batch_group_count") != 1:
        raise MixedRowsError("conv_general_dilated has a kernel that depends on the rows")
    if isinstance(rows, RowAxis):
        if rows.axis != numbers.lhs_spec[0]:
            raise MixedRowsError("conv_general_dilated convolves over the rows")
        return [replace(rows, axis=numbers.out_spec[0])]
    return [rows]


def _reduce_window(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    dep = common_dependence([one for one in inputs if one is not None], pair.name)
    if isinstance(dep, RowAxis):
        for name in ("window_dimensions", "window_strides", "base_dilation", "window_dilation"):
            values = pair.param(name)
            if values is not None and values[dep.axis] != 1:
                raise MixedRowsError(f"{pair.name} works over the rows")
        if tuple(pair.param("padding")[dep.axis]) != (0, 0):
            raise MixedRowsError(f"{pair.name} works over the rows")
    return [dep] * pair.num_results


def _batched_matrices(count: int) -> Callable[[EquationPair, RowDependences], RowDependences]:
    """Return the rule for operations on the last ``count`` axes of each input, batched over the others."""

    def rule(pair: EquationPair, inputs: RowDependences) -> RowDependences:
        dep = common_dependence(inputs, pair.name)
        if isinstance(dep, RowAxis):
            for number, one in enumerate(inputs):
                if isinstance(one, RowAxis) and one.axis >= len(pair.shapes(number)[0]) - count:
                    raise MixedRowsError(f"{pair.name} works over the rows")
        return [dep] * pair.num_results

    return rule


def _fft(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    return _batched_matrices(len(pair.param("fft_lengths")))(pair, inputs)


def _fused_attention(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Allow cuDNN's attention, which pairs query, key, value and mask row by row."""
    dep = common_dependence(inputs, pair.name)
    if pair.param("dropout_rate"):
        raise MixedRowsError(f"{pair.name} drops entries by a seed that is the same on each replica")
    if isinstance(dep, RowAxis) and dep.axis != 0:
        raise MixedRowsError(f"{pair.name} works along the rows")
    if any(prod(pair.shapes(number)[0]) for number in range(8, len(inputs))):
        raise MixedRowsError(f"{pair.name} reads pages, which may be those of other rows")
    return [dep] * pair.num_results


def _kernel(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Allow Pallas kernels that ``jax.vmap`` has mapped over the rows, as an axis of their grid."""
    one, other = pair.params("grid_mapping")
    first = len(inputs) - one.num_inputs  # Those before choose what is read.
    has_rows = [axis for axis in one.vmapped_dims if (one.grid[axis], other.grid[axis]) == pair.rows]
    if not has_rows or _without_rows(one, has_rows[0]) != _without_rows(other, has_rows[0]):
        raise MixedRowsError("pallas_call is not mapped over the rows")
    if pair.param("input_output_aliases") or any(dep is not None for dep in inputs[:first]):
        raise MixedRowsError("pallas_call writes to its arguments, or chooses what it reads by the rows")
    axes = [_mapped_axis(mapping, has_rows[0]) for mapping in one.block_mappings]
    for dep, axis in zip(inputs[first:], axes, strict=False):
        is_uniform = isinstance(dep, RowAxis) and dep.uniform
        if dep != (None if axis is None else RowAxis(axis, uniform=is_uniform)):
            raise MixedRowsError("pallas_call reads other rows")
    if None in axes[one.num_inputs :]:
        raise MixedRowsError("pallas_call writes values of several rows to one entry")
    return [RowAxis(axis) for axis in axes[one.num_inputs :] if axis is not None]


def _without_rows(grid_mapping: Any, rows: int) -> tuple[Any, ...]:
    """Return what must not depend on the number of rows: the other axes of the grid, and the blocks at each of its places."""
    blocks = [(mapping.block_shape, str(mapping.index_map_jaxpr)) for mapping in grid_mapping.block_mappings]
    return (*grid_mapping.grid[:rows], *grid_mapping.grid[rows + 1 :], blocks)


def _mapped_axis(mapping: Any, rows: int) -> int | None:
    """Return the axis of an array along which a kernel has one entry at each place of an axis of its grid; None if it has all at each."""
    index = mapping.index_map_jaxpr.jaxpr
    place = index.invars[rows]
    axes = [axis for axis, atom in enumerate(index.outvars) if atom is place]
    is_used = any(atom is place for equation in index.eqns for atom in equation.invars)
    if is_used or len(axes) > 1 or any(getattr(mapping.block_shape[axis], "block_size", 1) != 1 for axis in axes):
        raise MixedRowsError("pallas_call reads or writes other rows")
    return axes[0] if axes else None


def _no_results(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    return []


ENTRYWISE = [
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e"),
    *("bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj"),
    *("convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq", "erf"),
    *("erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac"),
    *("imag", "integer_pow", "is_finite", "layout_constraint", "le", "le_to", "lgamma", "log", "log1p"),
    *("logistic", "lt", "lt_to", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "or"),
    *("polygamma", "population_count", "pow", "random_gamma", "real", "reduce_precision"),
    *("regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "sharding_constraint", "shift_left"),
    *("shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient"),
    *("sub", "tan", "tanh", "xor", "zeta"),
]
CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
DRAWS = ("random_bits", "random_gamma", "random_split")
KEY_OPERATIONS = ("random_seed", "random_wrap", "random_unwrap", "random_fold_in", "random_clone")
PLACEMENTS = ("device_put", "optimization_barrier", "reshard")
REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor")
SCATTERS = ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max")
WINDOWS = ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
ROW_DEPENDENT_PARAMS = {
    **dict.fromkeys(("broadcast_in_dim", "iota", "random_bits", "random_split"), ("shape",)),
    **dict.fromkeys(("dynamic_slice", "gather"), ("slice_sizes",)),
    "pallas_call": ("grid_mapping", "out_avals", "cost_estimate"),
    "reshape": ("new_sizes",),
    "slice": ("start_indices", "limit_indices"),
    "split": ("sizes",),
    "tile": ("reps",),
}
"""Parameters that may depend on the number of rows: shapes of results, and parameters that the rules check."""

RULES: dict[str, Callable[[EquationPair, RowDependences], RowDependences]] = {
    **dict.fromkeys(ENTRYWISE, _entrywise),
    **dict.fromkeys(PLACEMENTS, _identity),
    **dict.fromkeys((*REDUCTIONS, "argmax", "argmin", "reduce"), _reduction),
    **dict.fromkeys((*CUMULATIVE, "sort", "top_k"), _axis_operation),
    **dict.fromkeys(KEY_OPERATIONS, _entrywise),
    **dict.fromkeys(DRAWS, _random_values),
    **dict.fromkeys(WINDOWS, _reduce_window),
    **dict.fromkeys(SCATTERS, _scatter),
    **dict.fromkeys(
        ("cholesky", "qr", "svd", "eigh", "eig", "lu", "triangular_solve", "householder_product"), _batched_matrices(2)
    ),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenation,
    "conv_general_dilated": _convolution,
    "debug_callback": _no_results,
    "dot_general": _dot_general,
    "dot_product_attention_fwd_wrapper": _fused_attention,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "fft": _fft,
    "gather": _gather,
    "iota": _iota,
    "pad": _padding,
    "pallas_call": _kernel,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "transpose": _transpose,
    "unstack": _unstack,
}


# --- sums and means over the rows -------------------------------------------------------------------------------------


def sum_rule(pair: EquationPair, inputs: RowDependences) -> RowDependence:
    """Return the dependence of a linear operation on sums or means over the rows, or None if the operation is no such."""
    if inputs == [RowCount()] and pair.name in ("convert_element_type", "copy"):
        return None if _is_rounded(pair) else RowCount()
    if pair.name == "eq" and inputs == [RowCount(), None] and pair.is_zero(1):
        return NeverTrue()
    if pair.name == "div" and inputs == [RowSum(), RowCount()]:
        return None if _is_rounded(pair) else RowMean()
    sums = {type(one) for one in inputs if isinstance(one, (RowSum, RowMean))}
    if len(sums) != 1 or not all(one is None or isinstance(one, (RowSum, RowMean)) for one in inputs):
        return None
    (kind,) = sums
    is_linear = (
        pair.name in _LINEAR_OPERATIONS
        or (pair.name == "mul" and None in inputs)
        or (pair.name == "div" and inputs[1] is None)
        or (pair.name in ("concatenate", "stack") and (kind is RowMean or None not in inputs))
        or (pair.name in ("add", "sub", "add_any") and (kind is RowMean or _others_are_zero(pair, inputs)))
        or (pair.name == "select_n" and inputs[0] is None and (kind is RowMean or _others_are_zero(pair, inputs, 1)))
    )
    return kind() if is_linear and not _is_rounded(pair) else None


def _others_are_zero(pair: EquationPair, inputs: RowDependences, first: int = 0) -> bool:
    """Return whether the inputs, from number ``first`` on, are only sums over the rows and zeros."""
    return all(inputs[number] is not None or pair.is_zero(number) for number in range(first, len(inputs)))


def _is_rounded(pair: EquationPair) -> bool:
    """Return whether the operation rounds to an integer, or to fewer bits of one, or to a bool."""
    before, after = pair.dtypes()
    if jnp.issubdtype(after, jnp.inexact):
        return False
    is_narrower = after.itemsize < before.itemsize or np.dtype(bool) in (before, after)
    return jnp.issubdtype(before, jnp.inexact) or pair.name == "div" or is_narrower


_LINEAR_OPERATIONS = frozenset(
    (
        "convert_element_type",
        "copy",
        "neg",
        "reshape",
        "squeeze",
        "reduce_sum",
        "transpose",
        "broadcast_in_dim",
        "sharding_constraint",
        "stop_gradient",
    )
)
