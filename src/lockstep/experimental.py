"""Older names, as in ``tf.distribute.experimental``."""

# First: its error says what to do if Keras cannot be imported.
from lockstep import _keras as _keras
from lockstep import partitioners
from lockstep.collectives import CommunicationImplementation, CommunicationOptions
from lockstep.custom_loops.distributed_dataset import ValueContext
from lockstep.distributed.resolvers import ClusterResolver
from lockstep.parameter_server.cluster_coordinator import ClusterCoordinator
from lockstep.strategies import multi_worker
from lockstep.strategies.central_storage import CentralStorageStrategy
from lockstep.strategies.parameter_server import ParameterServerStrategy

__all__ = [
    "CentralStorageStrategy",
    "ClusterCoordinator",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "ValueContext",
    "partitioners",
]

CollectiveCommunication = CommunicationImplementation


class MultiWorkerMirroredStrategy(multi_worker.MultiWorkerMirroredStrategy):
    """The older form of :class:`lockstep.MultiWorkerMirroredStrategy`.

    Args:
        communication: ``AUTO``, ``RING`` or ``NCCL``: a member of :class:`CollectiveCommunication` or its name.
        cluster_resolver: gives the workers' addresses; by default from ``TF_CONFIG`` or the scheduler.

    Raises:
        ClusterError: a worker is missing, was started differently or belongs to another job; or JAX has started already without
            the other workers, or over other processes than the resolver says.
        OptionError: an argument has another type or value.

    Example:
        >>> import lockstep
        >>> lockstep.experimental.MultiWorkerMirroredStrategy("RING").is_chief
        True
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        super().__init__(cluster_resolver, CommunicationOptions(implementation=communication))
