"""Floating-point operations (FLOPs) of a training step, and the peak rate of devices, for model FLOPs utilization (MFU).

A step is counted once, from shapes alone: Keras's own step for one device on the whole batch is traced and lowered, not compiled, and XLA adds up its
operations (``jax.stages.Lowered.cost_analysis``). Operations that are repeated to save memory, or on several devices, thus count once, as in
https://arxiv.org/abs/2204.02311, appendix B. Programs that XLA cannot analyze (library kernels and custom kernels) count as nothing.
"""

from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh

from lockstep.data.device_placement import DEVICE_AXIS, PlacedRows, Placement
from lockstep.execution.executors import EagerExecutor
from lockstep.execution.train_functions import StepFunctions, StepHook

__all__ = ["PEAKS", "FlopCounter", "flops_of_step", "peak_of"]

# Floating-point operations a second of one device of JAX, dense, in the fastest format that training uses with 16 bits. The first that is part of
# ``device_kind`` counts. NVIDIA: data sheets of the boards (https://www.nvidia.com/en-us/data-center/), without sparsity. TPU:
# https://cloud.google.com/tpu/docs/system-architecture-tpu-vm, halved for v2 and v3, of which JAX sees each core.
PEAKS = {
    "B200": 2.25e15,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
}


def peak_of(device_kind: str) -> float | None:
    """Return the peak floating-point operations a second of a device; None if unknown.

    Example:
        >>> peak_of("NVIDIA A100-SXM4-80GB"), peak_of("cpu")
        (312000000000000.0, None)
    """
    words = f" {device_kind.replace('-', ' ')} "
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)


def flops_of_step(model: keras.Model, state: Any, batch: Any) -> float | None:
    """Return the floating-point operations of a training step; None if XLA cannot count them.

    Args:
        model: a compiled model.
        state: of its training, or the shapes of one.
        batch: as placed on the devices, or its shapes.
    """
    device = jax.local_devices()[0]
    alone = Placement(Mesh(np.asarray([device]), (DEVICE_AXIS,)), 1)
    executor = EagerExecutor(device)
    step = StepFunctions(model, alone, executor, lambda sentence: None).build_step(executor, "train")
    shapes = tuple([jax.tree.map(_shape, value) for value in part] for part in state)
    found = jax.jit(step).lower(shapes, _shapes(batch)).cost_analysis()
    flops = found.get("flops", 0.0) if isinstance(found, dict) else 0.0
    return float(flops) if flops > 0 else None


class FlopCounter(StepHook):
    """Counts the operations of the first training step, if a callback needs them.

    Attributes:
        is_wanted: whether they are to be counted.
        per_row: operations of a step for each row of its batch; None if unknown.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self.per_row: float | None = None
        self._batch: Any = None

    def on_step_start(self, model: keras.Model, kind: str, batch: Any) -> None:
        """See :class:`StepHook`."""
        if self.is_wanted and kind == "train":
            self._batch = _shapes(batch)

    def on_step_end(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
        """See :class:`StepHook`."""
        leaves = jax.tree.leaves(self._batch)
        if self.is_wanted and kind == "train" and leaves:
            self.is_wanted, flops = False, flops_of_step(model, state, self._batch)
            self.per_row = flops / leaves[0].shape[0] if flops else None


def _shapes(batch: Any) -> Any:
    return jax.tree.map(_shape, batch, is_leaf=lambda leaf: isinstance(leaf, PlacedRows))


def _shape(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(value), value.dtype)
