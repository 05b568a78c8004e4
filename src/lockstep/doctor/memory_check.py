"""Whether weights, steps and what is kept of an input fit into the memory that there is."""

from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np

from lockstep.devices.memory import HostMemory, host_memory
from lockstep.doctor.finding import Finding
from lockstep.doctor.fit_call import FitCall, in_memory

__all__ = ["about_memory", "bytes_at_least", "bytes_of_data"]

_GIB = 2**30


def about_memory(
    program: FitCall,
    of_a_step: int | None = None,
    batches: tuple[int, int] | None = None,
    host: HostMemory | None = None,
) -> Iterator[Finding]:
    """About more memory than there is.

    Args:
        program: what is looked at.
        of_a_step: bytes on each device, where a step was compiled; by default weights, gradients and the optimizer alone.
        batches: number of batches of a pass and bytes of one, where these are known.
        host: memory of this machine.
    """
    step = of_a_step or bytes_at_least(program.model)
    said = "a step needs" if of_a_step else "weights, gradients and optimizer need"
    cached = bytes_of_cache(program, batches)
    own = [device for device in program.setting.devices if device.process_index == jax.process_index()]
    on_devices = program.setting.input_options.cache == "device"
    on_host = 0 if on_devices else cached
    if own and own[0].platform == "cpu":
        on_host += len(own) * (step + (cached if on_devices else 0))
    else:
        yield from _on_a_device(program, own, step + (cached if on_devices else 0), said)
    free = (host or host_memory()).free
    if free is not None and on_host > free:
        kept = f", and the cache {cached / _GIB:.1f} GiB" if cached else ""
        yield Finding(
            "host-memory",
            f"{said} {step / _GIB:.1f} GiB on each of {len(own)} devices{kept}; {free / _GIB:.1f} GiB are free",
            program.at_fit,
            "the system ends a process that takes more than there is, without a Python error",
            _cure(cached > step),
        )


def bytes_at_least(model: keras.Model) -> int:
    """Of weights, their gradients and what the optimizer keeps, as far as they exist."""
    optimizer = model.optimizer.variables if model.optimizer else []
    return sum(map(_size, [*model.variables, *model.trainable_variables, *optimizer]))


def bytes_of_data(data: Any) -> int:
    """Of the arrays in a tree."""
    arrays = [in_memory(leaf) for leaf in keras.tree.flatten(data)]
    return sum(int(array.nbytes) for array in arrays if array is not None)


def bytes_of_cache(program: FitCall, batches: tuple[int, int] | None) -> int:
    """What ``InputOptions(cache=…)`` keeps in memory."""
    cache = program.setting.input_options.cache
    if cache not in ("memory", "device"):
        return 0
    if program.rows is not None:
        return bytes_of_data((program.x, program.y, program.sample_weight)) if cache == "device" else 0
    return batches[0] * batches[1] if batches else 0


def _on_a_device(program: FitCall, devices: list[jax.Device], need: int, said: str) -> Iterator[Finding]:
    for device in devices[:1]:  # They are alike.
        limit = (device.memory_stats() or {}).get("bytes_limit")
        if limit and need > limit:
            yield Finding(
                "device-memory",
                f"{said} {need / _GIB:.1f} GiB on each device, with what is cached there; {device} has {limit / _GIB:.1f} GiB",
                program.at_fit,
                "the first step ends with RESOURCE_EXHAUSTED",
                _cure(program.setting.input_options.cache == "device"),
            )


def _cure(is_cache: bool) -> str:
    if is_cache:
        return 'Take InputOptions(cache="a/file") or no cache'
    return "Take a smaller batch, keras.Model(…).compile(optimizer) with less state, shard_optimizer=True, or mixed_bfloat16"


def _size(variable: keras.Variable) -> int:
    return int(np.prod(variable.shape)) * jax.numpy.dtype(variable.dtype).itemsize
