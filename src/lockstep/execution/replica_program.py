"""One replica as programs of its own, forwards and backwards: the same on any number of devices.

What XLA makes of some arithmetic depends on what stands beside it in the program. A replica is therefore compiled alone,
once for each number of rows and each device, and called once for each replica, with the replica's number and rows given at
run time. Barriers keep the few operations that fetch the rows apart from it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var, jaxpr_as_fun

from lockstep._errors import ModelError
from lockstep.data.device_placement import Placement
from lockstep.execution.per_device import PerDeviceProgram

__all__ = ["ReplicaProgram"]

Shape = jax.ShapeDtypeStruct


class ReplicaProgram:
    """A function of one replica, and its gradient, each as one program of one device.

    Args:
        function: ``(replica, whole, cut) -> list of arrays``; ``whole`` are values that every replica has, ``cut`` its rows.
        whole: shapes of the first.
        cut: shapes of the second, for one replica, ``(rows, …)``.
        wrt: positions among ``[*whole, *cut]`` that a gradient is wanted for; with none there are no residuals.
        row_outputs: number of outputs, the first ones, that have rows.
        placement: the devices.

    Raises:
        ModelError: the function uses a value of the step that was not handed to it.
    """

    def __init__(
        self,
        function: Callable[[jax.Array, list[Any], list[Any]], list[jax.Array]],
        whole: Sequence[Shape],
        cut: Sequence[Shape],
        wrt: Sequence[int],
        row_outputs: Callable[[], int],
        placement: Placement,
    ) -> None:
        self._function, self._wrt, self._wholes = function, wrt, len(whole)
        self._backward_tree: Any = None
        number = Shape((), jnp.int32)
        self._traced, shapes = jax.make_jaxpr(self._with_residuals, return_shape=True)(number, list(whole), list(cut))
        if any(isinstance(value, jax.core.Tracer) for value in self._traced.consts):
            raise ModelError(
                "With deterministic=True a model's call cannot use a value that train_step has computed and left on the model or "
                "in an outer variable, because each replica runs as a program of its own. Hand it over as an argument of the "
                "call, or keep it in a variable of the model."
            )
        self.outputs: list[Shape] = jax.tree.leaves(shapes[0])
        self.row_outputs = row_outputs()
        self.varies = [jnp.issubdtype(output.dtype, jnp.inexact) for output in self.outputs]
        self._sort_residuals([id(var) for var in self._traced.jaxpr.invars[1:]])
        self.rows = cut[0].shape[0]
        self.forward = PerDeviceProgram(self._forward, placement)
        self.backward = PerDeviceProgram(self._backward, placement)

    @property
    def residuals(self) -> list[Shape]:
        """Shapes of what the forward pass leaves for the backward pass, besides the outputs."""
        kinds: list[Any] = [var.aval for var in self._kept]
        return [Shape(kind.shape, kind.dtype) for kind in kinds]

    def _sort_residuals(self, inputs: list[int]) -> None:
        """What the way back needs is a new value, kept once, or one of the inputs, which need not be kept."""
        self._kept: list[Var] = []
        self._sources: list[tuple[bool, int]] = []  # of each residual: whether it is an input, and its position
        for var in self._traced.jaxpr.outvars[len(self.outputs) :]:
            if id(var) in inputs:
                self._sources.append((True, inputs.index(id(var))))
                continue
            known = [i for i, kept in enumerate(self._kept) if kept is var]
            self._sources.append((False, known[0] if known else len(self._kept)))
            if not known:
                self._kept.append(var)

    def _with_residuals(self, replica: jax.Array, whole: list[Any], cut: list[Any]) -> tuple[list[Any], list[Any]]:
        values = [*whole, *cut]

        def moved(inputs: list[Any]) -> tuple[list[Any], list[Any]]:
            own = list(values)
            for position, value in zip(self._wrt, inputs, strict=True):
                own[position] = value
            outputs = self._function(replica, own[: self._wholes], own[self._wholes :])
            return [out for out in outputs if jnp.issubdtype(out.dtype, jnp.inexact)], outputs

        if not self._wrt:
            return moved([])[1], []
        _, backward, outputs = jax.vjp(moved, [values[position] for position in self._wrt], has_aux=True)
        residuals, self._backward_tree = jax.tree.flatten(backward)
        return outputs, residuals

    def _own(self, cut: list[jax.Array], starts: list[jax.Array]) -> list[jax.Array]:
        return [lax.dynamic_slice_in_dim(leaf, start, self.rows) for leaf, start in zip(cut, starts, strict=True)]

    def _forward(
        self, whole: list[jax.Array], cut: list[jax.Array], starts: list[jax.Array], replica: jax.Array
    ) -> list[jax.Array]:
        """The outputs of one replica, rows as they are and sums ``(1, …)``, then the residuals."""
        inputs = lax.optimization_barrier((replica, *whole, *self._own(cut, starts)))
        results = jaxpr_as_fun(self._traced)(*inputs)
        outputs, residuals = results[: len(self.outputs)], results[len(self.outputs) :]
        new = {source: value for source, value in zip(self._sources, residuals, strict=True) if not source[0]}
        kept = [new[False, position] for position in range(len(self._kept))]
        outputs, kept = lax.optimization_barrier((outputs, kept))
        rows, sums = outputs[: self.row_outputs], outputs[self.row_outputs :]
        return [*rows, *(value[None] for value in sums), *kept]

    def _backward(
        self,
        whole: list[jax.Array],
        cut: list[jax.Array],
        starts: list[jax.Array],
        kept: list[jax.Array],
        of_rows: list[jax.Array],
        of_sums: list[jax.Array],
        start_in_batch: jax.Array,
    ) -> list[jax.Array]:
        """Gradients of one replica, of what is whole ``(1, …)``, from those of the batch's outputs, rows first."""
        own = [lax.dynamic_slice_in_dim(leaf, start_in_batch, self.rows) for leaf in of_rows]
        inputs = [*whole, *self._own(cut, starts)]
        cotangents, residuals = lax.optimization_barrier(
            ([*own, *of_sums], [inputs[i] if is_input else kept[i] for is_input, i in self._sources])
        )
        (gradients,) = jax.tree.unflatten(self._backward_tree, residuals)(cotangents)
        gradients = lax.optimization_barrier(gradients)
        return [
            value[None] if position < self._wholes else value
            for position, value in zip(self._wrt, gradients, strict=True)
        ]
