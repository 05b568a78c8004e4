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
    from lockstep.custom_loops.ambient import get_replica_context, get_strategy, has_strategy, in_cross_replica_context
    from lockstep.custom_loops.distributed_dataset import DistributedDataset, InputContext, ValueContext
    from lockstep.custom_loops.loss_scaling import compute_average_loss, scale_regularization_loss
    from lockstep.custom_loops.per_replica import PerReplica
    from lockstep.custom_loops.replica_context import ReplicaContext
    from lockstep.data.fit_entry import InputOptions
    from lockstep.parameter_server.cluster_coordinator import ClusterCoordinator, RemoteValue
    from lockstep.parameter_server.per_worker import PerWorkerDataset, PerWorkerValues
    from lockstep.strategies.central_storage import CentralStorageStrategy
    from lockstep.strategies.mirrored import MirroredStrategy
    from lockstep.strategies.multi_worker import MultiWorkerMirroredStrategy
    from lockstep.tools.scaling.api import scaling_report
    from lockstep.tuning.batch_size_finder import batch_size_finder

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
    "CentralStorageStrategy": "lockstep.strategies.central_storage",
    "ClusterCoordinator": "lockstep.parameter_server.cluster_coordinator",
    "CommunicationImplementation": "lockstep.collectives",
    "CommunicationOptions": "lockstep.collectives",
    "CrossDeviceOps": "lockstep.collectives",
    "DistributedDataset": "lockstep.custom_loops.distributed_dataset",
    "HalfPrecisionAllReduce": "lockstep.collectives",
    "HalvingDoublingAllReduce": "lockstep.collectives",
    "HierarchicalCopyAllReduce": "lockstep.collectives",
    "InputContext": "lockstep.custom_loops.distributed_dataset",
    "InputOptions": "lockstep.data.fit_entry",
    "MirroredStrategy": "lockstep.strategies.mirrored",
    "MultiWorkerMirroredStrategy": "lockstep.strategies.multi_worker",
    "NcclAllReduce": "lockstep.collectives",
    "ParameterServerStrategy": "lockstep.strategies.parameter_server",
    "PerReplica": "lockstep.custom_loops.per_replica",
    "PerWorkerDataset": "lockstep.parameter_server.per_worker",
    "PerWorkerValues": "lockstep.parameter_server.per_worker",
    "ReduceOp": "lockstep.collectives",
    "ReductionToOneDevice": "lockstep.collectives",
    "RemoteValue": "lockstep.parameter_server.cluster_coordinator",
    "ReplicaContext": "lockstep.custom_loops.replica_context",
    "RingAllReduce": "lockstep.collectives",
    "TreeAllReduce": "lockstep.collectives",
    "ValueContext": "lockstep.custom_loops.distributed_dataset",
    "batch_size_finder": "lockstep.tuning.batch_size_finder",
    "compute_average_loss": "lockstep.custom_loops.loss_scaling",
    "get_replica_context": "lockstep.custom_loops.ambient",
    "get_strategy": "lockstep.custom_loops.ambient",
    "has_strategy": "lockstep.custom_loops.ambient",
    "in_cross_replica_context": "lockstep.custom_loops.ambient",
    "scale_regularization_loss": "lockstep.custom_loops.loss_scaling",
    "scaling_report": "lockstep.tools.scaling.api",
}


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "cluster_resolver", "config", "datasets", "experimental", "partitioners", "testing"):
        return import_module(f"lockstep.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    import_module("lockstep._keras.trainer")  # First, because it says what to do where Keras cannot be imported.
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
