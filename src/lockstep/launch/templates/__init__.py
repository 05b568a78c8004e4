"""Scripts for schedulers that do what ``lockstep run`` would do: one file each, from a job to a text."""

from collections.abc import Callable, Mapping

from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.templates import kubernetes_job, ray_job, slurm_job, torchrun_commands

__all__ = ["PRINTERS"]

PRINTERS: Mapping[str, Callable[[LaunchConfig], str]] = {
    "slurm": slurm_job.script,
    "kubernetes": kubernetes_job.manifest,
    "ray": ray_job.script,
    "torchrun": torchrun_commands.commands,
}
