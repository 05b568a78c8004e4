"""The same job under torchrun: a command line for each node. Its variables are read as well as our own."""

import shlex

from lockstep.distributed.cluster.addresses import split_address
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.templates.common import job_name, port_of

__all__ = ["commands"]


def commands(job: LaunchConfig) -> str:
    """A shell script with one command line a node; nodes that meet have the same one.

    Example:
        >>> print(commands(LaunchConfig(("train.py",), workers=2)), end="")
        # node 0
        torchrun --nnodes=1 --nproc-per-node=2 --node-rank=0 --master-addr=127.0.0.1 --master-port=12421 train.py
    """
    if job.is_elastic:
        return f"# each node\n{_command(job, _meeting(job))}\n"
    return "".join(f"# node {node}\n{_command(job, _place(job, node))}\n" for node in range(job.nodes))


def _place(job: LaunchConfig, node: int) -> list[str]:
    return [f"--node-rank={node}", f"--master-addr={_host(job)}", f"--master-port={port_of(job)}"]


def _meeting(job: LaunchConfig) -> list[str]:
    limits = f"--rdzv-conf=join_timeout={job.start_seconds:.0f},last_call_timeout={job.join_seconds:.0f}"
    return ["--rdzv-backend=c10d", f"--rdzv-id={job_name(job)}", f"--rdzv-endpoint={_host(job)}:{port_of(job)}", limits]


def _command(job: LaunchConfig, where: list[str]) -> str:
    options = [f"--nnodes={job.nodes_said}", f"--nproc-per-node={job.workers}", *where]
    options += [f"--max-restarts={job.max_restarts}"] if job.max_restarts else []
    options += [f"--log-dir={shlex.quote(str(job.log_dir))}"] if job.log_dir is not None else []
    return " ".join(["torchrun", *options, *(["-m"] if job.is_module else []), shlex.join(job.program)])


def _host(job: LaunchConfig) -> str:
    if job.meeting_address is not None:
        return shlex.quote(split_address("coordinator", job.meeting_address)[0])
    return '"${FIRST_NODE:?the host of node 0}"' if job.nodes > 1 else "127.0.0.1"
