"""Messages of an all-reduce, counted in its program for any number of devices, without running it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, PartitionSpec

from lockstep._errors import OptionError, whole_number
from lockstep.collectives.base import CrossDeviceOps

__all__ = ["MessageRound", "MessageTrace", "trace_messages"]

_AXIS = "device"
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MessageRound:
    """Messages that are sent at the same time: each of ``pairs`` is a sender and a receiver of ``nbytes``."""

    pairs: Pairs
    nbytes: float


@dataclass(frozen=True)
class MessageTrace:
    """The rounds of an all-reduce, one after the other.

    Args:
        devices: number of devices.
        rounds: the messages of each round.
    """

    devices: int
    rounds: tuple[MessageRound, ...]

    @property
    def sent(self) -> list[float]:
        """Bytes that each device sends, by device."""
        return self._count(0)

    @property
    def received(self) -> list[float]:
        """Bytes that each device receives, by device."""
        return self._count(1)

    @property
    def in_turn(self) -> float:
        """Bytes that are sent one after the other: the sum over the rounds of one message."""
        return sum(each.nbytes for each in self.rounds)

    def _count(self, end: int) -> list[float]:
        total = [0.0] * self.devices
        for each in self.rounds:
            for pair in each.pairs:
                total[pair[end]] += each.nbytes
        return total


def trace_messages(ops: CrossDeviceOps, values: Sequence[jax.ShapeDtypeStruct | jax.Array], count: int) -> MessageTrace:
    """Return the rounds of messages of one all-reduce.

    A ``ppermute`` is one round. For the platform's collectives, which may use other algorithms, the usual ones are
    counted: ``psum``, ``psum_scatter`` and ``all_gather`` round a ring, ``all_to_all`` in pairs, one partner a round.

    Args:
        ops: the operation.
        values: arrays of one device; shapes and dtypes suffice.
        count: number of devices; they need not exist.

    Returns:
        The rounds, in the order of the program.

    Raises:
        OptionError: the program communicates inside a ``while`` loop or a conditional, whose rounds are not known
            beforehand, or by a collective that is not listed here, or in groups.
    """
    count = whole_number("count", count)
    local, whole = jax.local_devices(), PartitionSpec()
    devices = [local[min(number, len(local) - 1)] for number in range(count)]  # Most operations only count them.
    run = jax.shard_map(
        lambda own: ops.all_reduce(own, _AXIS, devices),
        mesh=AbstractMesh((count,), (_AXIS,)),
        in_specs=whole,
        out_specs=whole,
        check_vma=False,
    )
    return MessageTrace(count, tuple(_rounds(jax.make_jaxpr(run)(list(values)).jaxpr, count)))


def _rounds(program: Jaxpr, count: int) -> Iterator[MessageRound]:
    for equation in program.eqns:
        name = equation.primitive.name
        if _AXIS in _axes(equation) and name != "axis_index":
            yield from _rounds_of_collective(equation, count)
        inner = [each for part in _programs(equation) for each in _rounds(part, count)]
        if inner and name in ("while", "cond"):
            raise OptionError(
                f"traffic: the operation communicates inside {name!r}, so its rounds are not known beforehand. Use a "
                "loop of a fixed length (jax.lax.fori_loop with numbers, or a Python loop), and jax.numpy.where."
            )
        yield from inner * (equation.params["length"] if name == "scan" else 1)


def _rounds_of_collective(equation: JaxprEqn, count: int) -> list[MessageRound]:
    if equation.params.get("axis_index_groups") is not None:
        raise OptionError("traffic: collectives with axis_index_groups are not counted; use jax.lax.ppermute.")
    arrays = [operand.aval for operand in equation.invars]
    nbytes = sum(one.size * one.dtype.itemsize for one in arrays)  # type: ignore[attr-defined]  # they are arrays
    ring, slices = _shift(1, count), nbytes / count
    match equation.primitive.name:
        case "ppermute":
            return [MessageRound(tuple((int(a), int(b)) for a, b in equation.params["perm"] if a != b), nbytes)]
        case "all_gather":
            return [MessageRound(ring, nbytes)] * (count - 1)
        case "reduce_scatter":
            return [MessageRound(ring, slices)] * (count - 1)
        case "psum" | "psum_invariant":
            return [MessageRound(ring, slices)] * (2 * (count - 1))
        case "all_to_all":
            return [MessageRound(_shift(step, count), slices) for step in range(1, count)]
        case other:
            raise OptionError(f"traffic: what {other!r} sends is not known here; use another collective to count it.")


def _shift(step: int, count: int) -> Pairs:
    return tuple((device, (device + step) % count) for device in range(count))


def _axes(equation: JaxprEqn) -> tuple[object, ...]:
    named = equation.params.get("axis_name", equation.params.get("axes", ()))
    return tuple(named) if isinstance(named, (tuple, list)) else (named,)


def _programs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(part, ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, Jaxpr):
                yield part


def crossing(pairs: np.ndarray, devices_per_machine: int) -> int:
    """Return the most messages of ``pairs``, ``(messages, 2)``, that leave or reach one machine at the same time."""
    sender, receiver = (pairs // devices_per_machine).T
    away = sender != receiver
    if not away.any():
        return 0
    return int(max(np.bincount(sender[away]).max(), np.bincount(receiver[away]).max()))
