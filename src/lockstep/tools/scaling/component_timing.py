"""What a step is made of, each measured by itself: the bare compiled step, the all-reduce; and the memory of the process."""

import itertools
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep._keras import trainer
from lockstep.collectives import ALGORITHMS, CrossDeviceOps
from lockstep.collectives.cost_model import FORMULAS
from lockstep.tools.scaling.results import AllReduceTiming

__all__ = ["all_reduce_seconds", "bare_seconds", "formula_of", "greatest_memory", "links_of"]

SIZES = (4_000, 400_000, 4_000_000)  # bytes of the vectors whose all-reduce says what the link can do
_SAMPLES, _SECONDS = 5, 0.05  # a sample repeats a call for at least so long
_AXIS = "device"
_STATUS = Path("/proc/self/status")


def bare_seconds(model: keras.Model, function: Callable[[Any, Any], Any], batch: Any) -> float:
    """Median seconds of the compiled training step, repeated on one batch; the model is left as it is.

    Args:
        model: compiled, and trained before.
        function: its training function, which has been compiled.
        batch: on the devices.
    """
    state = jax.tree.map(jnp.copy, trainer.training_state(model, batch))
    batches = itertools.repeat(batch)

    def run(count: int) -> None:
        nonlocal state
        for _ in range(count):
            _, state = function(state, batches)
        jax.block_until_ready(state)

    return _median(run) / model.steps_per_execution


def all_reduce_seconds(ops: CrossDeviceOps, devices: Sequence[jax.Device], arrays: Sequence[Any]) -> float:
    """Median seconds in which the devices add up arrays, less those of a program that adds nothing.

    Args:
        ops: how they meet.
        devices: that hold them.
        arrays: shapes and dtypes.
    """
    if len(devices) < 2:
        return 0.0
    mesh, cut = Mesh(np.asarray(devices), (_AXIS,)), PartitionSpec(_AXIS)
    held = [jnp.zeros((len(devices), *array.shape), array.dtype, device=NamedSharding(mesh, cut)) for array in arrays]

    def meet(pieces: list[jax.Array]) -> list[jax.Array]:
        return [total[None] for total in ops.all_reduce([piece[0] for piece in pieces], _AXIS, devices)]

    def stay(pieces: list[jax.Array]) -> list[jax.Array]:
        return [piece.reshape(-1)[:1] for piece in pieces]  # Nothing at all would not run.

    both = []
    for function in (meet, stay):
        program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))
        both.append(_median(partial(_repeat, program, held)))
    return max(0.0, both[0] - both[1])


def _repeat(program: Callable[[Any], Any], held: Any, count: int) -> None:
    for _ in range(count):
        jax.block_until_ready(program(held))


def links_of(ops: CrossDeviceOps, devices: Sequence[jax.Device]) -> tuple[AllReduceTiming, ...]:
    """All-reduces of vectors of several sizes."""
    if len(devices) < 2:
        return ()
    found = []
    for size in SIZES:
        seconds = all_reduce_seconds(ops, devices, [jax.ShapeDtypeStruct((size // 4,), "float32")])
        found.append(AllReduceTiming(formula_of(ops), size, len(devices), seconds))
    return tuple(found)


def formula_of(ops: CrossDeviceOps) -> str:
    """Name of the formula that predicts an operation; somebody's own counts as the platform's."""
    names = [name for name, kind in ALGORITHMS.items() if type(ops) is kind and name in FORMULAS]
    return names[0] if names else "auto"


def greatest_memory(devices: Sequence[jax.Device]) -> int:
    """Bytes: the most that an accelerator has held, else this process. ``ru_maxrss`` would count the parent's, too."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]
    if max(peaks):
        return int(max(peaks))
    found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text()) if _STATUS.exists() else None
    return 1024 * int(found[1]) if found else 0


def _median(run: Callable[[int], None]) -> float:
    """Median seconds of a call, when ``run(count)`` makes so many."""
    run(2)
    begun = time.perf_counter()
    run(1)
    count = max(1, min(1000, int(_SECONDS / max(1e-6, time.perf_counter() - begun))))
    samples = []
    for _ in range(_SAMPLES):
        begun = time.perf_counter()
        run(count)
        samples.append((time.perf_counter() - begun) / count)
    return statistics.median(samples)
