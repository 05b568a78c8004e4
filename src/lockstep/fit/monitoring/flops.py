"""Floating-point operations of a training step, counted from its trace, and the peak of a device: what ``mfu`` is made of.

A step is counted once, from shapes alone: Keras's own step for one device on the whole batch is traced and lowered, not compiled, and XLA adds
up its operations (``jax.stages.Lowered.cost_analysis``). XLA counts a loop as if it ran once: the matrix products and convolutions of its other
rounds are added. Operations that are repeated to save memory, or on several devices, thus count once, as in https://arxiv.org/abs/2204.02311,
appendix B. Programs that XLA cannot analyze (library kernels and custom kernels) count as nothing.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from lockstep.devices.placement import is_rows, placement_on
from lockstep.execution.compiled_step import described_state
from lockstep.execution.executors import EagerExecutor
from lockstep.execution.step_functions import StepFunctions
from lockstep.execution.step_hooks import StepHook


def flops_of_step(model: keras.Model, state: Any, batch: Any) -> float | None:
    """Return the floating-point operations of a training step of a compiled model, given its state and a placed batch, or their shapes.

    None if they cannot be counted: the step is not compiled or has operations for accelerators only, such as the fused attention of GPUs, or
    matrix products are in a loop that ends at a condition.
    """
    device = _counting_device()
    alone = placement_on([device], 1)
    executor = EagerExecutor(device)
    step = StepFunctions(model, alone, executor, lambda sentence: None).build_step(executor, "train")
    shapes = described_state(state)
    try:
        with jax.default_device(device):
            traced = jax.jit(step).trace(shapes, _shapes(batch))
            found = traced.lower().cost_analysis()
    except Exception:  # A step that needs values (run_eagerly), or an operation that JAX has for accelerators only.
        return None
    flops = found.get("flops", 0.0) if isinstance(found, dict) else 0.0
    often, once = (_operations_of_products(traced.jaxpr.jaxpr, is_repeated=repeated) for repeated in (True, False))
    return float(flops + often - once) if flops > 0 and math.isfinite(often) else None


def _counting_device() -> jax.Device:
    """Return a CPU, if JAX may use it: the plugins of accelerators do not analyze programs that are not compiled."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


class FlopCounter(StepHook):
    """Counts the operations of the first training step, if a callback needs them.

    Attributes:
        is_wanted: whether they are to be counted.
        per_row: operations of a step for each row of its batch; None if unknown.
        peak: operations a second that one device can do at most; None if unknown.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self.peak: float | None = None
        self.per_row: float | None = None
        self._batch: Any = None

    def on_step_start(self, model: keras.Model, kind: str, batch: Any) -> None:
        if self.is_wanted and kind == "train":
            self._batch = _shapes(batch)

    def on_step_end(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
        leaves = jax.tree.leaves(self._batch)
        if self.is_wanted and kind == "train" and leaves:
            self.is_wanted, flops = False, flops_of_step(model, state, self._batch)
            self.per_row = flops / leaves[0].shape[0] if flops else None


def _shapes(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), batch, is_leaf=is_rows)


def _operations_of_products(jaxpr: Jaxpr, *, is_repeated: bool) -> float:
    """Return the floating-point operations of all matrix products and convolutions, where padding counts as numbers.

    Args:
        jaxpr: the program.
        is_repeated: whether the body of a loop counts as often as it runs, or as often as it is in the compiled program. The result is infinite
            if products are in a loop that ends at a condition.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in _OPERATIONS:
            arrays: list[Any] = [*equation.invars[:2], *equation.outvars]
            total += _OPERATIONS[name](params, *(array.aval.shape for array in arrays))
        elif name != "pallas_call":  # a custom kernel
            inner = [_operations_of_products(one, is_repeated=is_repeated) for one in jaxprs_in_params(params)]
            found = max(inner, default=0.0) if name == "cond" else sum(inner)
            total += found * _repetitions(equation, is_repeated) if found else 0.0
    return total


def _of_dot(params: dict[str, Any], left: Sequence[int], right: Sequence[int], out: Sequence[int]) -> float:
    (contracted, _), _ = params["dimension_numbers"]
    return 2.0 * math.prod(out) * math.prod(left[axis] for axis in contracted)


def _of_convolution(params: dict[str, Any], left: Sequence[int], right: Sequence[int], out: Sequence[int]) -> float:
    _, *summed = params["dimension_numbers"].rhs_spec  # channels of the input, then the window
    return 2.0 * math.prod(out) * math.prod(right[axis] for axis in summed) / math.prod(params["lhs_dilation"])


_OPERATIONS = {"dot_general": _of_dot, "conv_general_dilated": _of_convolution}


def _repetitions(equation: JaxprEqn, is_repeated: bool) -> float:
    """Return how often the body of an equation runs; or how often it is in the program: a scan joins ``unroll`` rounds, and then the rest."""
    if equation.primitive.name == "while":
        return math.inf if is_repeated else 1
    if equation.primitive.name != "scan":
        return 1
    length, joined = equation.params["length"], equation.params["unroll"]
    if is_repeated or not 0 < joined < length:
        return int(length)
    return int(joined + length % joined)


# Floating-point operations a second of one device of JAX, dense, in the fastest format that training uses with 16 bits. The first that is part of
# ``device_kind`` counts. NVIDIA: data sheets of the boards (https://www.nvidia.com/en-us/data-center/), without sparsity. TPU:
# https://cloud.google.com/tpu/docs/system-architecture-tpu-vm, halved for v2 and v3, of which JAX sees each core.
PEAKS = {
    "B200": 2.25e15,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
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
    "TPU v6e": 918e12,
}


def peak_of(device_kind: str) -> float | None:
    """Return the peak floating-point operations a second of a device; None if unknown, or for a part of a GPU (MIG).

    Example:
        >>> peak_of("NVIDIA A100-SXM4-80GB"), peak_of("cpu")
        (312000000000000.0, None)
    """
    words = f" {device_kind.replace('-', ' ')} "
    if " MIG " in words:
        return None
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)
