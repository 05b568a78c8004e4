"""All-reduce algorithms for gradients. A new one is a file here and a line in ``ALGORITHMS``, which the common tests read."""

import inspect
from collections.abc import Callable

import jax

from lockstep._errors import OptionError, instance_of, shown
from lockstep.collectives.base import (
    CommunicationImplementation,
    CommunicationOptions,
    CrossDeviceOps,
    FunctionAllReduce,
    ReduceOp,
    all_reduce,
)
from lockstep.collectives.platform import AutoAllReduce, HalfPrecisionAllReduce, NcclAllReduce
from lockstep.collectives.point_to_point import (
    HalvingDoublingAllReduce,
    HierarchicalCopyAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from lockstep.collectives.tree import TreeAllReduce

__all__ = [
    "ALGORITHMS",
    "AutoAllReduce",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "HalfPrecisionAllReduce",
    "HalvingDoublingAllReduce",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "Ops",
    "ReduceOp",
    "ReductionToOneDevice",
    "RingAllReduce",
    "TreeAllReduce",
    "all_reduce",
    "choose_cross_device_ops",
    "resolve_cross_device_ops",
]

ALGORITHMS: dict[str, type[CrossDeviceOps]] = {
    "auto": AutoAllReduce,
    "half_precision": HalfPrecisionAllReduce,
    "halving_doubling": HalvingDoublingAllReduce,
    "hierarchical_copy": HierarchicalCopyAllReduce,
    "nccl": NcclAllReduce,
    "reduce_to_one": ReductionToOneDevice,
    "ring": RingAllReduce,
    "tree": TreeAllReduce,
}

Ops = CrossDeviceOps | type[CrossDeviceOps] | Callable[[jax.Array, str], jax.Array] | str


def resolve_cross_device_ops(ops: Ops | None) -> CrossDeviceOps:
    """Return the instance for a ``cross_device_ops`` argument.

    Args:
        ops: an instance, a class (tutorials pass it without parentheses), a name in ``ALGORITHMS``, a function
            ``(array, axis) -> array``, or None for the default.

    Raises:
        OptionError: it is something else.
    """
    if ops is None:
        return AutoAllReduce()
    if isinstance(ops, str) and ops in ALGORITHMS:
        return ALGORITHMS[ops]()
    if isinstance(ops, type) and issubclass(ops, CrossDeviceOps) and not inspect.isabstract(ops):
        return ops()
    if isinstance(ops, CrossDeviceOps):
        return ops
    if callable(ops) and not isinstance(ops, type):
        return FunctionAllReduce(ops)
    names = ", ".join(map(repr, ALGORITHMS))
    raise OptionError(
        f"cross_device_ops: expected one of {names}, a lockstep.CrossDeviceOps such as lockstep.RingAllReduce(), or a "
        f"function (array, axis) -> array, got {shown(ops)}."
    )


def choose_cross_device_ops(ops: Ops | None, options: CommunicationOptions) -> CrossDeviceOps:
    """Return the operation of a strategy in one process, from ``cross_device_ops`` or from the options.

    Raises:
        OptionError: both are given, or the options are of another type or have a ``timeout_seconds``.
    """
    instance_of(CommunicationOptions, "communication_options", options, "lockstep.CommunicationOptions(…)")
    if ops is not None:
        raise OptionError(
            f"cross_device_ops={ops!r} and communication_options={options!r} both say how gradients travel. Fix: leave one "
            "out; an operation takes bytes_per_pack itself, for example lockstep.RingAllReduce(bytes_per_pack=…)."
        )
    if options.timeout_seconds is not None:
        raise OptionError(
            f"communication_options: timeout_seconds={options.timeout_seconds!r} is for collectives between processes. "
            "The devices of one process are waited for by XLA, with limits of its own. Fix: leave timeout_seconds out."
        )
    by_implementation = {
        CommunicationImplementation.AUTO: AutoAllReduce,
        CommunicationImplementation.RING: RingAllReduce,
        CommunicationImplementation.NCCL: NcclAllReduce,
    }
    chosen = by_implementation[CommunicationImplementation(options.implementation)]
    return chosen(bytes_per_pack=options.bytes_per_pack)
