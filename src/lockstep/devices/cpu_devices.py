"""Logical CPU devices and the number of threads on which XLA runs them, which are set before JAX starts.

XLA runs all CPU devices of a process on one pool of max(cores, devices) threads, and a collective blocks the thread
that it runs on. With too few threads two devices wait for each other forever (XLA aborts the process after 40 s).
``PJRT_NPROC`` (or ``NPROC``) in the environment sets the size of the pool, once, when JAX starts its backend. A strategy
removes what is set here after that: child processes inherit the environment, and choose pools of their own.
"""

import os
import re
import sys
from collections.abc import Mapping

import jax

from lockstep._errors import DeviceError, whole_number

MAX_CPU_DEVICES = 1024  # each has threads of its own
THREADS_PER_DEVICE = 4  # A step has collectives that do not depend on each other; each may block a thread.
POOL_VARIABLES = ("PJRT_NPROC", "NPROC")  # In the order in which XLA reads them.
_threads_set: int | None = None  # by this module, for the pool of this process
_COUNT_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def set_logical_cpu_devices(count: int) -> None:
    """Make this process see ``count`` CPU devices, named ``cpu:0`` … .

    A strategy that names CPU devices creates those that it needs; call this function first if a later strategy of the
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
    count = whole_number("count", count, maximum=MAX_CPU_DEVICES)
    wanted = max(count, _reserved)
    _configure(wanted)
    found = _start()
    if found != wanted:
        raise _already_started_error(wanted, found)
    check_thread_pool(_reserved if _reserved > 1 else count, os.environ)  # A strategy gets those that are reserved.


def ensure_cpu_devices(count: int) -> None:
    """Start JAX with at least ``count`` CPU devices.

    Raises:
        DeviceError: JAX has started with fewer, or they are more than a process can have.
    """
    if count > MAX_CPU_DEVICES:
        raise DeviceError(
            f"devices: expected at most {MAX_CPU_DEVICES:,} CPU devices, got {count:,}. Fix: use lower numbers, from cpu:0 on."
        )
    _configure(max(count, _configured_count()))
    found = _start()
    if found < count:
        raise _already_started_error(count, found)


_reserved = 0  # CPU devices for a program that a tool runs in this process, whatever the program itself asks for


def reserve_devices(count: int) -> None:
    """Configure at least ``count`` CPU devices without starting JAX; :func:`set_logical_cpu_devices` will not configure fewer."""
    global _reserved
    _reserved = count
    _configure(max(count, _configured_count()))


def reserve_threads(devices: int) -> None:
    """Configure threads enough for ``devices`` CPU devices that wait for those of other processes."""
    threads = max(usable_cores(), THREADS_PER_DEVICE, _threads_for(devices))
    _configure(max(devices, _configured_count()), threads)


def start_with_threads(threads: int | None, xla_flags: str) -> None:
    """Configure a pool of ``threads`` threads (None: of the usual size) and these flags, unless JAX has started."""
    present = os.environ.get("XLA_FLAGS", "")
    if _configure(_configured_count(), threads) and xla_flags not in present:
        os.environ["XLA_FLAGS"] = f"{present} {xla_flags}".strip()


def _start() -> int:
    """Start JAX, unless it has started, and return the number of its CPU devices."""
    found = len(jax.local_devices(backend="cpu"))
    clear_pool_variable()
    return found


def clear_pool_variable() -> None:
    """Remove the size of the pool from the environment if it was set here and JAX has started, and so read it."""
    if _threads_set is not None and os.environ.get("PJRT_NPROC") == str(_threads_set) and has_started():
        del os.environ["PJRT_NPROC"]


def check_thread_pool(devices: int, environment: Mapping[str, str]) -> None:
    """Refuse ``devices`` CPU devices on a thread pool that would deadlock.

    Raises:
        DeviceError: it would.
    """
    _check_threads(devices, _threads_for(devices), environment)


def check_shared_thread_pool(devices: int, environment: Mapping[str, str]) -> None:
    """Refuse ``devices`` CPU devices that wait for those of other processes on too small a pool of XLA's default size.

    JAX has such a pool if it has started before :func:`reserve_threads`.

    Raises:
        DeviceError: the pool is too small.
    """
    if _chosen_threads(environment) is None:
        _check_threads(devices, max(_threads_for(devices), THREADS_PER_DEVICE), environment)


def _check_threads(devices: int, needed: int, environment: Mapping[str, str]) -> None:
    threads = pool_threads(environment)
    if threads < needed:
        raise DeviceError(
            f"{devices} CPU devices need a pool of {needed} threads, else XLA dead-locks in the first all-reduce; JAX "
            f"has started with {threads}. Fix: make the strategy (or call lockstep.config.set_logical_cpu_devices"
            f"({devices})) before the first JAX operation, or set PJRT_NPROC={needed} in the environment. Deterministic runs "
            f"start with lockstep.config.set_deterministic(cpu_threads={needed}), all that are to be compared."
        )


def _threads_for(devices: int) -> int:
    return 1 if devices == 1 else max(8, THREADS_PER_DEVICE * devices)


def pool_threads(environment: Mapping[str, str]) -> int:
    """Return the number of threads on which XLA runs the CPU devices of this process."""
    return _chosen_threads(environment) or max(usable_cores(), len(jax.local_devices(backend="cpu")))


def _chosen_threads(environment: Mapping[str, str]) -> int | None:
    """Return the size of the pool that the user or this module has set; None: XLA chooses."""
    of_variables = (environment[name] for name in POOL_VARIABLES if environment.get(name, "").isdigit())
    return next(map(int, of_variables), _threads_set)


def _configured_count() -> int:
    flag = _COUNT_FLAG.search(os.environ.get("XLA_FLAGS", ""))
    configured: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    return max(1, configured, int(flag.group(1)) if flag else 0)


def _configure(count: int, threads: int | None = None) -> bool:
    """Configure JAX for ``count`` CPU devices and return True; do nothing and return False if the backend has started."""
    global _threads_set
    if has_started():
        return False
    jax.config.update("jax_num_cpu_devices", count)
    is_set = any(os.environ.get(name, "").isdigit() for name in POOL_VARIABLES)
    # JAX's own pool is enough for one device, and a later call may want more.
    if not is_set and (threads or count > 1):
        _threads_set = threads or max(usable_cores(), _threads_for(count))
        os.environ["PJRT_NPROC"] = str(_threads_set)
    return True


def has_started() -> bool:
    """Return whether JAX's backends have started: JAX then refuses another number of CPU devices."""
    configured: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_num_cpu_devices", max(1, configured) + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", configured)
    return False


def _already_started_error(wanted: int, found: int) -> DeviceError:
    return DeviceError(
        f"{wanted} CPU devices were asked for, but JAX has already started with {found}. Fix: make the strategy before the first "
        f"array, model or optimizer, with which JAX starts, or call lockstep.config.set_logical_cpu_devices"
        f"({wanted}) at the top of the script, or set XLA_FLAGS=--xla_force_host_platform_device_count={wanted} and "
        f"PJRT_NPROC={_threads_for(wanted)} in the environment."
    )


def usable_cores() -> int:
    """Return the number of cores that this process may use; on systems without that information, of all cores."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
