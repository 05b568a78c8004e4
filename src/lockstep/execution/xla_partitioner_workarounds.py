"""Constraints on how XLA partitions a step: some operations must not be divided over devices along some of their axes.

jaxlib 0.10.2 computes wrong numbers, or ends the process, if it divides an array along the axis along which it is sorted, pooled with
overlapping windows, accumulated, transformed (FFT) or padded with another value than 0; on a mesh of several axes also along the window
of a convolution, and unevenly along the rows that a scatter writes (``docs/decisions/0067`` and ``0069``). A step is traced, and
arguments and results of these operations are constrained: each device has these axes whole, and XLA chooses for the others. With starts
of slices that may have to be clamped, and with unsigned indices, as the derivative of sorting has, divided operations are wrong, too:
they become safe ones. Convolutions of grouped channels it divides wrongly along any axis of a mesh of several: each device computes its
own rows (``docs/decisions/0068``). Kernels of TPUs it does not divide at all, which is an error.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun, jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep._errors import ModelError
from lockstep.execution.compiled_step import Step
from lockstep.execution.jaxpr_utils import equations_of, evaluate, expanded, run_equation, source_location
from lockstep.execution.rowwise.rules import CUMULATIVE

Axes = tuple[int, ...]

_WINDOWS = (
    "reduce_window",
    "reduce_window_max",
    "reduce_window_min",
    "select_and_scatter_add",
    "select_and_gather_add",
)
_SLICES = {"dynamic_slice": 1, "dynamic_update_slice": 2}  # position of the first start among the arguments


def constrain_partitioning(step: Step, mesh: Mesh) -> Step:
    """Return a step on arrays, to be compiled for the devices of ``mesh``, with these constraints; the step itself for one device."""
    if mesh.size == 1:
        return step

    @functools.wraps(step)
    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        traced = functools.partial(step)  # A new one, as JAX keeps the traces of each function.
        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(state, batch)
        _check_kernels(closed.jaxpr, mesh)
        leaves = jax.tree.leaves((state, batch))
        found = (
            _evaluate(closed, leaves, mesh)
            if _is_divided_wrongly(closed.jaxpr, mesh)
            else jaxpr_as_fun(closed)(*leaves)
        )
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return run


def _check_kernels(jaxpr: Jaxpr, mesh: Mesh) -> None:
    """Raise an error if a kernel of TPUs is not called for the rows of each device; JAX's error does not tell where it comes from."""
    if mesh.devices.flat[0].platform != "tpu":
        return
    for equation in equations_of(jaxpr, without=("shard_map",)):
        if equation.primitive.name == "pallas_call" and not equation.params["interpret"]:
            name, (layer, line) = equation.params["name"], source_location(equation)
            # JAX takes the name of a kernel for one of a layer.
            places = ", ".join(one for one in (*layer.split("/"), line) if one not in ("", name))
            raise ModelError(
                f"the Pallas kernel {name!r}{f' ({places})' if places else ''} is part of a step that XLA divides over "
                f"{mesh.size} TPUs, and XLA cannot divide kernels. Fix: if it is that of keras.layers.MultiHeadAttention, call "
                "keras.config.disable_flash_attention() before the layer is made; otherwise wrap it in jax.shard_map"
            )


def undivided_axes(equation: JaxprEqn, mesh: Mesh) -> tuple[Axes, ...]:
    """Return the axes of each argument, then of each result, along which XLA must not divide an operation; () if it may divide all."""
    if _has_several_axes(mesh) and (found := _undivided_on_mesh(equation, mesh.size)):
        return found
    axes = _undivided_axes_of_argument(equation)
    ranks = [len(_shape_of(atom)) for atom in (*equation.invars, *equation.outvars)]
    # Starts of slices, and first values of windows, have no axes.
    return tuple(axes if rank > max(axes) else () for rank in ranks) if axes else ()


def _has_several_axes(mesh: Mesh) -> bool:
    return sum(size > 1 for size in mesh.shape.values()) > 1


def _undivided_on_mesh(equation: JaxprEqn, devices: int) -> tuple[Axes, ...]:
    """Return what :func:`undivided_axes` does, for operations that XLA divides wrongly over meshes of several axes only."""
    name = equation.primitive.name
    numbers: Any = equation.params.get("dimension_numbers")
    if name == "conv_general_dilated":
        return numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:]
    if not name.startswith("scatter"):
        return ()
    shape = _shape_of(equation.invars[2])
    rows = [axis for axis in range(len(shape)) if axis not in numbers.update_window_dims]
    uneven = [number for number, axis in enumerate(rows) if shape[axis] % devices]
    return ((), tuple(uneven), tuple(rows[number] for number in uneven), ()) if uneven else ()


def _undivided_axes_of_argument(equation: JaxprEqn) -> Axes:
    name, params = equation.primitive.name, equation.params
    if name == "sort":
        return (params["dimension"],)
    if name in CUMULATIVE:
        return (params["axis"],)
    if name == "fft":
        rank = len(_shape_of(equation.invars[0]))
        return tuple(range(rank - len(params["fft_lengths"]), rank))
    if name == "pad" and not _is_zero(equation.invars[1]):
        return tuple(axis for axis, (low, high, inner) in enumerate(params["padding_config"]) if low or high or inner)
    if name in _WINDOWS:
        pairs = zip(params["window_dimensions"], params["window_strides"], strict=True)
        return tuple(axis for axis, (window, stride) in enumerate(pairs) if window > stride)
    return ()


def _is_zero(atom: Any) -> bool:
    """Return whether a value for padding is known to be that of convolutions, sums and derivatives: XLA shares what it pads."""
    return isinstance(atom, Literal) and not np.any(atom.val)


def _has_unsafe_indices(equation: JaxprEqn) -> bool:
    """Return whether XLA may divide an operation wrongly because of its indices."""
    name, invars = equation.primitive.name, equation.invars
    if name in _SLICES:
        return any(last > 0 and not _is_within(start, last) for start, last in _starts(equation, invars))
    return (name == "gather" or name.startswith("scatter")) and _dtype_of(invars[1]) == "uint32"


def _with_safe_indices(equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Return the arguments of an operation with the same indices as signed numbers, and starts of slices within their bounds."""
    if equation.primitive.name in _SLICES:
        starts = [jnp.clip(start, 0, last) for start, last in _starts(equation, inputs)]
        return [*inputs[: _SLICES[equation.primitive.name]], *starts]
    return [inputs[0], inputs[1].astype("int32"), *inputs[2:]]


def _starts(equation: JaxprEqn, inputs: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return the start of a slice along each axis, and the greatest start at which the slice is within the array."""
    first = _SLICES[equation.primitive.name]
    part = equation.params["slice_sizes"] if first == 1 else _shape_of(equation.invars[1])
    lasts = [length - size for length, size in zip(_shape_of(equation.invars[0]), part, strict=True)]
    return list(zip(inputs[first:], lasts, strict=True))


def _is_within(start: Any, last: int) -> bool:
    """Return whether the start of a slice is a known number of at most ``last``, so that it is not clamped."""
    return isinstance(start, Literal) and 0 <= int(start.val) <= last


def _has_own_rows(equation: JaxprEqn, mesh: Mesh) -> bool:
    """Return whether an operation is a convolution of grouped channels, of which each device computes its own rows."""
    groups = [equation.params.get(name, 1) for name in ("feature_group_count", "batch_group_count")]
    return _has_several_axes(mesh) and equation.primitive.name == "conv_general_dilated" and max(groups) > 1


def _convolve_own_rows(equation: JaxprEqn, inputs: list[Any], mesh: Mesh) -> jax.Array:
    """Run a convolution of grouped channels on the rows of each device; on all rows, if they are not divisible by the number of devices.

    In the gradient of a kernel the rows are what other convolutions call channels, and are added up: ``batch_group_count``.
    """
    numbers, name = equation.params["dimension_numbers"], mesh.axis_names[0]
    is_sum = equation.params["batch_group_count"] > 1
    axes = (
        (numbers.lhs_spec[1], numbers.rhs_spec[1], None) if is_sum else (numbers.lhs_spec[0], None, numbers.out_spec[0])
    )
    is_even = inputs[0].shape[axes[0]] % mesh.shape[name] == 0
    ranks = map(np.ndim, (*inputs, equation.outvars[0].aval))
    specs = [
        PartitionSpec(*(name if is_even and place == axis else None for place in range(rank)))
        for rank, axis in zip(ranks, axes, strict=True)
    ]

    def convolve(images: jax.Array, kernel: jax.Array) -> jax.Array:
        found = equation.primitive.bind(images, kernel, **equation.params)
        return jax.lax.psum(found, name) if is_sum and is_even else found

    return jax.shard_map(convolve, mesh=mesh, in_specs=tuple(specs[:2]), out_specs=specs[2], check_vma=False)(*inputs)


def _shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


def _dtype_of(atom: Any) -> Any:
    return atom.aval.dtype


def _is_divided_wrongly(jaxpr: Jaxpr, mesh: Mesh) -> bool:
    tests = (undivided_axes, _has_own_rows, _is_wrong_within, _composed_wrongly)
    return any(_has_unsafe_indices(one) or any(test(one, mesh) for test in tests) for one in jaxpr.eqns)


def _is_wrong_within(equation: JaxprEqn, mesh: Mesh) -> bool:
    """Return whether the body of a loop, branch or call needs constraints: that of a ``shard_map`` is divided already, a kernel never is."""
    is_shared = equation.primitive.name not in ("shard_map", "pallas_call")
    return is_shared and any(_is_divided_wrongly(jaxpr, mesh) for jaxpr in jaxprs_in_params(equation.params))


def _composed_wrongly(equation: JaxprEqn, mesh: Mesh) -> ClosedJaxpr | None:
    """Return the operations that an operation is composed of if they need constraints."""
    composed = expanded(equation)
    return composed if composed is not None and _is_divided_wrongly(composed.jaxpr, mesh) else None


def _evaluate(closed: ClosedJaxpr, arguments: Sequence[Any], mesh: Mesh) -> list[Any]:
    """Evaluate a jaxpr with the constraints."""

    def handle(equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any] | None:
        if _has_own_rows(equation, mesh):
            return [_convolve_own_rows(equation, inputs, mesh)]
        axes, is_unsafe = undivided_axes(equation, mesh), _has_unsafe_indices(equation)
        if axes or is_unsafe:
            axes = axes or ((),) * (len(inputs) + len(equation.outvars))
            safe = _with_safe_indices(equation, inputs) if is_unsafe else inputs
            whole = [_constrained(value, own, mesh) for value, own in zip(safe, axes, strict=False)]
            found = equation.primitive.bind(*whole, **equation.params)
            outputs = found if equation.primitive.multiple_results else [found]
            return [_constrained(value, own, mesh) for value, own in zip(outputs, axes[len(inputs) :], strict=True)]
        if _is_wrong_within(equation, mesh):
            params = {name: _with_constraints(value, mesh) for name, value in equation.params.items()}
            return run_equation(closed.jaxpr, equation.replace(params=params), inputs)
        composed = _composed_wrongly(equation, mesh)
        return None if composed is None else _evaluate(composed, inputs, mesh)

    return evaluate(closed, arguments, handle)


def _constrained(value: Any, axes: Axes, mesh: Mesh) -> Any:
    if not axes:
        return value
    spec = [None if axis in axes else PartitionSpec.UNCONSTRAINED for axis in range(np.ndim(value))]
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec(*spec)))


def _with_constraints(value: Any, mesh: Mesh) -> Any:
    """Return a parameter of an equation with the constraints in the jaxprs within it."""
    if isinstance(value, tuple):
        items = [_with_constraints(one, mesh) for one in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, Jaxpr) and not isinstance(value, ClosedJaxpr):  # From JAX 0.12 on, they are one class.
        return _with_constraints(ClosedJaxpr(value, []), mesh).jaxpr
    if not isinstance(value, ClosedJaxpr):
        return value
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, weak_type=x.aval.weak_type) for x in value.jaxpr.invars]
    return jax.make_jaxpr(lambda *values: _evaluate(value, values, mesh))(*shapes)
