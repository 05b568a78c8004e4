"""What of the process itself is known to be bad: versions, the pool of threads, the allocator, devices on too few cores."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version

import jax
import keras

from lockstep._errors import DeviceError
from lockstep.devices.cpu_devices import check_thread_pool, usable_cores
from lockstep.devices.memory import returned_memory_reason
from lockstep.doctor.finding import Finding
from lockstep.doctor.fit_call import FitCall

__all__ = [
    "BAD_VERSIONS",
    "BadVersion",
    "about_allocator",
    "about_devices_and_cores",
    "about_thread_pool",
    "about_versions",
]


@dataclass(frozen=True)
class BadVersion:
    """Versions of a package that are known to be bad.

    Args:
        package: its name.
        below: such a version is bad where it is lower than this; () for no bound.
        from_: or this or higher; likewise.
        why: they are bad.
        source: of that knowledge.
    """

    package: str
    below: tuple[int, ...]
    from_: tuple[int, ...]
    why: str
    source: str

    def includes(self, numbers: tuple[int, ...]) -> bool:
        """Whether a version is one of them."""
        return numbers < self.below or bool(self.from_ and numbers >= self.from_)


BAD_VERSIONS = (
    BadVersion(
        "keras", (3, 15), (3, 16), "Lockstep stands on parts of Keras 3.15 that others do not have", "ARCHITECTURE.md"
    ),
    BadVersion("jax", (0, 10), (), "Lockstep was made for JAX 0.10 and tried with nothing older", "pyproject.toml"),
)


def about_versions(program: FitCall, environ: Mapping[str, str]) -> Iterator[Finding]:
    """About packages of a version that is known to be bad."""
    for bad in BAD_VERSIONS:
        found = version(bad.package)
        if bad.includes(tuple(int(part) for part in found.split(".")[:2])):
            wanted = f"{bad.package}>={'.'.join(map(str, bad.below))}"
            wanted += f",<{'.'.join(map(str, bad.from_))}" if bad.from_ else ""
            why = f"{bad.why} (source: {bad.source})"
            yield Finding("bad-version", f"{bad.package} {found}", "the environment", why, f"pip install '{wanted}'")


def about_thread_pool(program: FitCall, environ: Mapping[str, str]) -> Iterator[Finding]:
    """About several CPU devices that plain Keras uses together, on threads that will wait for each other for ever."""
    distribution = keras.distribution.distribution()
    if program.setting.has_strategy or distribution is None or jax.default_backend() != "cpu":
        return
    try:
        check_thread_pool(len(jax.local_devices()), environ)
    except DeviceError as error:
        yield Finding(
            "cpu-thread-pool",
            f"{type(distribution).__name__} over {len(jax.local_devices())} CPU devices on a pool of too few threads",
            "keras.distribution",
            "XLA dead-locks in an all-reduce, and aborts the process after 40 s",
            str(error).rstrip("."),
        )


def about_allocator(program: FitCall, environ: Mapping[str, str]) -> Iterator[Finding]:
    """About an allocator that gives the memory of each step back to the system."""
    on_cpus = any(device.platform == "cpu" for device in program.setting.devices)
    reason = returned_memory_reason(environ) if on_cpus and program.setting.has_strategy else None
    if reason:
        yield Finding(
            "memory-given-back",
            f"the allocator gives large temporaries back to the system after each step: {reason}",
            "the environment",
            "each step then pays for the page faults; one of a convolutional net took up to twice as long (docs/decisions/0027)",
            "Unset LOCKSTEP_KEEP_MEMORY, or start the script with lockstep run --allocator tcmalloc or jemalloc",
        )


def about_devices_and_cores(
    program: FitCall, environ: Mapping[str, str], cores: int | None = None
) -> Iterator[Finding]:
    """About as many CPU devices as there are cores, of which each could have used all."""
    own = [device for device in program.setting.devices if device.process_index == jax.process_index()]
    cores = cores or usable_cores()
    if len(own) > 1 and own[0].platform == "cpu" and cores <= len(own):
        yield Finding(
            "cpu-devices-without-cores",
            f"{len(own)} CPU devices on {cores} core{'s' * (cores > 1)}",
            "devices",
            "they wait for each other in each step, and XLA uses all cores for one device: MNIST took 2.07 ms a step on two devices of two "
            "cores, and 0.93 ms on one",
            f'Say MirroredStrategy(["cpu:0"], replicas={program.setting.replicas}), with the same numbers',
        )
