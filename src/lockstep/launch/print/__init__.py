"""Scripts for schedulers that do what ``lockstep run`` would do: one file each, from a job to a text."""

from collections.abc import Callable, Mapping

from lockstep.launch.job import Job
from lockstep.launch.print import kubernetes, ray, slurm, torchrun

__all__ = ["PRINTERS"]

PRINTERS: Mapping[str, Callable[[Job], str]] = {
    "slurm": slurm.script,
    "kubernetes": kubernetes.manifest,
    "ray": ray.script,
    "torchrun": torchrun.commands,
}
