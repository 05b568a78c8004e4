"""The GPUs of this node, cut into one share a worker, so that no two workers take the same one. Who does not compute gets none."""

import re
from collections.abc import Mapping
from pathlib import Path

from lockstep.launch.process_names import ProcessName, ProcessNames

__all__ = ["gpu_variables", "gpus_of", "share"]

_DEVICES = Path("/dev")
_ACCELERATED = {"cuda", "gpu"}  # as JAX names platforms


def gpus_of(environment: Mapping[str, str], devices: Path = _DEVICES) -> list[str]:
    """Names of the GPUs that programs may use: those of CUDA_VISIBLE_DEVICES, or else all there are.

    Args:
        environment: JAX_PLATFORMS may say that no GPU is wanted.
        devices: the folder that drivers put their devices into.
    """
    platforms = environment.get("JAX_PLATFORMS")
    if platforms and not _ACCELERATED & set(platforms.split(",")):
        return []
    names = [path.name for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not names:
        return [str(number) for number in range(len(names))]
    return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]


def gpu_variables(gpus: list[str], task: ProcessName, tasks: ProcessNames) -> Mapping[str, str]:
    """What one process of this node is told of them.

    Example:
        >>> tasks = ProcessNames([ProcessName("ps", 0), ProcessName("worker", 0), ProcessName("worker", 1)])
        >>> gpu_variables(["0", "1"], ProcessName("worker", 1), tasks)
        {'CUDA_VISIBLE_DEVICES': '1'}
        >>> gpu_variables(["0", "1"], ProcessName("ps", 0), tasks)
        {'CUDA_VISIBLE_DEVICES': '', 'JAX_PLATFORMS': 'cpu'}
    """
    if task not in tasks.workers:
        return {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    own = share(gpus, tasks.workers.index(task), len(tasks.workers))
    return {} if own is None else {"CUDA_VISIBLE_DEVICES": own}


def share(gpus: list[str], local: int, workers: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of one worker; None: it sees what the supervisor sees.

    Args:
        gpus: names of the GPUs of this node.
        local: the worker's number on this node.
        workers: number of workers on this node.

    Example:
        >>> share(["0", "1", "2"], 1, 2)
        '1,2'
    """
    if workers == 1 or len(gpus) < workers:
        return None
    return ",".join(gpus[local * len(gpus) // workers : (local + 1) * len(gpus) // workers])
