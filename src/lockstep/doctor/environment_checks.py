"""Checks of the process and its machine: package versions, CPU thread pool, allocator, cores and memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import keras
import numpy as np

from lockstep._errors import DeviceError
from lockstep.devices.cpu_devices import check_thread_pool, usable_cores
from lockstep.devices.memory import HostMemory, host_memory, returned_memory_reason
from lockstep.doctor.finding import Finding
from lockstep.doctor.fit_call import FitCall, array_in_memory

__all__ = [
    "BAD_VERSIONS",
    "BadVersion",
    "bytes_of_data",
    "check_allocator",
    "check_cores",
    "check_memory",
    "check_thread_pool_size",
    "check_versions",
    "minimum_bytes",
]

_GIB = 2**30


@dataclass(frozen=True)
class BadVersion:
    """Versions of a package that are known not to work.

    Args:
        package: its name.
        below: versions lower than this one are bad; () for no bound.
        from_: this version and higher ones are bad; likewise.
        why: the reason.
        source: of the reason.
    """

    package: str
    below: tuple[int, ...]
    from_: tuple[int, ...]
    why: str
    source: str

    def includes(self, numbers: tuple[int, ...]) -> bool:
        """Whether a version is bad."""
        return numbers < self.below or bool(self.from_ and numbers >= self.from_)


BAD_VERSIONS = (
    BadVersion(
        "keras",
        (3, 15),
        (3, 16),
        "Lockstep uses parts of Keras 3.15 that other versions do not have",
        "ARCHITECTURE.md",
    ),
    BadVersion(
        "jax", (0, 10), (), "Lockstep was made for JAX 0.10 and not tested with older versions", "pyproject.toml"
    ),
)


def check_versions(call: FitCall, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Find packages of a version that is known not to work."""
    for bad in BAD_VERSIONS:
        found = version(bad.package)
        if bad.includes(tuple(int(part) for part in found.split(".")[:2])):
            wanted = f"{bad.package}>={'.'.join(map(str, bad.below))}"
            wanted += f",<{'.'.join(map(str, bad.from_))}" if bad.from_ else ""
            why = f"{bad.why} (source: {bad.source})"
            yield Finding("bad-version", f"{bad.package} {found}", "the environment", why, f"pip install '{wanted}'")


def check_thread_pool_size(call: FitCall, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Find several CPU devices of a plain ``keras.distribution`` whose thread pool is too small, which deadlocks."""
    distribution = keras.distribution.distribution()
    if call.settings.has_strategy or distribution is None or jax.default_backend() != "cpu":
        return
    try:
        check_thread_pool(len(jax.local_devices()), environ)
    except DeviceError as error:
        yield Finding(
            "cpu-thread-pool",
            f"{type(distribution).__name__} over {len(jax.local_devices())} CPU devices on a pool of too few threads",
            "keras.distribution",
            "XLA deadlocks in an all-reduce, and aborts the process after 40 s",
            str(error).rstrip("."),
        )


def check_allocator(call: FitCall, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Find an allocator that returns the memory of each step to the system."""
    on_cpus = any(device.platform == "cpu" for device in call.settings.devices)
    reason = returned_memory_reason(environ) if on_cpus and call.settings.has_strategy else None
    if reason:
        yield Finding(
            "memory-given-back",
            f"the allocator gives large temporaries back to the system after each step: {reason}",
            "the environment",
            "each step then pays for the page faults; one of a convolutional net took up to twice as long (docs/decisions/0027)",
            "Unset LOCKSTEP_KEEP_MEMORY, or start the script with lockstep run --allocator tcmalloc or jemalloc",
        )


def check_cores(call: FitCall, environ: Mapping[str, str], cores: int | None = None) -> Iterator[Finding]:
    """Find CPU devices that are as many as the cores or more, though one device could use all cores."""
    own = [device for device in call.settings.devices if device.process_index == jax.process_index()]
    cores = cores or usable_cores()
    if len(own) > 1 and own[0].platform == "cpu" and cores <= len(own):
        yield Finding(
            "cpu-devices-without-cores",
            f"{len(own)} CPU devices on {cores} core{'s' * (cores > 1)}",
            "devices",
            "the devices wait for each other in each step, and XLA uses all cores for one device: MNIST took 2.07 ms a step on two devices of two "
            "cores, and 0.93 ms on one",
            f'Use MirroredStrategy(["cpu:0"], replicas={call.settings.replicas}), which gives the same results',
        )


def check_memory(
    call: FitCall,
    of_a_step: int | None = None,
    batches: tuple[int, int] | None = None,
    host: HostMemory | None = None,
) -> Iterator[Finding]:
    """Find steps and caches that need more memory than there is.

    Args:
        call: the call to check.
        of_a_step: bytes on each device of a compiled step; by default those of weights, gradients and optimizer.
        batches: number of batches of a pass and bytes of one; None if unknown.
        host: memory of this machine.
    """
    step = of_a_step or minimum_bytes(call.model)
    subject = "a step needs" if of_a_step else "weights, gradients and optimizer need"
    cached = bytes_of_cache(call, batches)
    own = [device for device in call.settings.devices if device.process_index == jax.process_index()]
    on_devices = call.settings.input_options.cache == "device"
    on_host = 0 if on_devices else cached
    if own and own[0].platform == "cpu":
        on_host += len(own) * (step + (cached if on_devices else 0))
    else:
        yield from _on_a_device(call, own, step + (cached if on_devices else 0), subject)
    free = (host or host_memory()).free
    if free is not None and on_host > free:
        kept = f", and the cache {cached / _GIB:.1f} GiB" if cached else ""
        yield Finding(
            "host-memory",
            f"{subject} {step / _GIB:.1f} GiB on each of {len(own)} devices{kept}; {free / _GIB:.1f} GiB are free",
            call.at_fit,
            "the system kills a process that uses more memory than there is, without a Python error",
            _cure(cached > step),
        )


def minimum_bytes(model: keras.Model) -> int:
    """Return the bytes of weights, gradients and optimizer variables, as far as they exist."""
    optimizer = model.optimizer.variables if model.optimizer else []
    return sum(map(_size, [*model.variables, *model.trainable_variables, *optimizer]))


def bytes_of_data(data: Any) -> int:
    """Return the bytes of the arrays in a tree."""
    arrays = [array_in_memory(leaf) for leaf in keras.tree.flatten(data)]
    return sum(int(array.nbytes) for array in arrays if array is not None)


def bytes_of_cache(call: FitCall, batches: tuple[int, int] | None) -> int:
    """Return the bytes that ``InputOptions(cache=…)`` keeps in memory."""
    cache = call.settings.input_options.cache
    if cache not in ("memory", "device"):
        return 0
    if call.rows is not None:
        return bytes_of_data((call.x, call.y, call.sample_weight)) if cache == "device" else 0
    return batches[0] * batches[1] if batches else 0


def _on_a_device(call: FitCall, devices: list[jax.Device], need: int, subject: str) -> Iterator[Finding]:
    for device in devices[:1]:  # All have the same memory.
        limit = (device.memory_stats() or {}).get("bytes_limit")
        if limit and need > limit:
            yield Finding(
                "device-memory",
                f"{subject} {need / _GIB:.1f} GiB on each device, with what is cached there; {device} has {limit / _GIB:.1f} GiB",
                call.at_fit,
                "the first step ends with RESOURCE_EXHAUSTED",
                _cure(call.settings.input_options.cache == "device"),
            )


def _cure(is_cache: bool) -> str:
    if is_cache:
        return 'Use InputOptions(cache="a/file") or no cache'
    return "Use a smaller batch, keras.Model(…).compile(optimizer) with less state, shard_optimizer=True, or mixed_bfloat16"


def _size(variable: keras.Variable) -> int:
    return int(np.prod(variable.shape)) * jax.numpy.dtype(variable.dtype).itemsize
