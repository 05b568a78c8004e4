"""Layout rules: which axis of a variable is sharded along which axis of the mesh.

A rule has the form of ``keras.distribution.LayoutMap``: a regular expression, which the whole path of a variable must match, and for each
axis of the variable the name of an axis of the mesh, or None. Other than there, no rule fails silently.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, PartitionSpec

from lockstep._errors import DeviceError, ModelError, OptionError, named_arguments, shown, whole_number
from lockstep.data.device_placement import DEVICE_AXIS, MeshPlacement
from lockstep.devices.names import platform_of
from lockstep.execution.gathered_variables import ModelLayout

AUTO = "auto"
OUTPUT = "/output"  # after the path of a layer: a rule for what the layer returns

Axes = tuple[str | None, ...]  # for each axis of an array the axis of the mesh along which it is sharded
MeshArgument = Any  # a mapping from names to sizes, or a keras.distribution.DeviceMesh
LayoutArgument = Any  # "auto", a keras.distribution.LayoutMap, a mapping from patterns to axes, or a ModelLayout


@dataclass(frozen=True)
class MeshAxes:
    """The axes of a mesh, under the names that the user gave them. The rows of a batch are sharded over the first.

    Attributes:
        sizes: number of devices along each axis, by name.
    """

    sizes: Mapping[str, int]

    @property
    def data(self) -> str:
        """Name of the axis over which rows are sharded."""
        return next(iter(self.sizes))

    def with_rows_only(self, count: int) -> "MeshAxes":
        """Return the same axes with ``count`` devices, all of them along the first."""
        return MeshAxes({name: count if name == self.data else 1 for name in self.sizes})

    def placement(self, devices: Sequence[jax.Device]) -> MeshPlacement:
        """Return the placement on a mesh of ``devices``: TPUs in an order that suits their links, others in the order of the workers.

        Raises:
            DeviceError: their number is another, or the slices of TPUs do not divide the first axis.
        """
        count = int(np.prod([*self.sizes.values()]))
        if count != len(devices):
            raise DeviceError(
                f"mesh={dict(self.sizes)} needs {count} devices, and there are {len(devices)}. Fix: change an axis."
            )
        names = [self.name_in_mesh(name) for name in self.sizes]
        kinds = (AxisType.Auto,) * len(names)
        return MeshPlacement(Mesh(self._arranged(devices), names, axis_types=kinds))

    def _arranged(self, devices: Sequence[jax.Device]) -> np.ndarray:
        """Return the devices in the shape of the mesh; ``jax.make_mesh`` refuses several machines of GPUs and several slices of TPUs."""
        shape = [*self.sizes.values()]
        if platform_of(devices[0]) != "tpu":
            return np.asarray(devices).reshape(shape)
        slices = len({getattr(device, "slice_index", 0) for device in devices})
        if slices == 1:
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        if shape[0] % slices:
            raise DeviceError(
                f"mesh={dict(self.sizes)}: {slices} slices of TPUs do not divide the axis {self.data!r}, over which their network is used. Fix: "
                f"make it a multiple of {slices}."
            )
        inner, outer = [shape[0] // slices, *shape[1:]], [slices, *[1] * (len(shape) - 1)]
        return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)

    def name_in_mesh(self, name: str) -> str:
        """Return the name of an axis in the JAX mesh, where the first has the name that it has under all strategies."""
        return DEVICE_AXIS if name == self.data else name

    def spec(self, axes: Axes) -> PartitionSpec:
        """Return ``axes`` as JAX's specification of a sharding."""
        return PartitionSpec(*(None if axis is None else self.name_in_mesh(axis) for axis in axes))

    def fitting(self, axes: Axes, shape: Sequence[int]) -> Axes:
        """Return ``axes`` without those that do not divide the array's axes."""
        return tuple(
            axis if axis is not None and length % self.sizes[axis] == 0 else None
            for axis, length in zip(axes, shape, strict=True)
        )


@dataclass(frozen=True)
class LayoutRules:
    """Rules of one strategy.

    Attributes:
        axes: by regular expression the axes along which matching variables, or outputs of layers, are sharded.
        must_match: whether each rule must match something; a rule of a ``LayoutMap`` that does not is only logged, as it may be that of
            another variant of the same model.
    """

    axes: Mapping[str, Axes]
    must_match: bool

    def pattern_for(self, path: str) -> str | None:
        """Return the rule for the variable or output of this path, or None.

        Raises:
            ModelError: there are two.
        """
        if path in self.axes:
            return path
        found = [pattern for pattern in self.axes if re.fullmatch(pattern, path)]
        if len(found) > 1:
            raise ModelError(
                f"layout: rules {found[0]!r} and {found[1]!r} both match {path!r}. Fix: make one of them narrower; a rule that equals the "
                "path comes before all others."
            )
        return found[0] if found else None

    def axes_for(self, path: str, shape: Sequence[int]) -> Axes | None:
        """Return the axes for a variable of this path and shape; None if no rule matches.

        Raises:
            ModelError: two rules match, or the rule is for another number of axes.
        """
        pattern = self.pattern_for(path)
        if pattern is None:
            return None
        axes = self.axes[pattern]
        if len(axes) != len(shape):
            raise ModelError(
                f"layout: rule {pattern!r} has {len(axes)} axes, {axes}, and {path!r} has {len(shape)}, {tuple(shape)}. Fix: one entry for "
                "each axis; None where it is not sharded."
            )
        return axes

    def unmatched(self, paths: Sequence[str]) -> list[str]:
        """Return the rules that no variable or output among ``paths`` uses.

        Raises:
            ModelError: two rules match the same path.
        """
        used = {self.pattern_for(path) for path in paths}
        return [pattern for pattern in self.axes if pattern not in used]


def parse_mesh(mesh: MeshArgument) -> MeshAxes:
    """Return the axes of the argument ``mesh``.

    Raises:
        OptionError: it is no mesh.
    """
    if isinstance(mesh, keras.distribution.DeviceMesh):
        mesh = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    sizes = named_arguments("mesh", mesh)
    if not sizes:
        raise OptionError('mesh: expected sizes of axes such as {"data": 2, "model": 4}, got {}.')
    for number, (name, size) in enumerate(sizes.items()):
        whole_number(f"mesh: {name}", size)
        if number and name == DEVICE_AXIS:
            raise OptionError(f"mesh: only the first axis may be called {DEVICE_AXIS!r}. Fix: give it another name.")
    return MeshAxes({name: int(size) for name, size in sizes.items()})


def parse_layout(layout: LayoutArgument, mesh: MeshAxes) -> LayoutRules | None:
    """Return the rules of the argument ``layout``; None: "auto".

    Raises:
        OptionError: it has another type, or a rule names an axis that the mesh lacks, or one twice.
    """
    if isinstance(layout, str) and layout == AUTO:
        return None
    if isinstance(layout, ModelLayout):
        layout = layout.rules()
    is_map = isinstance(layout, keras.distribution.LayoutMap)
    device_mesh = layout.device_mesh if is_map else None
    if not isinstance(layout, Mapping):
        raise OptionError(
            f'layout: expected "auto", a keras.distribution.LayoutMap or a dictionary of rules, got {shown(layout)}.'
        )
    if device_mesh is not None and parse_mesh(device_mesh) != mesh:
        raise OptionError(
            f"layout: its mesh is {dict(parse_mesh(device_mesh).sizes)}, and the strategy's is {dict(mesh.sizes)}. Fix: give "
            "both the same."
        )
    rules = {pattern: _axes(pattern, layout[pattern].axes if is_map else layout[pattern], mesh) for pattern in layout}
    return LayoutRules(rules, must_match=not is_map)


def _axes(pattern: Any, axes: Any, mesh: MeshAxes) -> Axes:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise OptionError(f"layout: {shown(pattern)} is no regular expression ({error}).") from error
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise OptionError(
            f"layout: rule {pattern!r}: expected names of axes such as (None, {mesh.data!r}), got {shown(axes)}."
        )
    named = [axis for axis in axes if axis is not None]
    for axis in named:
        if axis not in mesh.sizes:
            names = ", ".join(map(repr, mesh.sizes))
            raise OptionError(f"layout: rule {pattern!r} names the axis {shown(axis)}, and the mesh has {names}.")
    if len(named) > len(set(named)):
        raise OptionError(
            f"layout: rule {pattern!r} names an axis of the mesh twice, {tuple(axes)}. Fix: name each once."
        )
    return tuple(axes)
