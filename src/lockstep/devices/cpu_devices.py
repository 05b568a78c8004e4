"""Several logical CPU devices in one process, with a thread pool that cannot dead-lock.

XLA runs all CPU devices of a process on one pool of max(cores, devices) threads, and a collective blocks the thread
that it runs on. With too few threads two devices wait for each other for ever (XLA aborts the process after 40 s).
``PJRT_NPROC`` (or ``NPROC``) in the environment sets the size of the pool, once, when JAX starts its backend.
"""

import functools
import os
import re
import sys
from collections.abc import Mapping, MutableMapping

import jax

from lockstep._errors import DeviceError, whole_number

__all__ = [
    "check_thread_pool",
    "compiler_options",
    "ensure_cpu_devices",
    "has_started",
    "pool_threads",
    "reserve_devices",
    "reserve_threads",
    "set_logical_cpu_devices",
    "start_with_threads",
    "usable_cores",
]

THREADS_PER_DEVICE = 4  # A step has collectives that do not depend on each other; each may block a thread.
POOL_VARIABLES = ("PJRT_NPROC", "NPROC")  # In the order in which XLA reads them.
_COUNT_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def set_logical_cpu_devices(count: int) -> None:
    """Make this process see ``count`` CPU devices, named ``cpu:0`` … .

    A strategy that names CPU devices makes what it needs by itself; call this first where a later strategy of the
    same process needs more. It is the counterpart of ``tf.config.set_logical_device_configuration``.

    Args:
        count: number of devices, at least 1.

    Raises:
        DeviceError: JAX has started with another number of devices, or with a thread pool that is too small.

    Example:
        >>> import lockstep
        >>> lockstep.config.set_logical_cpu_devices(8)
        >>> lockstep.MirroredStrategy(["cpu:0", "cpu:3"]).num_replicas_in_sync
        2
    """
    count = whole_number("count", count)
    _start_with(count, os.environ)
    found = len(jax.local_devices(backend="cpu"))
    if found != count:
        raise _too_late(count, found)
    check_thread_pool(count, os.environ)


def ensure_cpu_devices(count: int) -> None:
    """Make sure that at least ``count`` CPU devices exist, and say what to do where it is too late."""
    _start_with(max(count, _configured_count(os.environ)), os.environ)
    found = len(jax.local_devices(backend="cpu"))
    if found < count:
        raise _too_late(count, found)


def reserve_devices(count: int) -> None:
    """Have JAX start with at least ``count`` CPU devices; it need not start yet."""
    _start_with(max(count, _configured_count(os.environ)), os.environ)


def reserve_threads(devices: int) -> None:
    """Have JAX start with threads enough for ``devices`` CPU devices that wait for those of other processes."""
    _start_with(
        max(devices, _configured_count(os.environ)),
        os.environ,
        max(os.cpu_count() or 1, THREADS_PER_DEVICE, _threads_for(devices)),
    )


def start_with_threads(threads: int, xla_flags: str) -> None:
    """Have JAX start with a pool of ``threads`` threads and these flags; nothing happens where it has started."""
    present = os.environ.get("XLA_FLAGS", "")
    if _start_with(_configured_count(os.environ), os.environ, threads) and xla_flags not in present:
        os.environ["XLA_FLAGS"] = f"{present} {xla_flags}".strip()


def check_thread_pool(devices: int, environment: Mapping[str, str]) -> None:
    """Refuse ``devices`` CPU devices on a thread pool that would dead-lock."""
    needed = _threads_for(devices)
    threads = pool_threads(environment)
    if threads < needed:
        raise DeviceError(
            f"{devices} CPU devices need a pool of {needed} threads, else XLA dead-locks in the first all-reduce; JAX "
            f"has started with {threads}. Make the strategy (or call lockstep.config.set_logical_cpu_devices"
            f"({devices})) before the first JAX operation, or set PJRT_NPROC={needed} in the environment. Deterministic runs "
            f"start with lockstep.config.set_deterministic(cpu_threads={needed}), all that are to be compared."
        )


def _threads_for(devices: int) -> int:
    return 1 if devices == 1 else max(8, THREADS_PER_DEVICE * devices)


def pool_threads(environment: Mapping[str, str]) -> int:
    """Number of threads that XLA runs the CPU devices of this process on."""
    for name in POOL_VARIABLES:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return max(os.cpu_count() or 1, len(jax.local_devices(backend="cpu")))


def _configured_count(environment: Mapping[str, str]) -> int:
    flag = _COUNT_FLAG.search(environment.get("XLA_FLAGS", ""))
    configured: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    return max(1, configured, int(flag.group(1)) if flag else 0)


def _start_with(count: int, environment: MutableMapping[str, str], threads: int | None = None) -> bool:
    """Configure JAX for ``count`` CPU devices; False, and nothing happens, where the backend has started."""
    if has_started():
        return False
    jax.config.update("jax_num_cpu_devices", count)
    if not any(environment.get(name, "").isdigit() for name in POOL_VARIABLES):
        environment["PJRT_NPROC"] = str(threads or max(os.cpu_count() or 1, _threads_for(count)))
    return True


def has_started() -> bool:
    """Whether JAX's backends run: it then refuses another number of CPU devices."""
    configured: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_num_cpu_devices", max(1, configured) + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", configured)
    return False


def _too_late(wanted: int, found: int) -> DeviceError:
    return DeviceError(
        f"{wanted} CPU devices were asked for, but JAX has already started with {found}. JAX starts with the first "
        f"array, model or optimizer: make the strategy before those, or call lockstep.config.set_logical_cpu_devices"
        f"({wanted}) at the top of the script, or set XLA_FLAGS=--xla_force_host_platform_device_count={wanted} and "
        f"PJRT_NPROC={_threads_for(wanted)} in the environment."
    )


def usable_cores() -> int:
    """Cores that this process may use, where the system says that; else all."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


# XLA's own routine for convolutions on CPUs is faster than that of YNNPACK, which jaxlib 0.10 takes for some of them: see
# docs/decisions/0028. Products of matrices stay with the latter.
_ON_CPUS = {"xla_cpu_experimental_ynn_fusion_type": "-individual_convolution"}


@functools.cache
def compiler_options(platform: str) -> dict[str, str]:
    """For ``jax.jit``; empty where this version of XLA does not know them.

    Args:
        platform: of the devices, "cpu" for example.
    """
    if platform != "cpu":
        return {}
    number = jax.device_put(1.0, jax.local_devices(backend="cpu")[0])
    try:
        jax.jit(lambda x: x, compiler_options=_ON_CPUS).lower(number).compile()
    except (jax.errors.JaxRuntimeError, TypeError):
        return {}
    return _ON_CPUS
