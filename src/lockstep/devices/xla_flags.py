"""Flags of XLA for deterministic runs, which must be set before JAX starts, and compiler options of steps.

On CPU the bits of a convolution depend on the size of XLA's thread pool, which follows the cores and devices of a machine
unless it is fixed. On GPUs XLA chooses among kernels some of which add in the order in which threads finish.
"""

import functools
import os
from dataclasses import dataclass

import jax

from lockstep._errors import DeviceError, flag, whole_number
from lockstep.devices.cpu_devices import MAX_CPU_DEVICES, POOL_VARIABLES, has_started, pool_threads, start_with_threads
from lockstep.devices.names import platform_of
from lockstep.distributed.cluster.env_reader import has_accelerators, visible_gpus

CPU_THREADS = 16  # Enough for 4 logical CPU devices, independent of the number of cores.
_MAX_THREADS = 4 * MAX_CPU_DEVICES
GPU_FLAG = "--xla_gpu_deterministic_ops=true"
_ORDER_FLAG = "--xla_gpu_exclude_nondeterministic_ops=true"  # XLA still chooses the fastest kernel of the others.


@dataclass
class _DeterminismSetting:
    enabled: bool = False
    cpu_threads: int = CPU_THREADS


_setting = _DeterminismSetting()  # of the process; only set_deterministic changes it


def set_deterministic(enabled: bool = True, *, cpu_threads: int = CPU_THREADS) -> None:
    """Make every strategy from now on deterministic, as with the argument ``deterministic=True``.

    Call it at the top of the script. Counterpart of ``tf.config.experimental.enable_op_determinism``.

    Args:
        enabled: False goes back to the default.
        cpu_threads: size of XLA's thread pool on CPU. Runs have the same bits on pools of the same size; the cores may
            differ. 16 threads serve 4 logical CPU devices, 32 serve 8.

    Raises:
        DeviceError: JAX has started on a thread pool of another size, or ``PJRT_NPROC`` or ``NPROC`` in the environment sets another
            size. An earlier call, or a strategy, may have set it.
        OptionError: ``enabled`` is not a bool, or ``cpu_threads`` is not a whole number from 1 to 4,096.

    Example:
        >>> import lockstep
        >>> lockstep.config.set_deterministic(cpu_threads=32)
        >>> lockstep.MirroredStrategy(replicas=2).deterministic
        True
        >>> lockstep.config.set_deterministic(False)
    """
    enabled = flag("enabled", enabled)
    cpu_threads = whole_number("cpu_threads", cpu_threads, maximum=_MAX_THREADS)
    if enabled:
        start_with_threads(cpu_threads, GPU_FLAG)
        # If JAX has not started, asking for its devices would start it.
        is_started = has_started()
        is_on_cpu = platform_of(jax.local_devices()[0]) == "cpu" if is_started else not has_accelerators(os.environ)
        found = pool_threads(os.environ) if is_on_cpu else cpu_threads
        if found != cpu_threads:
            raise _pool_error(found, cpu_threads, is_started)
    _setting.enabled, _setting.cpu_threads = enabled, cpu_threads


def _pool_error(found: int, wanted: int, is_started: bool) -> DeviceError:
    if is_started:
        return DeviceError(
            f"set_deterministic: cpu_threads: JAX has started with a pool of {found} CPU threads, not {wanted}. Fix: call it before the first "
            "JAX operation, with PJRT_NPROC and NPROC not set in the environment, or accept the pool that is there: "
            f"set_deterministic(cpu_threads={found})."
        )
    name = next(name for name in POOL_VARIABLES if os.environ.get(name, "").isdigit())
    return DeviceError(
        f"set_deterministic: cpu_threads: the environment variable {name}={found} sets a pool of {found} CPU threads, not {wanted}. Fix: "
        "unset it, or, if an earlier call of set_deterministic or a strategy has set it, give the first call of set_deterministic "
        f"cpu_threads={wanted}, before any strategy; or accept that size: set_deterministic(cpu_threads={found})."
    )


def is_deterministic() -> bool:
    """Return whether strategies are deterministic by default."""
    return _setting.enabled


def prepare_determinism() -> None:
    """Make the settings that a deterministic strategy needs, unless JAX has started."""
    start_with_threads(_setting.cpu_threads, GPU_FLAG)


def fix_order_on_gpus() -> None:
    """Exclude kernels of GPUs that add in the order in which threads finish, unless JAX has started.

    Devices that compute the same thing, such as the gradient of a variable that all of them have, would get different bits.
    """
    if visible_gpus(os.environ):
        start_with_threads(None, _ORDER_FLAG)


def describe_determinism(device: jax.Device) -> str:
    """Return a description of what the bits depend on besides the replicas, with a fix if that is not the default."""
    if platform_of(device) == "cpu":
        threads = pool_threads(os.environ)
        text = f"deterministic, on a pool of {threads} CPU threads"
        if threads != _setting.cpu_threads:
            text += (
                f" instead of {_setting.cpu_threads}: the bits equal those of runs on {threads} threads; for the usual "
                "number make the strategy, or call lockstep.config.set_deterministic(), before the first JAX operation"
            )
        return text
    if platform_of(device) == "gpu" and GPU_FLAG not in os.environ.get("XLA_FLAGS", ""):
        return (
            f"deterministic but for kernels of XLA's own choice, because JAX started without XLA_FLAGS={GPU_FLAG}: call "
            "lockstep.config.set_deterministic() before the first JAX operation"
        )
    return "deterministic"


# XLA's own routine for convolutions on CPUs is faster than that of YNNPACK, which jaxlib 0.10 takes for some of them: see
# docs/decisions/0028. Products of matrices stay with the latter.
_CPU_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "-individual_convolution"}

# XLA for CPUs would drop the barriers of recomputed layers and join what is computed twice, or compute it early: see docs/decisions/0058.
_CPU_RECOMPUTE_OPTIONS = {
    "xla_disable_hlo_passes": "cse_barrier_expander",
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}


def compiler_options(platform: str, *, recomputes: bool = False) -> dict[str, str]:
    """Return the compiler options of steps, which may recompute layers in the backward pass, for ``jax.jit``; without those that this version of
    XLA does not know.
    """
    if platform != "cpu":
        return {}
    options = _CPU_OPTIONS | (_CPU_RECOMPUTE_OPTIONS if recomputes else {})
    return {name: value for name, value in options.items() if _is_known(name, value)}


@functools.cache
def _is_known(name: str, value: str) -> bool:
    number = jax.device_put(1.0, jax.local_devices(backend="cpu")[0])
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(number).compile()
    except (jax.errors.JaxRuntimeError, TypeError):
        return False
    return True
