"""What operations that cut, join and look up do to the rows; each rule as in ``rules.py``."""

from dataclasses import replace

from lockstep.execution.rowwise.equations import EquationPair
from lockstep.execution.rowwise.row_axes import MixesError, Place, Places, RowAxis, common

__all__ = [
    "concatenation",
    "dynamic_slice",
    "dynamic_update",
    "filled",
    "gather",
    "padding",
    "scatter",
    "slice",
    "split",
    "stack",
    "tile",
    "unstack",
]


def filled(both: EquationPair) -> Place:
    """The place of an array whose entries are all the same, or random, along the axis that follows the rows."""
    one, other = both.result_shapes()
    changing = [axis for axis, lengths in enumerate(zip(one, other, strict=True)) if len(set(lengths)) > 1]
    if not changing:
        return None
    if len(changing) > 1:
        raise MixesError(f"{both.name} makes an array {list(one)} with several axes that follow the number of rows")
    (axis,) = changing
    count = both.blocks((one[axis], other[axis]), 1)
    return RowAxis(axis, 1, count, uniform=True)


def concatenation(both: EquationPair, inputs: Places) -> Places:
    """Whole batches one after the other are rows folded into one axis; anything else among them mixes."""
    dimension = both.param("dimension")
    along = [place for place in inputs if isinstance(place, RowAxis)]
    if not any(place.axis == dimension for place in along):
        return [common(inputs, "concatenate")]
    outer = 0
    inner = {place.inner for place in along if not place.uniform} or {1}
    if len(along) < len(inputs) or len(inner) > 1 or any(place.axis != dimension for place in along):
        raise MixesError("concatenate puts something else among the rows")
    (unit,) = inner
    for number in range(len(inputs)):
        one, other = both.shapes(number)
        outer += both.blocks((one[dimension], other[dimension]), unit)
    return [RowAxis(dimension, outer, unit)]


def stack(both: EquationPair, inputs: Places) -> Places:
    """The new axis comes before, between or behind the others."""
    place, axis = common(inputs, "stack"), both.param("axis")
    return [replace(place, axis=place.axis + (axis <= place.axis)) if isinstance(place, RowAxis) else place]


def slice(both: EquationPair, inputs: Places) -> Places:
    """Whole batches out of a folded axis, or one of several entries of each row."""
    (place,) = inputs
    if not isinstance(place, RowAxis):
        return [place]
    axis, (starts, stops) = place.axis, (both.params("start_indices"), both.params("limit_indices"))
    strides = both.param("strides")
    for one, other in (starts, stops):
        if (*one[:axis], *one[axis + 1 :]) != (*other[:axis], *other[axis + 1 :]):
            raise MixesError("slice begins or ends where the number of rows says")
    start, stop = tuple(each[axis] for each in starts), tuple(each[axis] for each in stops)
    stride = 1 if strides is None else strides[axis]
    if stride == place.inner > 1 == place.outer and start[0] == start[1] < stride:
        return [replace(place, inner=1)]
    if stride != 1:
        raise MixesError("slice takes some of the rows")
    try:
        count = both.blocks(stop, place.inner) - both.blocks(start, place.inner)
    except MixesError:
        raise MixesError("slice takes some of the rows") from None
    return [replace(place, outer=count)]


def split(both: EquationPair, inputs: Places) -> Places:
    """As :func:`slice`, for each part."""
    (place,) = inputs
    if not isinstance(place, RowAxis) or place.axis != both.param("axis"):
        return [place] * len(both.pair[0].outvars)
    sizes = zip(*both.params("sizes"), strict=True)
    return [replace(place, outer=both.blocks(size, place.inner)) for size in sizes]


def padding(both: EquationPair, inputs: Places) -> Places:
    """Only beside the rows."""
    place, value = inputs
    if value is not None:
        raise MixesError("pad fills with what follows from the rows")
    if isinstance(place, RowAxis) and tuple(both.param("padding_config")[place.axis]) != (0, 0, 0):
        raise MixesError("pad adds to the rows")
    return [place]


def dynamic_slice(both: EquationPair, inputs: Places) -> Places:
    """Starts are numbers; an axis that is taken whole has only one."""
    place, starts = inputs[0], inputs[1:]
    if any(start is not None for start in starts):
        raise MixesError("dynamic_slice begins where the rows say")
    if isinstance(place, RowAxis):
        sizes, shapes = both.params("slice_sizes"), both.shapes(0)
        if any(size[place.axis] != shape[place.axis] for size, shape in zip(sizes, shapes, strict=True)):
            raise MixesError("dynamic_slice takes some of the rows")
    return [place]


def dynamic_update(both: EquationPair, inputs: Places) -> Places:
    """What is written has the rows of what it is written to."""
    place, update, starts = inputs[0], inputs[1], inputs[2:]
    if any(start is not None for start in starts):
        raise MixesError("dynamic_update_slice begins where the rows say")
    found = common([place, update], both.name)
    if isinstance(found, RowAxis):
        lengths = [[shape[found.axis] for shape in both.shapes(number)] for number in (0, 1)]
        if lengths[0] != lengths[1]:
            raise MixesError("dynamic_update_slice writes to some of the rows")
    return [found]


def gather(both: EquationPair, inputs: Places) -> Places:
    """Indices by rows, an operand by rows, or both paired row by row."""
    operand, indices = inputs
    numbers = both.param("dimension_numbers")
    rank = len(both.result_shapes()[0])
    batch = [axis for axis in range(rank) if axis not in numbers.offset_dims]
    found: Places = []
    if isinstance(indices, RowAxis):
        if indices.axis == len(both.shapes(1)[0]) - 1:
            raise MixesError("gather is given one index by all rows")
        found.append(replace(indices, axis=batch[indices.axis]))
    if isinstance(operand, RowAxis):
        axis = operand.axis
        if axis in numbers.operand_batching_dims:
            paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
            found.append(replace(operand, axis=batch[paired]))
        else:
            sizes, shapes = both.params("slice_sizes"), both.shapes(0)
            is_whole = all(size[axis] == shape[axis] for size, shape in zip(sizes, shapes, strict=True))
            # What is taken whole begins at its first entry, or is left out for all rows alike.
            is_whole = is_whole and (indices is None or axis not in numbers.start_index_map)
            if not is_whole or axis in numbers.collapsed_slice_dims:
                raise MixesError("gather looks among the rows")
            gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
            kept = [other for other in range(len(shapes[0])) if other not in gone]
            found.append(replace(operand, axis=numbers.offset_dims[kept.index(axis)]))
    return [common(found, "gather")]


def scatter(both: EquationPair, inputs: Places) -> Places:
    """Writes within each row."""
    operand, indices, updates = inputs
    numbers = both.param("dimension_numbers")
    if not isinstance(operand, RowAxis) or not isinstance(updates, RowAxis):
        raise MixesError(f"{both.name} writes what rows give where others may write, too")
    rank = len(both.shapes(2)[0])
    outside = [axis for axis in range(rank) if axis not in numbers.update_window_dims]
    if operand.axis in numbers.operand_batching_dims:
        paired = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(operand.axis)]
        if updates.axis != outside[paired] or (isinstance(indices, RowAxis) and indices.axis != paired):
            raise MixesError(f"{both.name} writes to other rows")
    elif indices is not None or operand.axis in numbers.scatter_dims_to_operand_dims:
        raise MixesError(f"{both.name} writes where the rows say")
    else:
        gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        kept = [axis for axis in range(len(both.shapes(0)[0])) if axis not in gone]
        if operand.axis in gone or updates.axis != numbers.update_window_dims[kept.index(operand.axis)]:
            raise MixesError(f"{both.name} writes to other rows")
    if {operand.inner, operand.outer} != {1} or {updates.inner, updates.outer} != {1}:
        raise MixesError(f"{both.name} writes to rows that are folded")
    return [replace(operand, uniform=False)]


def tile(both: EquationPair, inputs: Places) -> Places:
    """Repeats a value; along the rows they are folded behind each other."""
    (place,) = inputs
    if place is None:
        new = filled(both)
        if isinstance(new, RowAxis):
            length = both.shapes(0)[0][new.axis]
            new = RowAxis(new.axis, new.inner // length, length, uniform=length == 1)
        return [new]
    repeats = both.param("reps")
    if isinstance(place, RowAxis):
        place = replace(place, outer=place.outer * repeats[place.axis])
    return [place]


def unstack(both: EquationPair, inputs: Places) -> Places:
    """Takes apart another axis than that of the rows."""
    (place,) = inputs
    axis = both.param("axis")
    if isinstance(place, RowAxis):
        if place.axis == axis:
            raise MixesError("unstack takes the rows apart")
        place = replace(place, axis=place.axis - (axis < place.axis))
    return [place] * len(both.pair[0].outvars)
