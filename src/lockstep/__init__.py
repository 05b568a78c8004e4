"""Lockstep: train Keras 3 models on many devices at once, on JAX, with the names of ``tf.distribute``.

Results do not depend on the devices: see ``ARCHITECTURE.md``. Importing the package has no side effects and imports neither
Keras nor JAX; the first use of a name does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep._version import __version__ as __version__

# All public names, by the module that defines them. They are imported when they are first used.
_PUBLIC = {
    "lockstep": ("callbacks", "cluster_resolver", "config", "datasets", "experimental", "partitioners", "testing"),
    "lockstep._errors": (
        "BackendError",
        "CheckpointError",
        "ClusterError",
        "ContractError",
        "DeterminismError",
        "DeviceError",
        "InputError",
        "LockstepError",
        "ModelError",
        "NonFiniteError",
        "OptionError",
        "ScopeError",
    ),
    "lockstep.collectives": (
        "AutoAllReduce",
        "CommunicationImplementation",
        "CommunicationOptions",
        "CrossDeviceOps",
        "HalfPrecisionAllReduce",
        "HalvingDoublingAllReduce",
        "HierarchicalCopyAllReduce",
        "NcclAllReduce",
        "ReduceOp",
        "ReductionToOneDevice",
        "RingAllReduce",
        "TreeAllReduce",
    ),
    "lockstep.custom_loops.distributed_dataset": ("DistributedDataset", "InputContext", "ValueContext"),
    "lockstep.custom_loops.losses": ("compute_average_loss", "scale_regularization_loss"),
    "lockstep.custom_loops.strategy_context": (
        "get_replica_context",
        "get_strategy",
        "has_strategy",
        "in_cross_replica_context",
    ),
    "lockstep.custom_loops.per_replica": ("PerReplica",),
    "lockstep.custom_loops.replica_context": ("ReplicaContext",),
    "lockstep.data.input_options": ("InputOptions",),
    "lockstep.parameter_server.cluster_coordinator": (
        "ClusterCoordinator",
        "PerWorkerDataset",
        "PerWorkerValues",
        "RemoteValue",
    ),
    "lockstep.strategies.central_storage": ("CentralStorageStrategy",),
    "lockstep.strategies.mirrored": ("MirroredStrategy",),
    "lockstep.strategies.model_parallel": ("ModelParallelStrategy",),
    "lockstep.strategies.multi_worker": ("MultiWorkerMirroredStrategy",),
    "lockstep.strategies.parameter_server": ("ParameterServerStrategy",),
    "lockstep.tools.plan.planner": ("plan",),
    "lockstep.tools.scaling.api": ("scaling_report",),
    "lockstep.tuning.batch_size_finder": ("batch_size_finder",),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

if TYPE_CHECKING:  # Type checkers need imports; tests/test_public_api.py compares them with the table.
    from lockstep import callbacks as callbacks
    from lockstep import cluster_resolver as cluster_resolver
    from lockstep import config as config
    from lockstep import datasets as datasets
    from lockstep import experimental as experimental
    from lockstep import partitioners as partitioners
    from lockstep import testing as testing
    from lockstep._errors import BackendError as BackendError
    from lockstep._errors import CheckpointError as CheckpointError
    from lockstep._errors import ClusterError as ClusterError
    from lockstep._errors import ContractError as ContractError
    from lockstep._errors import DeterminismError as DeterminismError
    from lockstep._errors import DeviceError as DeviceError
    from lockstep._errors import InputError as InputError
    from lockstep._errors import LockstepError as LockstepError
    from lockstep._errors import ModelError as ModelError
    from lockstep._errors import NonFiniteError as NonFiniteError
    from lockstep._errors import OptionError as OptionError
    from lockstep._errors import ScopeError as ScopeError
    from lockstep.collectives import AutoAllReduce as AutoAllReduce
    from lockstep.collectives import CommunicationImplementation as CommunicationImplementation
    from lockstep.collectives import CommunicationOptions as CommunicationOptions
    from lockstep.collectives import CrossDeviceOps as CrossDeviceOps
    from lockstep.collectives import HalfPrecisionAllReduce as HalfPrecisionAllReduce
    from lockstep.collectives import HalvingDoublingAllReduce as HalvingDoublingAllReduce
    from lockstep.collectives import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
    from lockstep.collectives import NcclAllReduce as NcclAllReduce
    from lockstep.collectives import ReduceOp as ReduceOp
    from lockstep.collectives import ReductionToOneDevice as ReductionToOneDevice
    from lockstep.collectives import RingAllReduce as RingAllReduce
    from lockstep.collectives import TreeAllReduce as TreeAllReduce
    from lockstep.custom_loops.distributed_dataset import DistributedDataset as DistributedDataset
    from lockstep.custom_loops.distributed_dataset import InputContext as InputContext
    from lockstep.custom_loops.distributed_dataset import ValueContext as ValueContext
    from lockstep.custom_loops.losses import compute_average_loss as compute_average_loss
    from lockstep.custom_loops.losses import scale_regularization_loss as scale_regularization_loss
    from lockstep.custom_loops.per_replica import PerReplica as PerReplica
    from lockstep.custom_loops.replica_context import ReplicaContext as ReplicaContext
    from lockstep.custom_loops.strategy_context import get_replica_context as get_replica_context
    from lockstep.custom_loops.strategy_context import get_strategy as get_strategy
    from lockstep.custom_loops.strategy_context import has_strategy as has_strategy
    from lockstep.custom_loops.strategy_context import in_cross_replica_context as in_cross_replica_context
    from lockstep.data.input_options import InputOptions as InputOptions
    from lockstep.parameter_server.cluster_coordinator import ClusterCoordinator as ClusterCoordinator
    from lockstep.parameter_server.cluster_coordinator import PerWorkerDataset as PerWorkerDataset
    from lockstep.parameter_server.cluster_coordinator import PerWorkerValues as PerWorkerValues
    from lockstep.parameter_server.cluster_coordinator import RemoteValue as RemoteValue
    from lockstep.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
    from lockstep.strategies.mirrored import MirroredStrategy as MirroredStrategy
    from lockstep.strategies.model_parallel import ModelParallelStrategy as ModelParallelStrategy
    from lockstep.strategies.multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from lockstep.strategies.parameter_server import ParameterServerStrategy as ParameterServerStrategy
    from lockstep.tools.plan.planner import plan as plan
    from lockstep.tools.scaling.api import scaling_report as scaling_report
    from lockstep.tuning.batch_size_finder import batch_size_finder as batch_size_finder
else:
    __all__ = sorted([*_MODULE_OF, "__version__"])

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
        module = _MODULE_OF[name]
        if module == __name__:
            return import_module(f"lockstep.{name}")
        if module != "lockstep._errors":
            import_module("lockstep._keras.trainer")  # First: its error says what to do if Keras cannot be imported.
        return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
