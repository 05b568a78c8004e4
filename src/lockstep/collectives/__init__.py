"""All-reduce algorithms for gradients, their base classes, and ``registry``, which finds the one that a user's argument means."""

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
    ReduceOp,
)
from lockstep.collectives.fixed_tree_sum import TreeAllReduce
from lockstep.collectives.registry import ALGORITHMS, Ops, ops_from_argument, ops_from_options
from lockstep.collectives.xla_all_reduce import AutoAllReduce, HalfPrecisionAllReduce, NcclAllReduce

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
    "ops_from_argument",
    "ops_from_options",
]
