"""What the scripts for schedulers share."""

import re

from lockstep.distributed.cluster.addresses import split_address
from lockstep.distributed.cluster.ports import DEFAULT_PORT
from lockstep.launch.launch_config import LaunchConfig

__all__ = ["job_name", "port_of", "program_of", "run_options"]


def run_options(job: LaunchConfig) -> list[str]:
    """The options of ``lockstep run`` that are the same on each node, but for where the nodes are."""
    options = ["-n", str(job.workers), "--nnodes", job.nodes_said]
    options += ["--max-restarts", str(job.max_restarts)] if job.max_restarts else []
    if job.is_elastic:
        options += ["--join-seconds", f"{job.join_seconds:g}", "--start-seconds", f"{job.start_seconds:g}"]
    options += ["--timeout", f"{job.timeout:g}"] if job.timeout is not None else []
    options += ["--grace", f"{job.grace:g}"]
    options += ["--allocator", job.allocator]
    options += ["--log-dir", str(job.log_dir)] if job.log_dir is not None else []
    return options + (["--tee"] if job.tee else [])


def program_of(job: LaunchConfig) -> list[str]:
    """The program and its arguments, as they end the command line."""
    return [*(["-m"] if job.is_module else ["--"]), *job.program]


def job_name(job: LaunchConfig) -> str:
    """A name for the job that every scheduler takes: at most 40 lower-case letters, digits and dashes, a letter first.

    Example:
        >>> job_name(LaunchConfig(("experiments/Train_2.py",))), job_name(LaunchConfig(("2.py",)))
        ('train-2', 'job-2')
    """
    program = job.program[0].rpartition("/")[2].removesuffix(".py")
    name = re.sub("[^a-z0-9]+", "-", program.lower()).strip("-") or "lockstep"
    return (name if name[0].isalpha() else f"job-{name}")[:40].rstrip("-")


def port_of(job: LaunchConfig) -> int:
    """The port of worker 0."""
    return DEFAULT_PORT if job.meeting_address is None else split_address("coordinator", job.meeting_address)[1]
