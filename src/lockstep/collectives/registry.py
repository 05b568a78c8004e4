"""The all-reduce algorithms by name, and the one that a user's argument means. A new one is a class in this package and a line in ``ALGORITHMS``."""

import inspect
from collections.abc import Callable

import jax

from lockstep._errors import OptionError, shown
from lockstep.collectives.all_reduce_algorithms import (
    HalvingDoublingAllReduce,
    HierarchicalCopyAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from lockstep.collectives.base import (
    CommunicationImplementation,
    CommunicationOptions,
    CrossDeviceOps,
    FunctionAllReduce,
)
from lockstep.collectives.fixed_tree_sum import TreeAllReduce
from lockstep.collectives.xla_all_reduce import AutoAllReduce, HalfPrecisionAllReduce, NcclAllReduce

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
_BY_IMPLEMENTATION = {
    CommunicationImplementation.AUTO: AutoAllReduce,
    CommunicationImplementation.RING: RingAllReduce,
    CommunicationImplementation.NCCL: NcclAllReduce,
}

Ops = CrossDeviceOps | type[CrossDeviceOps] | Callable[[jax.Array, str], jax.Array] | str


def ops_from_argument(ops: Ops | None) -> CrossDeviceOps:
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
        f"function (array, axis) -> array, got {shown(ops)}. Fix: pass one of these, or leave it out."
    )


def ops_from_options(options: CommunicationOptions) -> CrossDeviceOps:
    """Return the operation that a ``communication_options`` argument means."""
    chosen = _BY_IMPLEMENTATION[CommunicationImplementation(options.implementation)]
    return chosen(bytes_per_pack=options.bytes_per_pack)
