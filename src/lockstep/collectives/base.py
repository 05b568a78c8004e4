"""Base classes of cross-device operations, packs of many arrays in few vectors, and the options of communication.

Most operations pack many small arrays into few long vectors, so that few collectives send them. A new one is a subclass in a file of this
package, and a line in ``ALGORITHMS`` of its ``registry.py``. ``execution/spmd`` calls them in a step.
"""

import abc
import enum
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep._errors import OptionError, member_of, seconds, whole_number


class CommunicationImplementation(enum.Enum):
    """The implementation of a collective: ``tf.distribute.experimental.CommunicationImplementation``.

    ``AUTO`` is the platform's own collective, ``RING`` is :class:`RingAllReduce`, ``NCCL`` is :class:`NcclAllReduce`.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """Options of all-reduce between devices: ``tf.distribute.experimental.CommunicationOptions``.

    Args:
        bytes_per_pack: gradients are added in packs of at most so many bytes. 0: with ``AUTO`` XLA decides, with the
            others all gradients of a dtype are one pack.
        timeout_seconds: seconds that a collective between processes may wait. ``MirroredStrategy`` has one process and
            raises an error.
        implementation: a member of :class:`CommunicationImplementation` or its name.

    Raises:
        OptionError: one of them is out of its range.

    Example:
        >>> import lockstep
        >>> options = lockstep.CommunicationOptions(bytes_per_pack=4_000_000, implementation="RING")
        >>> strategy = lockstep.MirroredStrategy(communication_options=options)
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        size = whole_number("CommunicationOptions: bytes_per_pack", self.bytes_per_pack, minimum=0)
        chosen = member_of(CommunicationImplementation, "CommunicationOptions: implementation", self.implementation)
        if self.timeout_seconds is not None:
            limit = seconds("CommunicationOptions: timeout_seconds", self.timeout_seconds)
            object.__setattr__(self, "timeout_seconds", limit)
        object.__setattr__(self, "bytes_per_pack", size)
        object.__setattr__(self, "implementation", chosen)


class CrossDeviceOps(abc.ABC):
    """Adds up what each device holds and gives every device the sum.

    Counterpart of ``tf.distribute.CrossDeviceOps``. An implementation is called while a step is compiled, inside
    ``jax.shard_map``, and is a pure function of its arguments. ``lockstep.testing.check_cross_device_ops`` checks this
    contract.

    Example:
        >>> import jax, lockstep
        >>> class Gathered(lockstep.CrossDeviceOps):
        ...     def all_reduce(self, values, axis, devices):
        ...         return [jax.lax.all_gather(value, axis).sum(axis=0).astype(value.dtype) for value in values]
        ...     def describe(self, devices):
        ...         return "gather everything and add it everywhere"
        >>> lockstep.testing.check_cross_device_ops(Gathered(), devices=["cpu:0", "cpu:1"], dtypes=["float32", "bool"])
        >>> Gathered().describe(jax.devices())
        'gather everything and add it everywhere'
        >>> import numpy as np
        >>> bool(Gathered().error_bound(np.ones((2, 1), "float32")) < 1e-6)
        True
    """

    @abc.abstractmethod
    def all_reduce(self, values: Sequence[jax.Array], axis: str, devices: Sequence[jax.Device]) -> list[jax.Array]:
        """Return the sum of each array over the devices.

        Args:
            values: this device's arrays, any shapes and numeric dtypes; the same shapes on every device.
            axis: name of the mesh axis that runs over the devices.
            devices: the devices along that axis, in order.

        Returns:
            The sums, of the same shapes and dtypes, the same bits on every device. Integers wrap around; the sum of
            bools is whether any of them is true, as for NumPy's ``+``.
        """

    @abc.abstractmethod
    def describe(self, devices: Sequence[jax.Device]) -> str:
        """Describe how the arrays are reduced, for the strategy's log line.

        Args:
            devices: in their order along the axis.

        Returns:
            Half a sentence, for example ``all-reduce by XLA``.
        """

    def error_bound(self, pieces: np.ndarray) -> np.ndarray:
        """Return how far from the exact sum a result may be: what any order of adding in the arrays' dtype allows.

        Source: N. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed. 2002, section 4.2: with n numbers the
        error is at most (n - 1) u Σ|x|, to first order in the unit roundoff u. Here 2u stands for u.

        Args:
            pieces: what the devices hold, ``(devices, …)``.

        Returns:
            A bound for each element, ``(…)``, in float64; zero for integers and bools.
        """
        if not jnp.issubdtype(pieces.dtype, jnp.inexact):
            return np.zeros(pieces.shape[1:])
        number, additions = jnp.finfo(pieces.dtype), len(pieces) - 1
        is_complex = jnp.issubdtype(pieces.dtype, jnp.complexfloating)
        magnitude = np.sum(np.abs(pieces.astype("complex128" if is_complex else "float64")), axis=0)
        with np.errstate(invalid="ignore"):  # 0 × infinity, if one device holds a non-finite number.
            relative = additions * float(number.eps) * magnitude
        return np.asarray(relative + additions * float(number.tiny))  # Hardware may flush subnormal numbers to zero.


class ReduceOp(enum.Enum):
    """How values are reduced: ``tf.distribute.ReduceOp``."""

    SUM = "SUM"
    MEAN = "MEAN"


class FunctionAllReduce(CrossDeviceOps):
    """A user's function, called for each array.

    Args:
        function: takes this device's array and the name of the mesh axis, and returns the sum over the devices, of the
            same shape. The sum is converted to the array's dtype.
    """

    def __init__(self, function: Callable[[jax.Array, str], jax.Array]) -> None:
        self.function = function
        self.name = function.__name__ if inspect.isroutine(function) else repr(function)

    def all_reduce(self, values: Sequence[jax.Array], axis: str, devices: Sequence[jax.Device]) -> list[jax.Array]:
        """Return the sum of each array over the devices; see :class:`CrossDeviceOps`.

        Raises:
            OptionError: the function returns another shape, or no array.
        """
        return [converted_sum(self.function(value, axis), value, self.name, "an array") for value in values]

    def describe(self, devices: Sequence[jax.Device]) -> str:
        return f"all-reduce by {self.name}"


def converted_sum(total: Any, value: jax.Array, function: str, given: str) -> jax.Array:
    """Return what a user's function gave as the sum over the devices, in the dtype of ``value``.

    Raises:
        OptionError: it is no array, or has another shape.
    """
    if not isinstance(total, jax.Array) or total.shape != value.shape:
        found = f"shape {total.shape}" if isinstance(total, jax.Array) else repr(total)
        raise OptionError(
            f"cross_device_ops: {function} was given {given} of shape {value.shape} and must return one of the "
            f"same shape, the sum over the devices; it returned {found}. Fix: return a jax.Array, and add over the devices only."
        )
    return total.astype(value.dtype)


class PackSlice(NamedTuple):
    """Elements ``start`` to ``stop`` of the flattened array at ``position``."""

    position: int
    start: int
    stop: int


Plan = list[list[PackSlice]]


def plan_packs(values: Sequence[jax.Array], num_packs: int = 1, bytes_per_pack: int = 0) -> Plan:
    """Return which elements are sent together. Both numbers mean what they mean in ``tf.distribute``.

    Arrays keep their order; a pack holds one dtype; an array may be cut between two packs. Empty arrays are in none.

    Args:
        values: arrays; only their shapes and dtypes are read.
        num_packs: the arrays of each dtype are split into at most so many packs of equal length. 0: every array is a
            pack of its own.
        bytes_per_pack: a pack has at most so many bytes (and at least one element). 0: no limit.

    Returns:
        The pieces of each pack, in order.
    """
    groups: dict[object, list[int]] = {}
    for position, value in enumerate(values):
        groups.setdefault(value.dtype if num_packs else position, []).append(position)
    plan: Plan = []
    for positions in groups.values():
        capacity = math.ceil(sum(values[position].size for position in positions) / max(1, num_packs))
        if bytes_per_pack:
            capacity = min(capacity, max(1, bytes_per_pack // values[positions[0]].dtype.itemsize))
        plan += fill_packs(((position, values[position].size) for position in positions), capacity)
    return plan


def fill_packs(sizes: Iterable[tuple[int, int]], capacity: int) -> Plan:
    """Divide arrays, given as position and length, into packs of ``capacity`` elements; the last may be shorter.

    Example:
        >>> [[tuple(piece) for piece in pieces] for pieces in fill_packs(enumerate([3, 0, 4]), 5)]
        [[(0, 0, 3), (2, 0, 2)], [(2, 2, 4)]]
    """
    plan: Plan = []
    room = 0
    for position, size in sizes:
        start = 0
        while start < size:
            if not room:
                plan.append([])
                room = capacity
            stop = min(size, start + room)
            plan[-1].append(PackSlice(position, start, stop))
            room -= stop - start
            start = stop
    return plan


def pack(values: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Return the vectors of a plan, each ``(elements,)``."""
    flat = [value.reshape(-1) for value in values]
    return [jnp.concatenate([flat[piece.position][piece.start : piece.stop] for piece in pieces]) for pieces in plan]


def unpack(vectors: Sequence[jax.Array], plan: Plan, values: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the contents of the vectors in the shapes of the ``values`` that :func:`pack` took; empty arrays as they are."""
    parts: list[list[jax.Array]] = [[] for _ in values]
    for vector, pieces in zip(vectors, plan, strict=True):
        start = 0
        for piece in pieces:
            length = piece.stop - piece.start
            parts[piece.position].append(vector[start : start + length])
            start += length
    return [
        jnp.concatenate(found).reshape(value.shape) if found else value
        for found, value in zip(parts, values, strict=True)
    ]


class PackedAllReduce(CrossDeviceOps):
    """Base of the all-reduce operations on vectors. A subclass defines how one vector is added, and its description.

    Args:
        num_packs: the arrays of each dtype are joined and split into at most so many packs, each of which is one
            collective. 0: one collective for each array.
        bytes_per_pack: a pack has at most so many bytes. 0: no limit.

    Raises:
        OptionError: one of the numbers is negative or not a whole number.
    """

    def __init__(self, num_packs: int = 1, *, bytes_per_pack: int = 0) -> None:
        name = type(self).__name__
        self.num_packs = whole_number(f"{name}: num_packs", num_packs, minimum=0)
        self.bytes_per_pack = whole_number(f"{name}: bytes_per_pack", bytes_per_pack, minimum=0)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"

    def all_reduce(self, values: Sequence[jax.Array], axis: str, devices: Sequence[jax.Device]) -> list[jax.Array]:
        if len(devices) == 1:
            return list(values)
        plan = plan_packs(values, self.num_packs, self.bytes_per_pack)
        sums = [self.all_reduce_vector(vector, axis, len(devices)) for vector in pack(values, plan)]
        return unpack(sums, plan, values)

    @abc.abstractmethod
    def all_reduce_vector(self, vector: jax.Array, axis: str, count: int) -> jax.Array:
        """Return the sum of one vector over the devices.

        Args:
            vector: ``(elements,)``, at least one.
            axis: name of the mesh axis that runs over the devices.
            count: number of devices, at least 2.

        Returns:
            The sum, ``(elements,)``, of the same dtype, the same bits on every device.
        """
