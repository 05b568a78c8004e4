"""Where the variables of a model lie: what ``strategy.layout`` returns and prints."""

import math
import re
from dataclasses import dataclass
from functools import partial

import keras
import numpy as np

from lockstep._keras.graph import optimizer_variables
from lockstep._padded_array import padded_shape
from lockstep.devices.host_memory import size_text
from lockstep.devices.placement import DEVICE_AXIS, Placement, is_large
from lockstep.execution.variable_shards import Recompute, Shard, is_sharded, layers_to_recompute

NAMED = 4  # variables in a note; strategy.layout(model) lists all


@dataclass(frozen=True)
class VariableLayout:
    """Where one variable lies.

    Attributes:
        path: name within the model or its optimizer.
        owner: "model" or "optimizer".
        shape: shape of the whole variable.
        bytes: size of the whole variable.
        axes: for each axis of the variable the axis of the mesh along which it is sharded, None if it is not.
        device_bytes: on each device, with the padding of shards.
        gathered: in which parts of a step the whole value is gathered; what is gathered in "forward" alone is kept for the backward
            pass. "" for a variable that is whole, or never gathered.
        reason: why ``layout="auto"`` has chosen these axes.
        collectives: those of the forward pass that follow from them, if they are known.
    """

    path: str
    owner: str
    shape: tuple[int, ...]
    bytes: int
    axes: tuple[str | None, ...]
    device_bytes: int
    gathered: str = ""
    reason: str = ""
    collectives: tuple[str, ...] = ()

    @property
    def axis(self) -> int | None:
        """The first axis along which the variable is sharded; None: it is whole on each device."""
        return next((number for number, axis in enumerate(self.axes) if axis is not None), None)


@dataclass(frozen=True)
class ModelLayout:
    """Where the variables of a model and of its optimizer lie; ``str`` makes a table.

    Attributes:
        devices: number of devices.
        variables: one entry for each variable.
    """

    devices: int
    variables: tuple[VariableLayout, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all variables."""
        return sum(variable.bytes for variable in self.variables)

    @property
    def device_bytes(self) -> int:
        """Bytes of the variables on each device, between two steps."""
        return sum(variable.device_bytes for variable in self.variables)

    def rules(self) -> dict[str, tuple[str | None, ...]]:
        """Return the layout of the model's sharded variables as rules.

        Returns:
            By regular expression the axes of the mesh; it can be changed and given to ``ModelParallelStrategy`` as ``layout``.

        Example:
            >>> import lockstep
            >>> from lockstep.execution.variable_layout import ModelLayout, VariableLayout
            >>> kernel = VariableLayout("up/kernel", "model", (64, 256), 65536, (None, "model"), 16384)
            >>> ModelLayout(4, (kernel,)).rules()
            {'up/kernel': (None, 'model')}
        """
        return {re.escape(one.path): one.axes for one in self.variables if one.owner == "model" and any(one.axes)}

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("variable", "shape", "MiB", "MiB a device", "sharded along", "gathered", "why")]
        for one in self.variables:
            along = ", ".join(f"axis {n} by {axis}" for n, axis in enumerate(one.axes) if axis) or "whole"
            sizes = _mebibytes(one.bytes), _mebibytes(one.device_bytes)
            rows.append((one.path, str(one.shape), *sizes, along, one.gathered, one.reason))
        total = _mebibytes(self.bytes), _mebibytes(self.device_bytes)
        rows.append((f"all, {self.devices} devices", "", *total, "", "", ""))
        rows = [row[: 7 if any(row[6] for row in rows[1:]) else 6] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:.3f}"


def layout_of(
    model: keras.Model, placement: Placement, shard: Shard, recompute: Recompute, *, deterministic: bool
) -> ModelLayout:
    """Return where the variables of a built model lie between two steps, without those that its optimizer has not made yet; if
    ``deterministic``, all are gathered before a step.
    """
    layers = layers_to_recompute(model, partial(is_sharded, placement), recompute)
    twice = {id(variable) for layer in layers for variable in layer.variables}

    def row(owner: str, variable: keras.Variable) -> VariableLayout:
        shape = tuple(variable.shape)
        is_sharded = shard == "variables" or (shard == "optimizer" and owner == "optimizer")
        axis = placement.slice_axis(shape) if is_sharded else None
        number_size = np.dtype(variable.dtype).itemsize
        size = device_size = math.prod(shape) * number_size
        if axis is not None:
            device_size = (
                math.prod(padded_shape(shape, placement.slice_sharding(shape))) // len(placement.devices) * number_size
            )
        if axis is None or (owner == "optimizer" and not deterministic):
            gathered = ""
        else:
            gathered = "before a step" if deterministic else "forward, backward" if id(variable) in twice else "forward"
        axes = tuple(DEVICE_AXIS if number == axis else None for number in range(len(shape)))
        return VariableLayout(variable.path, owner, shape, size, axes, device_size, gathered)

    rows = [row("model", variable) for variable in model.weights]
    rows += [row("optimizer", variable) for variable in optimizer_variables(model)]
    return ModelLayout(len(placement.devices), tuple(rows))


def layout_notes(layout: ModelLayout, optimizer: keras.Optimizer | None) -> list[str]:
    """Return a sentence for the large variables that stay whole, one for those that no recomputed layer holds, and one for Muon."""
    if layout.devices == 1:
        return []
    notes = []
    if whole := [one for one in layout.variables if one.axis is None and is_large(one.shape)]:
        notes.append(
            f"{_size_of(whole)} of large variables stay whole on each device, as each of their axes is shorter than {layout.devices}: "
            f"{_named(whole)}"
        )
    if isinstance(getattr(optimizer, "inner_optimizer", optimizer), keras.optimizers.Muon):
        notes.append("optimizer Muon multiplies whole matrices, for which XLA adds collectives to the update")
    kept = [one for one in layout.variables if one.gathered == "forward"]
    if kept and len(kept) < sum(one.gathered != "" for one in layout.variables):
        notes.append(f"no recomputed layer holds {_named(kept)}: {_size_of(kept)} are kept for the backward pass")
    return notes


def _size_of(variables: list[VariableLayout]) -> str:
    return size_text(sum(one.bytes for one in variables))


def _named(variables: list[VariableLayout]) -> str:
    """Return the paths and shapes of the first variables, and how many there are beside them."""
    shown = ", ".join(f"{one.path!r} {one.shape}" for one in variables[:NAMED])
    more = len(variables) - NAMED
    return f"{shown} and {more} more, which strategy.layout(model) lists" if more > 0 else shown
