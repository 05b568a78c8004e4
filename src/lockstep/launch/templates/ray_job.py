"""The same job under Ray: a Python script that starts ``lockstep run`` on each node. Ray Train is not needed."""

from lockstep._errors import OptionError
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.templates.common import job_name, port_of, program_of, run_options

__all__ = ["script"]


_SCRIPT = '''\
"""Runs {name} on {nodes} x {workers} workers under Ray."""

import subprocess
import sys

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES = {nodes}
WORKERS = {workers}  # on each node
PORT = {port}  # of the first worker; the others take the ports above it
RESOURCES = {{"CPU": WORKERS}}  # of a node; {{"CPU": WORKERS, "GPU": WORKERS}} for a GPU each
RUN = {options!r}
PROGRAM = {program!r}


@ray.remote(num_cpus=RESOURCES["CPU"], num_gpus=RESOURCES.get("GPU", 0))
class Node:
    """One node of the job."""

    def address(self, rank):
        """Where its first worker is reached; the ports differ in case two nodes share a machine."""
        return f"{{ray.util.get_node_ip_address()}}:{{PORT + rank * WORKERS}}"

    def run(self, rank, hosts):
        """Run its workers, and return their exit code."""
        place = ["--hosts", ",".join(hosts), "--node-rank", str(rank)]
        return subprocess.call([sys.executable, "-m", "lockstep.cli", "run", *place, *RUN, *PROGRAM])


def main():
    """Start all nodes at once, or none."""
    ray.init()
    group = ray.util.placement_group([RESOURCES] * NODES, strategy="SPREAD")
    ray.get(group.ready())
    nodes = [
        Node.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank)).remote() for rank in range(NODES)
    ]
    hosts = ray.get([node.address.remote(rank) for rank, node in enumerate(nodes)])
    return max(ray.get([node.run.remote(rank, hosts) for rank, node in enumerate(nodes)]))


if __name__ == "__main__":
    sys.exit(main())
'''


def script(job: LaunchConfig) -> str:
    """The script, for ``python`` on a machine of the Ray cluster or for ``ray job submit``.

    Raises:
        OptionError: the number of nodes is a range.
    """
    if job.is_elastic:
        raise OptionError(
            f"--print ray: Ray gives all nodes of a placement group or none, so it needs one number, got --nnodes {job.nodes_said}."
        )
    return _SCRIPT.format(
        name=job_name(job),
        nodes=job.nodes,
        workers=job.workers,
        port=port_of(job),
        options=run_options(job),
        program=program_of(job),
    )
