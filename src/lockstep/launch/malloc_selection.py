"""The memory allocator that workers start with: only the environment of a new process can choose it.

On CPUs, XLA asks for large temporaries in each step and gives them back. glibc's allocator hands such memory back to the
system, so that every step pays for the page faults anew; the settings here keep it, or make its pages large.
"""

import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep._errors import OptionError
from lockstep.devices.memory import SWITCH

__all__ = ["CHOICES", "MallocSelection", "choose_allocator", "library_folders"]

CHOICES = ("auto", "system", "jemalloc", "tcmalloc")
_LIBRARIES = {"tcmalloc": ("libtcmalloc_minimal.so*", "libtcmalloc.so*"), "jemalloc": ("libjemalloc.so*",)}
_PACKAGES = {"tcmalloc": "libtcmalloc-minimal4", "jemalloc": "libjemalloc2"}  # of Debian and Ubuntu
_SETTINGS = {
    "tcmalloc": ("TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD", str(2**40)),  # It prints a line for each above this.
    "jemalloc": ("MALLOC_CONF", "retain:true,dirty_decay_ms:-1,muzzy_decay_ms:-1"),
}
_HUGE_PAGES = "glibc.malloc.hugetlb"
_FIRST_GLIBC_WITH_HUGE_PAGES = (2, 35)


@dataclass(frozen=True)
class MallocSelection:
    """What was chosen, and the environment variables that choose it."""

    name: str
    variables: Mapping[str, str]


def choose_allocator(
    wanted: str,
    environment: Mapping[str, str],
    folders: Iterable[Path],
    glibc: tuple[int, ...] | None,
    uses_gpus: bool = False,
) -> MallocSelection:
    """The allocator that is wanted, or for "auto" the fastest that is there; what the user has set stays.

    Args:
        wanted: one of ``CHOICES``.
        environment: of the workers.
        folders: where libraries lie.
        glibc: version of the C library; None: it is another one.
        uses_gpus: whether the workers compute on GPUs; "auto" then changes nothing.

    Raises:
        OptionError: the library is not there.
    """
    own = environment.get("LD_PRELOAD", "")
    if wanted == "system" or (wanted == "auto" and (uses_gpus or "malloc" in own)):
        as_it_is = {SWITCH: "0"} if wanted == "system" else {}
        return MallocSelection(f"that of LD_PRELOAD ({own})" if "malloc" in own else "that of the system", as_it_is)
    folders = list(folders)
    for name in ("tcmalloc", "jemalloc") if wanted == "auto" else (wanted,):
        library = _find(name, folders)
        if library is not None:
            return MallocSelection(f"{name} ({library})", _preload(name, library, environment))
    if wanted != "auto":
        raise OptionError(
            f"--allocator {wanted}: no {' or '.join(_LIBRARIES[wanted])} in {', '.join(map(str, folders))}; on Debian and "
            f"Ubuntu 'apt install {_PACKAGES[wanted]}' brings it, or leave the option out."
        )
    return _system(environment, glibc)


def library_folders(environment: Mapping[str, str]) -> list[Path]:
    """Where the libraries of this machine lie: those of the user first, then of Python's environment and the system's."""
    named = [part for part in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
    usual = (f"{root}/{folder}" for root in ("/usr/local", "/usr") for folder in (_own_architecture(), "lib64", "lib"))
    return [Path(folder) for folder in (*named, f"{sys.prefix}/lib", *usual) if Path(folder).is_dir()]


def glibc_version() -> tuple[int, ...] | None:
    """The version of glibc; None for another C library."""
    name, version = platform.libc_ver()
    return tuple(int(part) for part in version.split(".")) if name == "glibc" else None


def _own_architecture() -> str:
    return f"lib/{platform.machine()}-linux-gnu"


def _find(name: str, folders: Iterable[Path]) -> Path | None:
    found = (path for folder in folders for pattern in _LIBRARIES[name] for path in sorted(folder.glob(pattern)))
    return next(found, None)


def _preload(name: str, library: Path, environment: Mapping[str, str]) -> dict[str, str]:
    variable, setting = _SETTINGS[name]
    own = environment.get(variable)
    if own and variable == "MALLOC_CONF":
        setting = f"{setting},{own}"  # The last one counts.
    elif own:
        setting = own
    return {"LD_PRELOAD": ":".join(filter(None, (str(library), environment.get("LD_PRELOAD")))), variable: setting}


def _system(environment: Mapping[str, str], glibc: tuple[int, ...] | None) -> MallocSelection:
    own = environment.get("GLIBC_TUNABLES", "")
    if glibc is None or glibc < _FIRST_GLIBC_WITH_HUGE_PAGES:
        return MallocSelection("that of the system", {})
    if _HUGE_PAGES in own:
        return MallocSelection(f"glibc with {own}", {})
    tunables = ":".join(filter(None, (own, f"{_HUGE_PAGES}=1")))
    return MallocSelection("glibc with huge pages", {"GLIBC_TUNABLES": tunables})
