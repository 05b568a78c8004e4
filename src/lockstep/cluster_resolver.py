"""Cluster resolvers: the processes of a job, from the variables of schedulers and launchers.

The counterpart of ``tf.distribute.cluster_resolver``, with ``tf.train.ClusterSpec``. They are in ``distributed/resolvers``.
"""

from lockstep.distributed.cluster.membership import ClusterSpec, WorkerGroup
from lockstep.distributed.resolvers import (
    RESOLVERS,
    ClusterResolver,
    JaxClusterResolver,
    KubernetesClusterResolver,
    LeaderWorkerSetClusterResolver,
    OpenMpiClusterResolver,
    RayClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    TpuPodClusterResolver,
    resolve,
)

__all__ = [
    "RESOLVERS",
    "ClusterResolver",
    "ClusterSpec",
    "JaxClusterResolver",
    "KubernetesClusterResolver",
    "LeaderWorkerSetClusterResolver",
    "OpenMpiClusterResolver",
    "RayClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "TpuPodClusterResolver",
    "WorkerGroup",
    "resolve",
]
