"""Environment variables that workers start with: inherited ones, their share of the GPUs, and the memory allocator.

On CPUs, XLA allocates large temporaries in each step and frees them. glibc's allocator returns such memory to the system, so that
every step pays for the page faults again; the settings here keep the memory, or make its pages large.
"""

import os
import platform
import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep._errors import OptionError
from lockstep.distributed.cluster.addresses import COORDINATOR, PORT
from lockstep.distributed.cluster.env_reader import BIND, KEEP_MEMORY
from lockstep.distributed.cluster.secret import SECRET, SECRET_FILE
from lockstep.distributed.resolvers.simple import JaxClusterResolver
from lockstep.distributed.resolvers.torchrun import TorchrunClusterResolver
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.rank_assignment import NodeProcesses, ProcessName

ALLOCATORS = ("auto", "system", "jemalloc", "tcmalloc")
_LIBRARIES = {"tcmalloc": ("libtcmalloc_minimal.so*", "libtcmalloc.so*"), "jemalloc": ("libjemalloc.so*",)}
_PACKAGES = {"tcmalloc": "libtcmalloc-minimal4", "jemalloc": "libjemalloc2"}  # of Debian and Ubuntu
_SETTINGS = {
    "tcmalloc": (
        "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD",
        str(2**40),
    ),  # It prints a line for each allocation above this.
    "jemalloc": ("MALLOC_CONF", "retain:true,dirty_decay_ms:-1,muzzy_decay_ms:-1"),
}
_SEPARATORS = {":", *" \t\n"}  # between the paths in LD_PRELOAD, which no path can have
_HUGE_PAGES = "glibc.malloc.hugetlb"
_FIRST_GLIBC_WITH_HUGE_PAGES = (2, 35)


def inherited_variables(job: LaunchConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that contradict the options; a job on one machine also gets a new secret."""
    replaced = {"TF_CONFIG", COORDINATOR, PORT, *JaxClusterResolver.variables}
    if job.coordinator_address is None:  # All processes have loopback addresses.
        replaced.add(BIND)
    if job.servers is not None:
        replaced.update(TorchrunClusterResolver.variables)
    has_secret = environment.get(SECRET) or environment.get(SECRET_FILE)
    secret = {SECRET: secrets.token_hex()} if job.nodes == 1 and not job.is_elastic and not has_secret else {}
    if file := environment.get(SECRET_FILE):
        secret[SECRET_FILE] = str(Path(file).absolute())  # A program may change its directory.
    return {name: value for name, value in environment.items() if name not in replaced} | secret


def gpu_variables(gpus: list[str], process: ProcessName, processes: NodeProcesses) -> Mapping[str, str]:
    """Return the variables that give one process of this node its GPUs; processes other than workers get none.

    Example:
        >>> processes = NodeProcesses([ProcessName("ps", 0), ProcessName("worker", 0), ProcessName("worker", 1)])
        >>> gpu_variables(["0", "1"], ProcessName("worker", 1), processes)
        {'CUDA_VISIBLE_DEVICES': '1'}
        >>> gpu_variables(["0", "1"], ProcessName("ps", 0), processes)
        {'CUDA_VISIBLE_DEVICES': '', 'JAX_PLATFORMS': 'cpu'}
    """
    if process not in processes.workers:
        return {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    local, workers = processes.workers.index(process), len(processes.workers)
    if workers == 1 or len(gpus) < workers:
        return {}  # It sees the same GPUs as the supervisor.
    share = gpus[local * len(gpus) // workers : (local + 1) * len(gpus) // workers]
    return {"CUDA_VISIBLE_DEVICES": ",".join(share)}


@dataclass(frozen=True)
class MallocSelection:
    """Name of the chosen allocator, and the environment variables that select it."""

    name: str
    variables: Mapping[str, str]


def choose_allocator(
    wanted: str,
    environment: Mapping[str, str],
    folders: Iterable[Path],
    glibc: tuple[int, ...] | None,
    uses_gpus: bool = False,
) -> MallocSelection:
    """Choose the given allocator, or for "auto" the fastest that is installed; settings of the user are kept.

    Args:
        wanted: one of ``ALLOCATORS``.
        environment: environment of the workers.
        folders: to search for libraries.
        glibc: version of glibc; None: the C library is another one.
        uses_gpus: whether the workers compute on GPUs; "auto" then changes nothing.

    Raises:
        OptionError: the library is not installed.
    """
    preload = environment.get("LD_PRELOAD", "")
    if wanted == "system" or (wanted == "auto" and (uses_gpus or "malloc" in preload)):
        variables = {KEEP_MEMORY: "0"} if wanted == "system" else {}
        return MallocSelection(
            f"that of LD_PRELOAD ({preload})" if "malloc" in preload else "that of the system", variables
        )
    folders = list(folders)
    for name in ("tcmalloc", "jemalloc") if wanted == "auto" else (wanted,):
        library = _find_library(name, folders)
        if library is not None:
            return MallocSelection(f"{name} ({library})", _preload_variables(name, library, environment))
    if wanted != "auto":
        raise OptionError(
            f"--allocator {wanted}: no {' or '.join(_LIBRARIES[wanted])} in {', '.join(map(str, folders))}. Fix: install it, on Debian "
            f"and Ubuntu with 'apt install {_PACKAGES[wanted]}', or omit the option."
        )
    return _choose_glibc(environment, glibc)


def library_folders(environment: Mapping[str, str]) -> list[Path]:
    """Return the folders of shared libraries: those of LD_LIBRARY_PATH first, then of Python's environment and the system."""
    named = [part for part in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
    multiarch = f"lib/{platform.machine()}-linux-gnu"
    usual = (f"{root}/{folder}" for root in ("/usr/local", "/usr") for folder in (multiarch, "lib64", "lib"))
    return [Path(folder) for folder in (*named, f"{sys.prefix}/lib", *usual) if Path(folder).is_dir()]


def glibc_version() -> tuple[int, ...] | None:
    """Return the version of glibc; None for another C library."""
    name, version = platform.libc_ver()
    return tuple(int(part) for part in version.split(".")) if name == "glibc" else None


def _find_library(name: str, folders: Iterable[Path]) -> Path | None:
    found = (path for folder in folders for pattern in _LIBRARIES[name] for path in sorted(folder.glob(pattern)))
    return next((path for path in found if path.is_file() and not set(str(path)) & _SEPARATORS), None)


def _preload_variables(name: str, library: Path, environment: Mapping[str, str]) -> dict[str, str]:
    variable, setting = _SETTINGS[name]
    user_setting = environment.get(variable)
    if user_setting and variable == "MALLOC_CONF":
        setting = f"{setting},{user_setting}"  # The last one counts.
    elif user_setting:
        setting = user_setting
    return {"LD_PRELOAD": ":".join(filter(None, (str(library), environment.get("LD_PRELOAD")))), variable: setting}


def _choose_glibc(environment: Mapping[str, str], glibc: tuple[int, ...] | None) -> MallocSelection:
    user_tunables = environment.get("GLIBC_TUNABLES", "")
    if glibc is None or glibc < _FIRST_GLIBC_WITH_HUGE_PAGES:
        return MallocSelection("that of the system", {})
    if _HUGE_PAGES in user_tunables:
        return MallocSelection(f"glibc with {user_tunables}", {})
    tunables = ":".join(filter(None, (user_tunables, f"{_HUGE_PAGES}=1")))
    return MallocSelection("glibc with huge pages", {"GLIBC_TUNABLES": tunables})
