"""How much memory a training step may take: what an accelerator says, or what this machine has left."""

from collections.abc import Sequence

import jax

from lockstep.devices.memory import host_memory

__all__ = ["free_memory"]

_SHARE = 0.9  # of what is free; the rest is for what no compiler counts


def free_memory(devices: Sequence[jax.Device], processes_here: int = 1) -> int | None:
    """Bytes that a step may take: on each accelerator, or on this machine for all CPU devices of this process together.

    Args:
        devices: of this process, of one platform.
        processes_here: number of processes of the job that share this machine's memory.

    Returns:
        Nine tenths of what is free; None where nobody says.
    """
    if devices[0].platform == "cpu":
        free = host_memory().free
        return None if free is None else int(_SHARE * free / processes_here)
    known = [memory for device in devices if (memory := device.memory_stats())]
    left = [memory["bytes_limit"] - memory["bytes_in_use"] for memory in known if "bytes_limit" in memory]
    return int(_SHARE * min(left)) if left else None
