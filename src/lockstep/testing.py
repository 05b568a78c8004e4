"""Checks of a custom cross-device operation: its results against the naive sum, and the messages that it sends."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep._array_encoding import DTYPES as KNOWN_DTYPES
from lockstep._errors import ContractError, OptionError, instance_of, sequence_of, shown, whole_number
from lockstep._logging import counted
from lockstep.collectives import CrossDeviceOps, Ops, ops_from_argument
from lockstep.collectives.cost_model import MessageTrace, trace_messages
from lockstep.devices.names import resolve_devices

__all__ = ["DTYPES", "SHAPES", "check_cross_device_ops", "count_traffic"]

DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (3, 0, 2), (3, 5), (1001,))
_AXIS = "device"
_MAX_LENGTH = 2**24  # of an axis


def check_cross_device_ops(
    ops: Ops | None,
    devices: Sequence[str | jax.Device] | None = None,
    *,
    dtypes: Sequence[str] = DTYPES,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> None:
    """Run a cross-device operation on 1, 2, … devices and compare with the naive sum in NumPy.

    For each number of devices: the sum of arrays of all ``dtypes`` and ``shapes`` in one call is within the operation's
    ``error_bound``, keeps shape and dtype, has the same bits on every device and the same bits a second time;
    non-finite numbers stay non-finite. 64-bit types are enabled during the check.

    Args:
        ops: any value that a strategy accepts as ``cross_device_ops``.
        devices: names or JAX devices; the check runs on the first, the first two, and so on. By default all of JAX's
            default platform.
        dtypes: names of the arrays' dtypes in ``jax.numpy``.
        shapes: shapes of the arrays.

    Raises:
        ContractError: a result is wrong; the message has the array, the number of devices, what was expected and
            what was found.
        DeviceError: a device is unknown.
        OptionError: ``ops`` is not an operation, or ``dtypes`` or ``shapes`` are empty or have an unknown one.

    Example:
        >>> import jax, lockstep
        >>> def gathered(array, axis):
        ...     return jax.lax.all_gather(array, axis).sum(axis=0)
        >>> lockstep.testing.check_cross_device_ops(gathered, ["cpu:0", "cpu:1"], dtypes=["float32", "int32"])
    """
    operation, checked_dtypes, checked_shapes = ops_from_argument(ops), _dtypes(dtypes), _shapes(shapes)
    chosen_devices = resolve_devices(devices)
    with jax.enable_x64(True):
        for count in range(1, len(chosen_devices) + 1):
            leaves = [_pieces(dtype, shape, count) for dtype in checked_dtypes for shape in checked_shapes]
            first, again = _reduced_twice(operation, leaves, chosen_devices[:count])
            for pieces, copies, second in zip(leaves, first, again, strict=True):
                _compare(operation, pieces, copies, second)


def count_traffic(
    ops: Ops | None, values: Sequence[jax.ShapeDtypeStruct | jax.Array | np.ndarray], devices: int
) -> MessageTrace:
    """Count the messages of a cross-device operation in its program; nothing runs, and no device is needed.

    Args:
        ops: any value that a strategy accepts as ``cross_device_ops``.
        values: arrays of each device; shapes and dtypes suffice.
        devices: number of devices.

    Returns:
        The rounds of messages. The platform's collectives, which may use other algorithms, are counted as rings, and
        ``all_to_all`` as exchanges in pairs.

    Raises:
        OptionError: ``ops`` is not an operation, or its rounds are not known beforehand.

    Example:
        >>> import jax, lockstep
        >>> vector = jax.ShapeDtypeStruct((1_000_000,), "float32")
        >>> traffic = lockstep.testing.count_traffic("ring", [vector], devices=8)
        >>> len(traffic.rounds), traffic.sent[0]
        (14, 7000000.0)
    """
    operation, given = ops_from_argument(ops), sequence_of("values", values, "a list of arrays")
    if not all(isinstance(value, jax.ShapeDtypeStruct | jax.Array | np.ndarray) for value in given):
        raise OptionError(
            f"values: expected arrays or their shapes, got {shown(values)}. Fix: pass arrays, or jax.ShapeDtypeStruct objects."
        )
    return trace_messages(operation, given, devices)


def _dtypes(names: Sequence[str]) -> list[np.dtype]:
    return [_dtype(name) for name in _at_least_one("dtypes", names, "a list of names such as ['float32']")]


def _at_least_one(name: str, values: Any, what: str) -> Sequence[Any]:
    given = sequence_of(name, values, what)
    if not given:
        raise OptionError(
            f"{name}: expected {what}, got an empty one, which checks nothing. Fix: leave it out to check all."
        )
    return given


def _dtype(name: Any) -> np.dtype:
    try:
        # NumPy parses other texts than names, some as Python.
        known = name if name is None or isinstance(name, str) else jnp.dtype(name).name
    except (TypeError, ValueError, RecursionError):
        known = None
    if known not in KNOWN_DTYPES:
        raise OptionError(
            f"dtypes: expected names such as 'float32', got {shown(name)}. Fix: pass names of dtypes of NumPy or ml_dtypes."
        )
    return KNOWN_DTYPES[known]


def _shapes(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    what = "a list of shapes such as [(3, 5)]"
    given = [instance_of((tuple, list), "shapes", shape, what) for shape in _at_least_one("shapes", shapes, what)]
    return [
        tuple(whole_number("shapes", length, minimum=0, maximum=_MAX_LENGTH) for length in shape) for shape in given
    ]


def _pieces(dtype: np.dtype, shape: tuple[int, ...], count: int) -> np.ndarray:
    """Return the arrays of the devices, ``(devices, *shape)``: random numbers, the same in every run."""
    rng = np.random.default_rng([count, *shape])
    size = (count, *shape)
    if jnp.issubdtype(dtype, jnp.bool_):
        return rng.integers(0, 4, size) == 0
    if not jnp.issubdtype(dtype, jnp.inexact):
        return rng.integers(-100, 100, size).astype(dtype)
    numbers = 10 * rng.normal(size=size)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (numbers + 10j * rng.normal(size=size)).astype(dtype)
    pieces: np.ndarray = numbers.astype(dtype)
    if len(shape) == 1 and shape[0] > 3:
        pieces[0, 1], pieces[-1, 3] = np.nan, np.inf
    return pieces


def _reduced_twice(
    ops: CrossDeviceOps, leaves: list[np.ndarray], devices: Sequence[jax.Device]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Reduce twice; each device holds one row of each leaf. Return the results of all devices, ``(devices, …)``, of both runs."""
    mesh, cut = Mesh(np.asarray(devices), (_AXIS,)), PartitionSpec(_AXIS)

    def reduce_own(values: list[jax.Array]) -> list[jax.Array]:
        own = [value[0] for value in values]
        sums = ops.all_reduce(own, _AXIS, devices)
        if len(sums) != len(own):
            raise ContractError(
                f"Expected one sum for each of {len(own)} arrays, got {len(sums)} sums. Fix: return one for each array that all_reduce is given."
            )
        for value, total in zip(own, sums, strict=True):
            _check_shape_and_dtype(value, total, len(devices))
        return [total[None] for total in sums]

    run = jax.jit(jax.shard_map(reduce_own, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))
    placed = jax.device_put(leaves, NamedSharding(mesh, cut))
    return [np.asarray(total) for total in run(placed)], [np.asarray(total) for total in run(placed)]


def _check_shape_and_dtype(value: jax.Array, total: jax.Array, count: int) -> None:
    if (total.shape, total.dtype) != (value.shape, value.dtype):
        raise ContractError(
            f"{_describe(value.dtype, value.shape, count)}: expected a sum of the same dtype and shape, got "
            f"{total.dtype} of shape {total.shape}. Fix: return the sum in the dtype and shape of the array."
        )


def _compare(ops: CrossDeviceOps, pieces: np.ndarray, copies: np.ndarray, again: np.ndarray) -> None:
    prefix = _describe(pieces.dtype, pieces.shape[1:], len(pieces))
    for device, copy in enumerate(copies):
        different = _bits(copy) != _bits(copies[0])
        if different.any():
            index = _first_index(different.any(axis=-1).reshape(copy.shape))
            raise ContractError(
                f"{prefix}: expected the same bits on every device, but device 0 has {copies[0][index]} and device "
                f"{device} has {copy[index]} at index {index}. Fix: add in the same order on every device."
            )
    if (_bits(copies) != _bits(again)).any():
        raise ContractError(
            f"{prefix}: expected the same bits when the operation runs again, got others. Fix: add in a fixed order, without random numbers."
        )
    exact, found, bound = _naive_sum(pieces), _widened(copies[0]), ops.error_bound(pieces)
    wrong = _is_wrong(found, exact, bound)
    if wrong.any():
        index = _first_index(wrong)
        held = [piece[index] for piece in pieces]
        raise ContractError(
            f"{prefix}: expected {exact[index]} within {bound[index]:.3g} at index {index}, the sum of "
            f"{', '.join(map(str, held))}; got {found[index]}. Fix: add each array once, or return a larger error_bound."
        )


def _is_wrong(found: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> np.ndarray:
    if not jnp.issubdtype(exact.dtype, jnp.inexact):
        return np.asarray(found != exact)
    with np.errstate(invalid="ignore"):
        near = np.abs(found - exact) <= bound
    return ~(near | (found == exact) | (np.isnan(found) & np.isnan(exact)))


def _naive_sum(pieces: np.ndarray) -> np.ndarray:
    total = _widened(pieces[0])
    with np.errstate(invalid="ignore", over="ignore"):
        for piece in pieces[1:]:
            total = total + _widened(piece)
    return total


def _widened(values: np.ndarray) -> np.ndarray:
    """Return floating-point numbers in a format in which adding rounds far less; integers, which wrap around, as they are."""
    is_double = jnp.finfo(values.dtype).bits == 64 if jnp.issubdtype(values.dtype, jnp.inexact) else False
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        return values.astype("clongdouble" if is_double else "complex128")
    if jnp.issubdtype(values.dtype, jnp.floating):
        return values.astype("longdouble" if is_double else "float64")
    return values


def _bits(values: np.ndarray) -> np.ndarray:
    """Return the bytes of each number, ``(numbers, bytes)``, in which 0 and -0 differ."""
    return np.frombuffer(values.tobytes(), "uint8").reshape(values.size, values.dtype.itemsize)


def _first_index(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(int(position) for position in np.argwhere(wrong)[0])


def _describe(dtype: np.dtype, shape: tuple[int, ...], count: int) -> str:
    return f"{dtype} of shape {shape} on {counted(count, 'device')}"
