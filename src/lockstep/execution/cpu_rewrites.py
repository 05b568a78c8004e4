"""What XLA compiles badly for CPUs, said in other words: the same forward pass, and a way back that follows from it.

XLA has fast routines for plain convolutions and products of matrices on CPUs. A depthwise convolution runs as a loop over single
numbers, one over few channels hardly better, and the way back through max pooling is a search with a scatter. Each is replaced
by slices, products and selections, which the compiler fuses: the same sums, in another order. ``benchmarks/rewriting.py`` has
the figures; ``docs/decisions/0028`` says why here, and not in the layers.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from lockstep.execution.jaxpr_utils import evaluate

__all__ = ["rewritten"]

# Beyond these the other words take longer to run or to compile than XLA's own.
PATCH_SIZE = 64  # numbers under a window whose patches are laid out for one product of matrices
MOST_SLICES = 64  # places of the window of a depthwise convolution
MOST_POOLED = 16  # places of the window of max pooling
Axes = tuple[int, ...]


def rewritten(function: Callable[..., Any], platform: str = "cpu") -> Callable[..., Any]:
    """``function`` of trees of arrays, traced once for all calls with arrays of the same shapes, and on CPUs with other words for what is slow."""
    traces: dict[Any, Any] = {}

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))

        def flat(*values: Any) -> Any:
            own_args, own_kwargs = jax.tree.unflatten(structure, values)
            return function(*own_args, **own_kwargs)

        key = (structure, *map(jax.typeof, leaves))
        if key not in traces:
            traces[key] = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        closed, shapes = traces[key]
        has_any = platform == "cpu" and _has_any(closed)
        results = evaluate(closed, leaves, _in_other_words) if has_any else jaxpr_as_fun(closed)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _has_any(closed: ClosedJaxpr) -> bool:
    return any(_rule(equation) or ((body := _body(equation)) and _has_any(body)) for equation in closed.jaxpr.eqns)


def _body(equation: JaxprEqn) -> ClosedJaxpr | None:
    """What a plain call calls; loops and functions with derivatives of their own stay closed."""
    return equation.params["jaxpr"] if equation.primitive.name in ("jit", "pjit") else None


def _in_other_words(equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any] | None:
    rule, body = _rule(equation), _body(equation)
    if rule:
        return [rule(*inputs)]
    return evaluate(body, inputs, _in_other_words) if body and _has_any(body) else None


def _rule(equation: JaxprEqn) -> Callable[..., jax.Array] | None:
    """Other words for one operation, or None."""
    find = _RULES.get(equation.primitive.name)
    return find(equation) if find and all(map(_is_float32, (*equation.invars, *equation.outvars))) else None


def _is_float32(atom: Any) -> bool:
    """Whether that is what it holds, and it holds anything."""
    return atom.aval.dtype == jnp.float32 and atom.aval.size > 0


# --- convolutions ---------------------------------------------------------------------------------------------------------


def _convolution_rule(equation: JaxprEqn) -> Callable[..., jax.Array] | None:
    params = equation.params
    kinds: list[Any] = [atom.aval for atom in equation.invars]
    rows, kernel = kinds[0].shape, kinds[1].shape
    is_plain = params["batch_group_count"] == 1 and set(params["lhs_dilation"]) == {1}
    if not (is_plain and _has_channels_last(params, len(rows))):
        return None
    window, channels, groups = kernel[:-2], rows[-1], params["feature_group_count"]
    slices = functools.partial(_slices, window=window, params=params)
    if groups == channels > 1 and math.prod(window) <= MOST_SLICES:
        return lambda x, k: _depthwise(slices(x), k)
    if groups == 1 and (math.prod(window) == 1 or channels * math.prod(window) <= PATCH_SIZE):
        return lambda x, k: _by_patches(slices(x), k)
    return None


def _has_channels_last(params: dict[str, Any], rank: int) -> bool:
    numbers, space = params["dimension_numbers"], tuple(range(1, rank - 1))
    rows, kernel = (0, rank - 1, *space), (rank - 1, rank - 2, *range(rank - 2))
    return (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec) == (rows, kernel, rows)


def _slices(x: jax.Array, window: Axes, params: dict[str, Any]) -> list[jax.Array]:
    """For each place of the window what stands under it, ``(rows, …, channels)``, in the order of the places."""
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    padded = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((*pair, 0) for pair in params["padding"]), (0, 0, 0)])
    last = [
        (length - (k - 1) * d - 1) // s * s
        for length, k, d, s in zip(padded.shape[1:-1], window, dilation, strides, strict=True)
    ]
    found = []
    for place in itertools.product(*map(range, window)):
        start = [i * d for i, d in zip(place, dilation, strict=True)]
        stop = [i + end + 1 for i, end in zip(start, last, strict=True)]
        found.append(lax.slice(padded, (0, *start, 0), (len(x), *stop, x.shape[-1]), (1, *strides, 1)))
    return found


def _depthwise(slices: list[jax.Array], kernel: jax.Array) -> jax.Array:
    """The sum over the places of slice times weight; each channel may have several outputs."""
    shape = slices[0].shape
    weights = kernel.reshape(len(slices), shape[-1], -1)
    if weights.shape[-1] == 1:
        return _added(part * weight[:, 0] for part, weight in zip(slices, weights, strict=True))
    total = _added(part[..., None] * weight for part, weight in zip(slices, weights, strict=True))
    return total.reshape(*shape[:-1], -1)


def _added(terms: Iterator[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)


def _by_patches(slices: list[jax.Array], kernel: jax.Array) -> jax.Array:
    patches = slices[0] if len(slices) == 1 else jnp.concatenate(slices, axis=-1)
    flat = patches.reshape(-1, patches.shape[-1]) @ kernel.reshape(-1, kernel.shape[-1])
    return flat.reshape(*patches.shape[:-1], -1)


# --- max pooling ----------------------------------------------------------------------------------------------------------


def _pooling_rule(equation: JaxprEqn) -> Callable[..., jax.Array] | None:
    params = equation.params
    window = params["window_dimensions"]
    is_plain = set(params["base_dilation"]) | set(params["window_dilation"]) == {1} and not any(
        map(any, params["padding"])
    )
    if not is_plain or window != params["window_strides"] or not 1 < math.prod(window) <= MOST_POOLED:
        return None
    return lambda x: _pooled(_cut_off(x, window), window)


def _cut_off(x: jax.Array, window: Axes) -> jax.Array:
    """Without the rest that fills no window."""
    return x[tuple(slice(length // size * size) for length, size in zip(x.shape, window, strict=True))]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _pooled(x: jax.Array, window: Axes) -> jax.Array:
    """The greatest number of each window, where windows touch and do not overlap."""
    return functools.reduce(jnp.maximum, _places(x, window))


@_pooled.defjvp
def _pooled_jvp(window: Axes, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The first of several greatest numbers has the derivative, as with XLA's own."""
    (x,), (tangent,) = primals, tangents
    greatest = _pooled(x, window)
    places = _places(x, window)
    first = jnp.full(greatest.shape, len(places) - 1, jnp.int32)
    for number in reversed(range(len(places) - 1)):
        first = jnp.where(places[number] == greatest, number, first)
    within = jnp.arange(len(places), dtype=jnp.int32).reshape(
        [size for pair in zip([1] * x.ndim, window, strict=True) for size in pair]
    )
    chosen = within == jnp.expand_dims(first, _window_axes(x))
    return greatest, jnp.where(chosen, _windows(tangent, window), 0).sum(_window_axes(x))


def _places(x: jax.Array, window: Axes) -> list[jax.Array]:
    """For each place of the window the numbers that stand there."""
    return [lax.slice(x, place, x.shape, window) for place in itertools.product(*map(range, window))]


def _windows(x: jax.Array, window: Axes) -> jax.Array:
    """Each axis as two: the windows, and the places within."""
    return x.reshape([size for pair in ((n // k, k) for n, k in zip(x.shape, window, strict=True)) for size in pair])


def _window_axes(x: jax.Array) -> Axes:
    return tuple(range(1, 2 * x.ndim, 2))


_RULES: dict[str, Callable[[JaxprEqn], Callable[..., jax.Array] | None]] = {
    "conv_general_dilated": _convolution_rule,
    "reduce_window_max": _pooling_rule,
}
