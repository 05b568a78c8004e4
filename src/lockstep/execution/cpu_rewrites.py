"""Rewrite operations that XLA compiles badly for CPUs into equivalent ones; derivatives follow by differentiation.

XLA has fast routines for plain convolutions and matrix products on CPUs. A depthwise convolution runs as a loop over single
numbers, one over few channels hardly better, and the backward pass of max pooling is a search with a scatter. Each is replaced
by slices, products and selections, which the compiler fuses: the same sums, in another order. A plain convolution stays, but the
gradient of its kernel is computed for some rows at a time, which fit into a cache. Measurements: ``benchmarks/rewriting.py``; the
reason for doing it here and not in the layers: ``docs/decisions/0028``.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from lockstep.execution.jaxpr_utils import evaluate

# Above these limits the rewritten operations take longer to run or to compile than the originals.
MAX_PATCH_SIZE = 64  # entries of a patch in a convolution that becomes one matrix product
MAX_SLICES = 64  # entries of the window of a depthwise convolution
MAX_POOL_WINDOW = 16  # entries of the window of max pooling
CHUNK_BYTES = 1 << 20  # of rows and results whose part of a kernel's gradient is computed at once
MAX_CHUNKS = 8  # Each is compiled for itself.
Axes = tuple[int, ...]


def rewrite_for_cpu(function: Callable[..., Any], platform: str = "cpu") -> Callable[..., Any]:
    """Return ``function`` of trees of arrays, traced once for each combination of shapes, and on CPUs with slow operations rewritten."""
    traces: dict[Any, Any] = {}

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        key = (structure, *map(jax.typeof, leaves))
        if key not in traces:
            traced = functools.partial(function)  # A new one, as JAX keeps the traces of each function.
            traces[key] = jax.make_jaxpr(traced, return_shape=True)(*args, **kwargs)
        closed, shapes = traces[key]
        has_any = platform == "cpu" and _has_rewrite(closed)
        results = evaluate(closed, leaves, _rewrite) if has_any else jaxpr_as_fun(closed)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _has_rewrite(closed: ClosedJaxpr) -> bool:
    return any(
        _rule(equation) or ((body := _called_jaxpr(equation)) and _has_rewrite(body)) for equation in closed.jaxpr.eqns
    )


def _called_jaxpr(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Return the body of a jit call; loops and functions with custom derivatives are not entered."""
    return equation.params["jaxpr"] if equation.primitive.name == "jit" else None


def _rewrite(equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any] | None:
    rule, body = _rule(equation), _called_jaxpr(equation)
    if rule:
        return [rule(*inputs)]
    return evaluate(body, inputs, _rewrite) if body and _has_rewrite(body) else None


def _rule(equation: JaxprEqn) -> Callable[..., jax.Array] | None:
    """Return the rewritten form of one operation, or None."""
    find = _RULES.get(equation.primitive.name)
    return find(equation) if find and all(map(_is_float32, (*equation.invars, *equation.outvars))) else None


def _is_float32(atom: Any) -> bool:
    """Return whether a value is a non-empty float32 array."""
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
    if groups == channels > 1 and math.prod(window) <= MAX_SLICES:
        return lambda x, k: _depthwise(slices(x), k)
    if groups == 1 and (math.prod(window) == 1 or channels * math.prod(window) <= MAX_PATCH_SIZE):
        return lambda x, k: _by_patches(slices(x), k)
    made: Any = equation.outvars[0].aval
    chunks = min(-(-4 * (kinds[0].size + made.size) // CHUNK_BYTES), MAX_CHUNKS, rows[0])
    if groups == 1 and chunks > 1:
        return _with_gradient_in_chunks(functools.partial(equation.primitive.bind, **params), -(-rows[0] // chunks))
    return None


def _has_channels_last(params: dict[str, Any], rank: int) -> bool:
    numbers, space = params["dimension_numbers"], tuple(range(1, rank - 1))
    rows, kernel = (0, rank - 1, *space), (rank - 1, rank - 2, *range(rank - 2))
    return (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec) == (rows, kernel, rows)


def _slices(x: jax.Array, window: Axes, params: dict[str, Any]) -> list[jax.Array]:
    """Return for each entry of the window the strided slice of ``x`` under it, ``(rows, …, channels)``."""
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    padded = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((*pair, 0) for pair in params["padding"]), (0, 0, 0)])
    last = [
        (length - (k - 1) * d - 1) // s * s
        for length, k, d, s in zip(padded.shape[1:-1], window, dilation, strides, strict=True)
    ]
    found = []
    for entry in itertools.product(*map(range, window)):
        start = [i * d for i, d in zip(entry, dilation, strict=True)]
        stop = [i + end + 1 for i, end in zip(start, last, strict=True)]
        found.append(lax.slice(padded, (0, *start, 0), (len(x), *stop, x.shape[-1]), (1, *strides, 1)))
    return found


def _depthwise(slices: list[jax.Array], kernel: jax.Array) -> jax.Array:
    """Return the sum over the window of slice times weight; each channel may have several outputs."""
    shape = slices[0].shape
    weights = kernel.reshape(len(slices), shape[-1], -1)
    if weights.shape[-1] == 1:
        return _sum(part * weight[:, 0] for part, weight in zip(slices, weights, strict=True))
    total = _sum(part[..., None] * weight for part, weight in zip(slices, weights, strict=True))
    return total.reshape(*shape[:-1], -1)


def _sum(terms: Iterator[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)


def _by_patches(slices: list[jax.Array], kernel: jax.Array) -> jax.Array:
    patches = slices[0] if len(slices) == 1 else jnp.concatenate(slices, axis=-1)
    flat = patches.reshape(-1, patches.shape[-1]) @ kernel.reshape(-1, kernel.shape[-1])
    return flat.reshape(*patches.shape[:-1], -1)


def _with_gradient_in_chunks(convolve: Callable[..., jax.Array], size: int) -> Callable[..., jax.Array]:
    """Return the same convolution; the gradient of its kernel is the sum of those for ``size`` rows each.

    The derivative is written as XLA's along the rows, and in chunks along the kernel: transposing it gives these sums.
    """

    @jax.custom_jvp
    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return convolve(x, kernel)

    def differentiate(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        (x, kernel), (along_x, along_kernel) = primals, tangents
        terms = []
        if not isinstance(along_x, SymbolicZero):
            terms.append(convolve(along_x, kernel))
        if not isinstance(along_kernel, SymbolicZero):
            chunks = (x[start : start + size] for start in range(0, len(x), size))
            terms.append(jnp.concatenate([convolve(chunk, along_kernel) for chunk in chunks]))
        return run(x, kernel), _sum(iter(terms))

    run.defjvp(differentiate, symbolic_zeros=True)
    return run


# --- max pooling ----------------------------------------------------------------------------------------------------------


def _pooling_rule(equation: JaxprEqn) -> Callable[..., jax.Array] | None:
    params = equation.params
    window = params["window_dimensions"]
    is_plain = set(params["base_dilation"]) | set(params["window_dilation"]) == {1} and not any(
        map(any, params["padding"])
    )
    if not is_plain or window != params["window_strides"] or not 1 < math.prod(window) <= MAX_POOL_WINDOW:
        return None
    return lambda x: _max_pool(_crop(x, window), window)


def _crop(x: jax.Array, window: Axes) -> jax.Array:
    """Cut off the entries at the end that fill no window."""
    return x[tuple(slice(length // size * size) for length, size in zip(x.shape, window, strict=True))]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _max_pool(x: jax.Array, window: Axes) -> jax.Array:
    """Return the maximum of each window, for adjacent windows that do not overlap."""
    return functools.reduce(jnp.maximum, _window_entries(x, window))


@_max_pool.defjvp
def _max_pool_jvp(window: Axes, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Give the derivative to the first of several equal maxima, as XLA does."""
    (x,), (tangent,) = primals, tangents
    greatest = _max_pool(x, window)
    entries = _window_entries(x, window)
    first = jnp.full(greatest.shape, len(entries) - 1, jnp.int32)
    for number in reversed(range(len(entries) - 1)):
        first = jnp.where(entries[number] == greatest, number, first)
    within = jnp.arange(len(entries), dtype=jnp.int32).reshape(
        [size for pair in zip([1] * x.ndim, window, strict=True) for size in pair]
    )
    chosen = within == jnp.expand_dims(first, _window_axes(x))
    return greatest, jnp.where(chosen, _windows(tangent, window), 0).sum(_window_axes(x))


def _window_entries(x: jax.Array, window: Axes) -> list[jax.Array]:
    """Return for each entry of the window the array of these entries."""
    return [lax.slice(x, entry, x.shape, window) for entry in itertools.product(*map(range, window))]


def _windows(x: jax.Array, window: Axes) -> jax.Array:
    """Split each axis in two: the windows, and the entries within."""
    return x.reshape([size for pair in ((n // k, k) for n, k in zip(x.shape, window, strict=True)) for size in pair])


def _window_axes(x: jax.Array) -> Axes:
    return tuple(range(1, 2 * x.ndim, 2))


_RULES: dict[str, Callable[[JaxprEqn], Callable[..., jax.Array] | None]] = {
    "conv_general_dilated": _convolution_rule,
    "reduce_window_max": _pooling_rule,
}
