"""Parts that the printed job scripts share: the options and the program of ``lockstep run``, the name of the job, the port of worker 0."""

import re

from lockstep.distributed.cluster.addresses import DEFAULT_PORT, split_address
from lockstep.launch.launch_config import LaunchConfig


def run_options(job: LaunchConfig) -> list[str]:
    """Return the options of ``lockstep run`` that are the same on each node, without the addresses of the nodes."""
    options = ["-n", str(job.workers), "--nnodes", job.nnodes]
    options += ["--max-restarts", str(job.max_restarts)] if job.max_restarts else []
    if job.is_elastic:
        options += ["--join-seconds", f"{job.join_seconds:g}", "--start-seconds", f"{job.start_seconds:g}"]
    options += ["--timeout", f"{job.timeout:g}"] if job.timeout is not None else []
    options += ["--grace", f"{job.grace:g}"]
    options += ["--allocator", job.allocator]
    options += ["--log-dir", str(job.log_dir)] if job.log_dir is not None else []
    return options + (["--tee"] if job.tee else [])


def program_words(job: LaunchConfig) -> list[str]:
    """Return the program and its arguments, the end of the command line."""
    return [*(["-m"] if job.is_module else ["--"]), *job.program]


def job_name(job: LaunchConfig) -> str:
    """Return a name for the job that every scheduler accepts: a letter, then at most 39 lower-case letters, digits and dashes.

    Example:
        >>> job_name(LaunchConfig(("experiments/Train_2.py",))), job_name(LaunchConfig(("2.py",)))
        ('train-2', 'job-2')
    """
    program = job.program[0].rpartition("/")[2].removesuffix(".py")
    name = re.sub("[^a-z0-9]+", "-", program.lower()).strip("-") or "lockstep"
    return (name if name[0].isalpha() else f"job-{name}")[:40].rstrip("-")


def first_port(job: LaunchConfig) -> int:
    """Return the port of worker 0."""
    return DEFAULT_PORT if job.coordinator_address is None else split_address("coordinator", job.coordinator_address)[1]
