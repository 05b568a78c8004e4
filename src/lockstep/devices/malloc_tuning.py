"""Memory that large temporaries leave is kept by the process and used again, on CPUs with glibc.

In each step XLA asks for large pieces of memory and gives them back. glibc takes pieces of that size from the system, and
returns them to it, so that every step pays for thousands of page faults. ``mallopt`` has glibc keep them, which a process may
do at any time; the earlier, the more of its threads share one heap. ``docs/decisions/0027`` has the figures.
"""

import ctypes
import os
import platform
from collections.abc import Mapping
from pathlib import Path

__all__ = ["NVIDIA_GPUS", "SWITCH", "gives_memory_back", "keep_memory"]

SWITCH = "LOCKSTEP_KEEP_MEMORY"  # "0" leaves the allocator as it is
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")  # A machine that has some trains on them.
_ARENAS, _MAPPINGS, _TRIM_ABOVE, _GROW_BY = (
    -8,
    -4,
    -1,
    -2,
)  # mallopt(3): M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
_SETTINGS = {_ARENAS: 1, _MAPPINGS: 0, _TRIM_ABOVE: 2**31 - 1, _GROW_BY: 2**26}


def keep_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Have glibc keep freed memory; nothing happens with another allocator, or where the user has set this one.

    Args:
        environ: may say so: ``LOCKSTEP_KEEP_MEMORY=0``, ``LD_PRELOAD``, ``MALLOC_…`` or ``GLIBC_TUNABLES``.

    Returns:
        Whether it does now.
    """
    if platform.libc_ver()[0] != "glibc" or NVIDIA_GPUS.exists() or _is_set_by_the_user(environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(parameter, value) for parameter, value in _SETTINGS.items()])


def gives_memory_back(environ: Mapping[str, str] = os.environ) -> str | None:
    """Why this process returns freed memory to the system, though it could keep it; None where it keeps it, or the user has chosen."""
    if environ.get(SWITCH) == "0":
        return None if _is_set_by_the_user({**environ, SWITCH: ""}) else f"{SWITCH}=0"
    if platform.libc_ver()[0] != "glibc" and "malloc" not in environ.get("LD_PRELOAD", ""):
        return f"the C library is {platform.libc_ver()[0] or 'none that keeps it'}"
    return None


def _is_set_by_the_user(environ: Mapping[str, str]) -> bool:
    return (
        environ.get(SWITCH) == "0"
        or "malloc" in environ.get("LD_PRELOAD", "")
        or any(name.startswith("MALLOC_") for name in environ)
        or any(f"glibc.malloc.{name}" in environ.get("GLIBC_TUNABLES", "") for name in ("arena", "mmap", "trim", "top"))
    )
