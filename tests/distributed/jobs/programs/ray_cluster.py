"""A cluster of Ray of two nodes with one CPU each, as processes of this machine. It prints its address, loses a node at ``lose``, and ends with its input."""

import sys

from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
node = cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
for _ in sys.stdin:
    cluster.remove_node(node, allow_graceful=False)
    print("lost", flush=True)
cluster.shutdown()
