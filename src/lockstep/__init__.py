"""Lockstep: train Keras 3 models on many devices at once, on JAX, with the names of ``tf.distribute``.

The numbers are those of one device, whatever the devices: see ``ARCHITECTURE.md``. Importing the package changes
nothing and imports neither Keras nor JAX; the first use of a name does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep._errors import (
    BackendError,
    CheckpointError,
    ClusterError,
    ContractError,
    DeterminismError,
    DeviceError,
    InputError,
    LockstepError,
    ModelError,
    NonFiniteError,
    OptionError,
    ScopeError,
)
from lockstep._version import __version__

if TYPE_CHECKING:
    from lockstep import callbacks, cluster_resolver, config, datasets, experimental, testing
    from lockstep.asynchronous.coordinator import ClusterCoordinator, RemoteValue
    from lockstep.asynchronous.per_worker import PerWorkerDataset, PerWorkerValues
    from lockstep.collectives import (
        AutoAllReduce,
        CommunicationImplementation,
        CommunicationOptions,
        CrossDeviceOps,
        HalfPrecisionAllReduce,
        HalvingDoublingAllReduce,
        HierarchicalCopyAllReduce,
        NcclAllReduce,
        ReduceOp,
        ReductionToOneDevice,
        RingAllReduce,
        TreeAllReduce,
    )
    from lockstep.data.options import InputOptions
    from lockstep.loops.context import ReplicaContext
    from lockstep.loops.current import get_replica_context, get_strategy, has_strategy, in_cross_replica_context
    from lockstep.loops.datasets import DistributedDataset, InputContext, ValueContext
    from lockstep.loops.losses import compute_average_loss, scale_regularization_loss
    from lockstep.loops.values import PerReplica
    from lockstep.scaling.asking import scaling_report
    from lockstep.strategies.central import CentralStorageStrategy
    from lockstep.strategies.mirrored import MirroredStrategy
    from lockstep.strategies.multi_worker import MultiWorkerMirroredStrategy
    from lockstep.tuning.finder import batch_size_finder

__all__ = [
    "AutoAllReduce",
    "BackendError",
    "CentralStorageStrategy",
    "CheckpointError",
    "ClusterCoordinator",
    "ClusterError",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ContractError",
    "CrossDeviceOps",
    "DeterminismError",
    "DeviceError",
    "DistributedDataset",
    "HalfPrecisionAllReduce",
    "HalvingDoublingAllReduce",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputError",
    "InputOptions",
    "LockstepError",
    "MirroredStrategy",
    "ModelError",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "NonFiniteError",
    "OptionError",
    "ParameterServerStrategy",
    "PerReplica",
    "PerWorkerDataset",
    "PerWorkerValues",
    "ReduceOp",
    "ReductionToOneDevice",
    "RemoteValue",
    "ReplicaContext",
    "RingAllReduce",
    "ScopeError",
    "TreeAllReduce",
    "ValueContext",
    "__version__",
    "batch_size_finder",
    "callbacks",
    "cluster_resolver",
    "compute_average_loss",
    "config",
    "datasets",
    "experimental",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "partitioners",
    "scale_regularization_loss",
    "scaling_report",
    "testing",
]

_LATER = {
    "AutoAllReduce": "lockstep.collectives",
    "CentralStorageStrategy": "lockstep.strategies.central",
    "ClusterCoordinator": "lockstep.asynchronous.coordinator",
    "CommunicationImplementation": "lockstep.collectives",
    "CommunicationOptions": "lockstep.collectives",
    "CrossDeviceOps": "lockstep.collectives",
    "DistributedDataset": "lockstep.loops.datasets",
    "HalfPrecisionAllReduce": "lockstep.collectives",
    "HalvingDoublingAllReduce": "lockstep.collectives",
    "HierarchicalCopyAllReduce": "lockstep.collectives",
    "InputContext": "lockstep.loops.datasets",
    "InputOptions": "lockstep.data.options",
    "MirroredStrategy": "lockstep.strategies.mirrored",
    "MultiWorkerMirroredStrategy": "lockstep.strategies.multi_worker",
    "NcclAllReduce": "lockstep.collectives",
    "ParameterServerStrategy": "lockstep.strategies.parameter_server",
    "PerReplica": "lockstep.loops.values",
    "PerWorkerDataset": "lockstep.asynchronous.per_worker",
    "PerWorkerValues": "lockstep.asynchronous.per_worker",
    "ReduceOp": "lockstep.collectives",
    "ReductionToOneDevice": "lockstep.collectives",
    "RemoteValue": "lockstep.asynchronous.coordinator",
    "ReplicaContext": "lockstep.loops.context",
    "RingAllReduce": "lockstep.collectives",
    "TreeAllReduce": "lockstep.collectives",
    "ValueContext": "lockstep.loops.datasets",
    "batch_size_finder": "lockstep.tuning.finder",
    "compute_average_loss": "lockstep.loops.losses",
    "get_replica_context": "lockstep.loops.current",
    "get_strategy": "lockstep.loops.current",
    "has_strategy": "lockstep.loops.current",
    "in_cross_replica_context": "lockstep.loops.current",
    "scale_regularization_loss": "lockstep.loops.losses",
    "scaling_report": "lockstep.scaling.asking",
}


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "cluster_resolver", "config", "datasets", "experimental", "partitioners", "testing"):
        return import_module(f"lockstep.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    import_module("lockstep._keras")  # First, because it says what to do where Keras cannot be imported.
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
