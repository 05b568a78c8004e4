"""Rules for primitives: the dependences of the results on the rows, given those of the inputs."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from lockstep.execution.rowwise import indexing_rules
from lockstep.execution.rowwise.equations import EquationPair
from lockstep.execution.rowwise.row_axes import (
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

__all__ = ["ROW_DEPENDENT_PARAMS", "RULES", "sum_rule"]


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
    return [dep if dep is not None else indexing_rules.uniform_dependence(pair)]


def _iota(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    dep = indexing_rules.uniform_dependence(pair)
    if isinstance(dep, RowAxis) and dep.axis == pair.param("dimension"):
        raise MixedRowsError("iota counts the rows")
    return [dep]


def _random_values(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    dep = inputs[0]
    if isinstance(dep, RowAxis):  # a key for each row
        return [replace(dep, uniform=True)] * pair.num_results
    return [indexing_rules.uniform_dependence(pair)]


def _random_key(pair: EquationPair, inputs: RowDependences) -> RowDependences:
    return [common_dependence(inputs, pair.name)]


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


def _no_results(pair: EquationPair, inputs: RowDependences) -> RowDependences:
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
ROW_DEPENDENT_PARAMS = {
    **dict.fromkeys(("broadcast_in_dim", "iota", "random_bits", "random_split"), ("shape",)),
    **dict.fromkeys(("dynamic_slice", "gather"), ("slice_sizes",)),
    "reshape": ("new_sizes",),
    "slice": ("start_indices", "limit_indices"),
    "split": ("sizes",),
    "tile": ("reps",),
}
"""Parameters that may depend on the number of rows: shapes of results, and parameters that the rules check."""

RULES: dict[str, Callable[[EquationPair, RowDependences], RowDependences]] = {
    **dict.fromkeys(_ENTRYWISE, _entrywise),
    **dict.fromkeys(("device_put", "layout_constraint", "optimization_barrier", "reshard"), _identity),
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
        _axis_operation,
    ),
    **dict.fromkeys(("random_seed", "random_wrap", "random_unwrap", "random_fold_in", "random_clone"), _random_key),
    **dict.fromkeys(("random_bits", "random_split"), _random_values),
    **dict.fromkeys(("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _reduce_window),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max"), indexing_rules.scatter
    ),
    **dict.fromkeys(
        ("cholesky", "qr", "svd", "eigh", "eig", "lu", "triangular_solve", "householder_product"), _batched_matrices(2)
    ),
    "broadcast_in_dim": _broadcast,
    "concatenate": indexing_rules.concatenation,
    "conv_general_dilated": _convolution,
    "debug_callback": _no_results,
    "dot_general": _dot_general,
    "dynamic_slice": indexing_rules.dynamic_slice,
    "dynamic_update_slice": indexing_rules.dynamic_update,
    "fft": _fft,
    "gather": indexing_rules.gather,
    "iota": _iota,
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


# --- sums and means over the rows -------------------------------------------------------------------------------------


def sum_rule(pair: EquationPair, inputs: RowDependences) -> RowDependence:
    """Return the dependence of a linear operation on sums or means over the rows, or None if the operation is no such."""
    if inputs == [RowCount()] and pair.name in ("convert_element_type", "copy", "copy_p"):
        return None if _is_rounded(pair) else RowCount()
    if pair.name == "eq" and inputs == [RowCount(), None] and _is_zero(pair.equations[0].invars[1]):
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
        or (pair.name in ("add", "sub", "add_any") and (kind is RowMean or _adds_only_zero(pair, inputs)))
    )
    return kind() if is_linear and not _is_rounded(pair) else None


def _adds_only_zero(pair: EquationPair, inputs: RowDependences) -> bool:
    """Return whether only sums over the rows and zeros are added."""
    return all(one is not None or _is_zero(atom) for one, atom in zip(inputs, pair.equations[0].invars, strict=True))


def _is_rounded(pair: EquationPair) -> bool:
    """Return whether the operation rounds to an integer."""
    before, after = (jnp.issubdtype(dtype, jnp.inexact) for dtype in pair.dtypes())
    return not after and (before or pair.name == "div")


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and float(atom.val) == 0


_LINEAR_OPERATIONS = frozenset(
    (
        "convert_element_type",
        "copy",
        "neg",
        "reshape",
        "squeeze",
        "reduce_sum",
        "transpose",
        "copy_p",
        "broadcast_in_dim",
    )
)
