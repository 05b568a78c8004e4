"""Environment variables of a job: a reader whose errors name the variable and its value; network options; the accelerators that may be used."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lockstep._errors import ClusterError, is_decimal, shown
from lockstep.distributed.cluster.secret import read_secret

# Set by the launcher, or by the user for all processes of a job.
GENERATION = "LOCKSTEP_GENERATION"  # How many times the launcher has restarted the job.
JOB_GENERATION = "LOCKSTEP_JOB_GENERATION"  # The same if all launchers count together, else 0.
OPEN = "LOCKSTEP_OPEN"  # "1": processes without a secret may talk to other machines.
BIND = "LOCKSTEP_BIND"  # Address of this machine at which this process listens.
KEEP_MEMORY = "LOCKSTEP_KEEP_MEMORY"  # "0" leaves the allocator as it is.

_DEVICES = Path("/dev")
_GPU_PLATFORMS = {"cuda", "gpu"}  # names of JAX
_TPU_FILES = ("accel[0-9]*", "vfio/[0-9]*")


@dataclass(frozen=True)
class EnvReader:
    """The variables of one scheduler.

    Args:
        source: the scheduler, for messages.
        environ: names and values; nothing else is read, and nothing is written.
        fix: how to set a missing variable, in a sentence that follows "Fix: ".
    """

    source: str
    environ: Mapping[str, str]
    fix: str

    def text(self, name: str, meaning: str) -> str:
        """Return a variable that must be set and not blank.

        Args:
            name: name of the variable.
            meaning: a phrase for the error: ``"the number of processes"``.

        Raises:
            ClusterError: it is not set, or blank.
        """
        value = self.environ.get(name)
        if value is None or not value.strip():
            state = "is not set" if value is None else f"is {value!r}"
            raise ClusterError(f"{self.source}: {name}, {meaning}, {state}. Fix: {self.fix}")
        return value.strip()

    def integer(self, name: str, meaning: str, minimum: int = 0, maximum: int | None = None) -> int:
        """Return a variable that must be a whole number from ``minimum`` to ``maximum``.

        Raises:
            ClusterError: it is not set, or not such a number.
        """
        value = self.text(name, meaning)
        number = int(value) if is_decimal(value) else None
        if number is None or number < minimum or (maximum is not None and number > maximum):
            allowed = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise ClusterError(
                f"{self.source}: {name}, {meaning}: expected a whole number {allowed}, got {shown(value)}. Fix: {self.fix}"
            )
        return number

    def index_and_count(self, index: str, count: str, what: str = "processes") -> tuple[int, int]:
        """Return the index of this process and the number of all: 0 <= index < count.

        Args:
            index: name of the variable with the index.
            count: name of the variable with the number.
            what: the things that are counted.

        Raises:
            ClusterError: one is not set or no number, or the index is too large.
        """
        all_ = self.integer(count, f"the number of {what}", minimum=1)
        own = self.integer(index, f"the number of this one of {all_} {what} ({count})", maximum=all_ - 1)
        return own, all_


@dataclass(frozen=True)
class NetworkOptions:
    """How a process of a job meets the others.

    Args:
        secret: known to the processes of the job only; None: there is none.
        is_open: whether a process without a secret may talk to other machines.
        bind_host: address of this machine at which the process listens; None: chosen from its address in the cluster.
    """

    secret: bytes | None = None
    is_open: bool = False
    bind_host: str | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "NetworkOptions":
        """Return the options that environment variables set.

        Raises:
            ClusterError: the secret is too short, or its file cannot be read or can be read by every user; or another value is wrong.
        """
        is_open = environ.get(OPEN, "")
        if is_open not in ("", "0", "1"):
            raise ClusterError(f"{OPEN}: expected 1, 0 or nothing, got {is_open!r}. Fix: set it to 1, or unset it.")
        host = environ.get(BIND, "").strip().removeprefix("[").removesuffix("]")
        return cls(read_secret(environ), is_open == "1", host or None)


NO_SECRET = NetworkOptions()


def restarts_of(environ: Mapping[str, str]) -> int:
    """Return how many times the launcher has restarted the job.

    Raises:
        ClusterError: the variable is no whole number of at least 0.

    Example:
        >>> restarts_of({}), restarts_of({"LOCKSTEP_GENERATION": "2"})
        (0, 2)
    """
    return _generation(environ, GENERATION)


def job_generation(environ: Mapping[str, str]) -> int:
    """Return the generation that all processes of the job have, by which those of an earlier one are told apart.

    If each node restarts its own workers, their numbers of restarts may differ, and this is 0.

    Raises:
        ClusterError: the variable is no whole number of at least 0.

    Example:
        >>> job_generation({"LOCKSTEP_GENERATION": "2"}), job_generation({"LOCKSTEP_GENERATION": "2", "LOCKSTEP_JOB_GENERATION": "0"})
        (2, 0)
    """
    return _generation(environ, JOB_GENERATION if JOB_GENERATION in environ else GENERATION)


def launched_workers(environ: Mapping[str, str]) -> int:
    """Return how many workers of this job ``lockstep run`` has started; 1 in a process that it has not started.

    Raises:
        ClusterError: the number is no whole number of at least 1.

    Example:
        >>> launched_workers({"WORLD_SIZE": "2"}), launched_workers({"WORLD_SIZE": "2", "LOCKSTEP_GENERATION": "0"})
        (1, 2)
    """
    if GENERATION not in environ or "WORLD_SIZE" not in environ:
        return 1
    return _of_launcher(environ).integer("WORLD_SIZE", "the number of workers", minimum=1)


def _generation(environ: Mapping[str, str], name: str) -> int:
    return _of_launcher(environ).integer(name, "the number of restarts", minimum=0) if name in environ else 0


def _of_launcher(environ: Mapping[str, str]) -> EnvReader:
    return EnvReader("Lockstep", environ, "leave it to lockstep run, which sets it.")


def visible_gpus(environment: Mapping[str, str], devices: Path = _DEVICES) -> list[str]:
    """Return the names of the GPUs that programs may use: those of CUDA_VISIBLE_DEVICES, or else all of this machine; none if JAX_PLATFORMS
    excludes GPUs.
    """
    platforms = environment.get("JAX_PLATFORMS")
    if platforms and not _GPU_PLATFORMS & set(platforms.split(",")):
        return []
    files = gpu_files(devices)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not files:
        return [str(number) for number in range(len(files))]
    return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]


def gpu_files(devices: Path = _DEVICES) -> list[str]:
    """Return the names of the GPUs' device files that this process may open, which its container or control group decides.

    CUDA numbers the GPUs that it may open from 0: two processes that name the same numbers may have different GPUs.
    """
    found = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return sorted(path.name for path in found if os.access(path, os.R_OK | os.W_OK))


def has_accelerators(environment: Mapping[str, str], devices: Path = _DEVICES) -> bool:
    """Return whether JAX computes on GPUs or TPUs in programs with this environment, where JAX_PLATFORMS may exclude them."""
    if visible_gpus(environment, devices):
        return True
    platforms = environment.get("JAX_PLATFORMS")
    if (platforms and "tpu" not in platforms.split(",")) or not find_spec("libtpu"):
        return False
    return any(True for pattern in _TPU_FILES for _ in devices.glob(pattern))
