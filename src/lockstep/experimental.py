"""Names that older tutorials use, as ``tf.distribute.experimental`` had them."""

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
        cluster_resolver: who takes part; by default what ``TF_CONFIG`` or the scheduler says.

    Raises:
        ClusterError: a worker is missing, another one or differently started; or JAX runs already.
        OptionError: an argument is something else.

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
