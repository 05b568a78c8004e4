"""What each operation does to the rows: from the places of its inputs to those of its results."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

from lockstep.execution.rowwise import indexing_rules
from lockstep.execution.rowwise.equations import EquationPair
from lockstep.execution.rowwise.row_axes import MixesError, Places, RowAxis, RowSum, common

__all__ = ["FOLLOW_ROWS", "RULES"]


def _entrywise(both: EquationPair, inputs: Places) -> Places:
    return [common(inputs, both.name)] * len(both.pair[0].outvars)


def _each_by_itself(both: EquationPair, inputs: Places) -> Places:
    return list(inputs)


def _reduction(both: EquationPair, inputs: Places) -> Places:
    axes = both.param("dimensions" if both.name == "reduce" else "axes")
    place = common(inputs[: len(both.pair[0].outvars)], both.name)
    if not isinstance(place, RowAxis):
        return [place] * len(both.pair[0].outvars)
    if place.axis in axes:
        if both.name == "reduce_sum" and place.outer == 1:
            return [RowSum()]
        raise MixesError(f"{both.name} goes over the rows")
    return [replace(place, axis=place.axis - sum(axis < place.axis for axis in axes))] * len(both.pair[0].outvars)


def _along_an_axis(both: EquationPair, inputs: Places) -> Places:
    params = both.pair[0].params
    ndim = len(both.shapes(0)[0])
    axis = params.get("axis", params.get("dimension", ndim - 1))
    place = common(inputs, both.name)
    if isinstance(place, RowAxis) and place.axis == axis % ndim:
        raise MixesError(f"{both.name} goes along the rows")
    return [place] * len(both.pair[0].outvars)


def _reverse(both: EquationPair, inputs: Places) -> Places:
    (place,) = inputs
    if isinstance(place, RowAxis) and place.axis in both.param("dimensions") and not place.uniform:
        raise MixesError("rev turns the order of the rows")
    return [place]


def _transpose(both: EquationPair, inputs: Places) -> Places:
    (place,) = inputs
    order = tuple(both.param("permutation"))
    return [replace(place, axis=order.index(place.axis)) if isinstance(place, RowAxis) else place]


def _squeeze(both: EquationPair, inputs: Places) -> Places:
    (place,) = inputs
    gone = both.param("dimensions")
    if isinstance(place, RowAxis):
        place = replace(place, axis=place.axis - sum(axis < place.axis for axis in gone))
    return [place]


def _reshape(both: EquationPair, inputs: Places) -> Places:
    (place,) = inputs[:1]
    if not isinstance(place, RowAxis):
        return [place]
    shape, target = both.shapes(0)[0], both.result_shapes()
    before = prod(shape[: place.axis]) * place.outer
    after = place.inner * prod(shape[place.axis + 1 :])
    changing = [axis for axis, lengths in enumerate(zip(*target, strict=True)) if len(set(lengths)) > 1]
    if len(target[0]) != len(target[1]) or len(changing) != 1:
        raise MixesError(f"reshape of {list(shape)} to {list(target[0])} takes rows apart")
    (axis,) = changing
    in_front, behind = prod(target[0][:axis]), prod(target[0][axis + 1 :])
    if before % in_front or after % behind:
        raise MixesError(f"reshape of {list(shape)} to {list(target[0])} takes rows apart")
    # Where another axis is folded in, entries along the new one differ, and there is one way to read it.
    is_within = in_front % prod(shape[: place.axis]) == 0 and behind % prod(shape[place.axis + 1 :]) == 0
    uniform = place.uniform and is_within
    return [RowAxis(axis, before // in_front, after // behind, uniform)]


def _broadcast(both: EquationPair, inputs: Places) -> Places:
    place, dimensions = inputs[0], both.param("broadcast_dimensions")
    if isinstance(place, RowAxis):
        return [replace(place, axis=dimensions[place.axis])]
    return [place if place is not None else indexing_rules.filled(both)]


def _counting(both: EquationPair, inputs: Places) -> Places:
    place = indexing_rules.filled(both)
    if isinstance(place, RowAxis) and place.axis == both.param("dimension"):
        raise MixesError("iota counts the rows")
    return [place]


def _random(both: EquationPair, inputs: Places) -> Places:
    place = inputs[0]
    if isinstance(place, RowAxis):  # a key for each row
        return [replace(place, uniform=True)] * len(both.pair[0].outvars)
    return [indexing_rules.filled(both)]


def _keys(both: EquationPair, inputs: Places) -> Places:
    return [common(inputs, both.name)]


def _product(both: EquationPair, inputs: Places) -> Places:
    (left_axes, right_axes), (left_batch, right_batch) = both.param("dimension_numbers")
    left, right = inputs
    if not (isinstance(left, RowAxis) or isinstance(right, RowAxis)):
        return [None]
    ranks = [len(both.shapes(number)[0]) for number in (0, 1)]
    free = [
        [axis for axis in range(rank) if axis not in (*own, *batch)]
        for rank, own, batch in ((ranks[0], left_axes, left_batch), (ranks[1], right_axes, right_batch))
    ]
    result = []
    for place, own, batch, others, offset in (
        (left, left_axes, left_batch, free[0], len(left_batch)),
        (right, right_axes, right_batch, free[1], len(left_batch) + len(free[0])),
    ):
        if not isinstance(place, RowAxis):
            continue
        if place.axis in own:
            both_summed = isinstance(left, RowAxis) and isinstance(right, RowAxis)
            raise MixesError(f"dot_general sums over the rows{' of both its inputs' if both_summed else ''}")
        axis = batch.index(place.axis) if place.axis in batch else offset + others.index(place.axis)
        result.append(replace(place, axis=axis))
    try:
        return [common(list(result), "dot_general")]
    except MixesError:
        raise MixesError("dot_general multiplies each row with all rows") from None


def _convolution(both: EquationPair, inputs: Places) -> Places:
    rows, kernel = inputs
    numbers = both.param("dimension_numbers")
    if kernel is not None or both.param("batch_group_count") != 1:
        raise MixesError("conv_general_dilated has a kernel that follows from the rows")
    if isinstance(rows, RowAxis):
        if rows.axis != numbers.lhs_spec[0]:
            raise MixesError("conv_general_dilated goes over the rows")
        return [replace(rows, axis=numbers.out_spec[0])]
    return [rows]


def _window(both: EquationPair, inputs: Places) -> Places:
    place = common([one for one in inputs if one is not None], both.name)
    if isinstance(place, RowAxis):
        for name in ("window_dimensions", "window_strides", "base_dilation", "window_dilation"):
            values = both.param(name)
            if values is not None and values[place.axis] != 1:
                raise MixesError(f"{both.name} goes over the rows")
        if tuple(both.param("padding")[place.axis]) != (0, 0):
            raise MixesError(f"{both.name} goes over the rows")
    return [place] * len(both.pair[0].outvars)


def _matrices(count: int) -> Callable[[EquationPair, Places], Places]:
    """A rule for what works on the last ``count`` axes of each input, and so on each of those before by itself."""

    def rule(both: EquationPair, inputs: Places) -> Places:
        place = common(inputs, both.name)
        if isinstance(place, RowAxis):
            for number, one in enumerate(inputs):
                if isinstance(one, RowAxis) and one.axis >= len(both.shapes(number)[0]) - count:
                    raise MixesError(f"{both.name} goes over the rows")
        return [place] * len(both.pair[0].outvars)

    return rule


def _fourier(both: EquationPair, inputs: Places) -> Places:
    return _matrices(len(both.param("fft_lengths")))(both, inputs)


def _nothing(both: EquationPair, inputs: Places) -> Places:
    return []


_ENTRYWISE = [
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e"),
    *("bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj"),
    *("convert_element_type", "copy", "copy_p", "copysign", "cos", "cosh", "digamma", "div", "eq", "erf"),
    *("erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac"),
    *("imag", "integer_pow", "is_finite", "layout_constraint", "le", "le_to", "lgamma", "log", "log1p"),
    *("logistic", "lt", "lt_to", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "or"),
    *("polygamma", "population_count", "pow", "random_gamma", "real", "reduce_precision"),
    *("regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "sharding_constraint", "shift_left"),
    *("shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient"),
    *("sub", "tan", "tanh", "xor", "zeta"),
]
FOLLOW_ROWS = {
    **dict.fromkeys(("broadcast_in_dim", "iota", "random_bits", "random_split"), ("shape",)),
    **dict.fromkeys(("dynamic_slice", "gather"), ("slice_sizes",)),
    "reshape": ("new_sizes",),
    "slice": ("start_indices", "limit_indices"),
    "split": ("sizes",),
    "tile": ("reps",),
}
"""Parameters that may follow the number of rows: the shapes of results, and what the rules look at."""

RULES: dict[str, Callable[[EquationPair, Places], Places]] = {
    **dict.fromkeys(_ENTRYWISE, _entrywise),
    **dict.fromkeys(("device_put", "layout_constraint", "optimization_barrier", "reshard"), _each_by_itself),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor"), _reduction
    ),
    **dict.fromkeys(("argmax", "argmin", "reduce"), _reduction),
    **dict.fromkeys(
        (
            "cumsum",
            "cumprod",
            "cummax",
            "cummin",
            "cumlogsumexp",
            "sort",
            "top_k",
        ),
        _along_an_axis,
    ),
    **dict.fromkeys(("random_seed", "random_wrap", "random_unwrap", "random_fold_in", "random_clone"), _keys),
    **dict.fromkeys(("random_bits", "random_split"), _random),
    **dict.fromkeys(("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max"), indexing_rules.scatter
    ),
    **dict.fromkeys(
        ("cholesky", "qr", "svd", "eigh", "eig", "lu", "triangular_solve", "householder_product"), _matrices(2)
    ),
    "broadcast_in_dim": _broadcast,
    "concatenate": indexing_rules.concatenation,
    "conv_general_dilated": _convolution,
    "debug_callback": _nothing,
    "dot_general": _product,
    "dynamic_slice": indexing_rules.dynamic_slice,
    "dynamic_update_slice": indexing_rules.dynamic_update,
    "fft": _fourier,
    "gather": indexing_rules.gather,
    "iota": _counting,
    "pad": indexing_rules.padding,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": indexing_rules.slice,
    "split": indexing_rules.split,
    "squeeze": _squeeze,
    "stack": indexing_rules.stack,
    "tile": indexing_rules.tile,
    "transpose": _transpose,
    "unstack": indexing_rules.unstack,
}
