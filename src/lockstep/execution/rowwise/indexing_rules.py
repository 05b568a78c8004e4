"""Rules for primitives that slice, join and index, with the signature of those in ``primitive_rules.py``."""

from dataclasses import replace

from lockstep.execution.rowwise.equations import EquationPair
from lockstep.execution.rowwise.row_axes import (
    MixedRowsError,
    RowAxis,
    RowDependence,
    RowDependences,
    common_dependence,
)

__all__ = [
    "concatenation",
    "dynamic_slice",
    "dynamic_update",
    "gather",
    "padding",
    "scatter",
    "slice",
    "split",
    "stack",
    "tile",
    "uniform_dependence",
    "unstack",
]


def uniform_dependence(pair: EquationPair) -> RowDependence:
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


def concatenation(pair: EquationPair, inputs: RowDependences) -> RowDependences:
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


def stack(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Add an axis before, between or after the others."""
    dep, axis = common_dependence(inputs, "stack"), pair.param("axis")
    return [replace(dep, axis=dep.axis + (axis <= dep.axis)) if isinstance(dep, RowAxis) else dep]


def slice(pair: EquationPair, inputs: RowDependences) -> RowDependences:
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


def split(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Allow the same as :func:`slice`, for each part."""
    (dep,) = inputs
    if not isinstance(dep, RowAxis) or dep.axis != pair.param("axis"):
        return [dep] * pair.num_results
    sizes = zip(*pair.params("sizes"), strict=True)
    return [replace(dep, outer=pair.blocks(size, dep.inner)) for size in sizes]


def padding(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Allow padding of other axes than that of the rows."""
    dep, value = inputs
    if value is not None:
        raise MixedRowsError("pad fills with a value that depends on the rows")
    if isinstance(dep, RowAxis) and tuple(pair.param("padding_config")[dep.axis]) != (0, 0, 0):
        raise MixedRowsError("pad adds entries between or beside the rows")
    return [dep]


def dynamic_slice(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Allow starts that do not depend on the batch, and only the whole axis of rows."""
    dep, starts = inputs[0], inputs[1:]
    if any(start is not None for start in starts):
        raise MixedRowsError("dynamic_slice has a start that depends on the rows")
    if isinstance(dep, RowAxis):
        sizes, shapes = pair.params("slice_sizes"), pair.shapes(0)
        if any(size[dep.axis] != shape[dep.axis] for size, shape in zip(sizes, shapes, strict=True)):
            raise MixedRowsError("dynamic_slice takes some of the rows")
    return [dep]


def dynamic_update(pair: EquationPair, inputs: RowDependences) -> RowDependences:
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


def gather(pair: EquationPair, inputs: RowDependences) -> RowDependences:
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


def scatter(pair: EquationPair, inputs: RowDependences) -> RowDependences:
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


def tile(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Repeat a value; along the axis of rows this multiplies ``outer``."""
    (dep,) = inputs
    if dep is None:
        new = uniform_dependence(pair)
        if isinstance(new, RowAxis):
            length = pair.shapes(0)[0][new.axis]
            new = RowAxis(new.axis, new.inner // length, length, uniform=length == 1)
        return [new]
    repeats = pair.param("reps")
    if isinstance(dep, RowAxis):
        dep = replace(dep, outer=dep.outer * repeats[dep.axis])
    return [dep]


def unstack(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    """Allow unstacking of other axes than that of the rows."""
    (dep,) = inputs
    axis = pair.param("axis")
    if isinstance(dep, RowAxis):
        if dep.axis == axis:
            raise MixedRowsError("unstack separates the rows")
        dep = replace(dep, axis=dep.axis - (axis < dep.axis))
    return [dep] * pair.num_results
