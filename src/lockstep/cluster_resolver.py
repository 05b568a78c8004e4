"""Who trains together, as schedulers and launchers say it: ``lockstep.cluster_resolver``.

The counterpart of ``tf.distribute.cluster_resolver``, with ``tf.train.ClusterSpec``.
"""

from lockstep.cluster.group import WorkerGroup
from lockstep.cluster.resolvers import (
    RESOLVERS,
    ClusterResolver,
    JaxClusterResolver,
    KubernetesClusterResolver,
    OpenMpiClusterResolver,
    RayClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    resolve,
)
from lockstep.cluster.spec import ClusterSpec

__all__ = [
    "RESOLVERS",
    "ClusterResolver",
    "ClusterSpec",
    "JaxClusterResolver",
    "KubernetesClusterResolver",
    "OpenMpiClusterResolver",
    "RayClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "WorkerGroup",
    "resolve",
]
