"""Where the variables of one model, and of its optimizer, lie on a mesh: by rules, or as the traced forward pass suggests.

A rule says which axis of a variable is sharded along which axis of the mesh. It has the form of ``keras.distribution.LayoutMap``: a regular
expression, which the whole path of a variable must match, and for each axis of the variable the name of an axis of the mesh, or None. Other
than there, no rule fails silently.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep._errors import DeviceError, ModelError, OptionError, named_arguments, shown, whole_number
from lockstep._keras.batch_normalization import clear_synchronized
from lockstep._keras.graph import (
    cause_of,
    copy_keras_mask,
    layers_of,
    models_of,
    optimizer_variables,
    training_argument,
)
from lockstep._keras.layer_attributes import attributes_kept
from lockstep._keras.variable_placement import has_layout
from lockstep.data.random_state import random_state_kept
from lockstep.devices.host_memory import size_text
from lockstep.devices.names import platform_of
from lockstep.devices.placement import DEVICE_AXIS, MeshPlacement, is_large
from lockstep.execution.model_parallel.auto_layout import AxisChoice, choose_axes
from lockstep.execution.model_parallel.traced_inputs import inputs_of_batch, inputs_of_model
from lockstep.execution.variable_layout import ModelLayout, VariableLayout
from lockstep.execution.variable_shards import Shard

AUTO = "auto"
OUTPUT = "/output"  # after the path of a layer: a rule for what the layer returns

Axes = tuple[str | None, ...]  # for each axis of an array the axis of the mesh along which it is sharded
MeshArgument = Any  # a mapping from names to sizes, or a keras.distribution.DeviceMesh
LayoutArgument = Any  # "auto", a keras.distribution.LayoutMap, a mapping from patterns to axes, or a ModelLayout


@dataclass(frozen=True)
class MeshAxes:
    """The axes of a mesh: the number of devices along each, by the user's name of it. The rows of a batch are sharded over the first."""

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
                f"mesh={dict(self.sizes)} needs {count} devices, and there are {len(devices)}. Fix: change an axis, or name the devices: devices=[…]."
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
        raise OptionError(
            'mesh: expected sizes of axes such as {"data": 2, "model": 4}, got {}. Fix: name at least one.'
        )
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
            f'layout: expected "auto", a keras.distribution.LayoutMap or a dictionary of rules, got {shown(layout)}. Fix: pass one of '
            "these."
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
        raise OptionError(
            f"layout: {shown(pattern)} is no regular expression ({error}). Fix: write a pattern of variables' paths, such as 'dense/.*'."
        ) from error
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise OptionError(
            f"layout: rule {pattern!r}: expected names of axes such as (None, {mesh.data!r}), got {shown(axes)}. Fix: pass a tuple with an entry "
            "for each axis of the variable."
        )
    named = [axis for axis in axes if axis is not None]
    for axis in named:
        if not isinstance(axis, str) or axis not in mesh.sizes:
            names = ", ".join(map(repr, mesh.sizes))
            raise OptionError(
                f"layout: rule {pattern!r} names the axis {shown(axis)}, and the mesh has {names}. Fix: name one of these, or None."
            )
    if len(named) > len(set(named)):
        raise OptionError(
            f"layout: rule {pattern!r} names an axis of the mesh twice, {tuple(axes)}. Fix: name each once."
        )
    return tuple(axes)


@dataclass(frozen=True)
class MeshOptions:
    """How a strategy lays variables over its mesh.

    Attributes:
        placement: the mesh.
        axes: its axes, under the user's names.
        rules: the user's rules; None: chosen for each model by its use of the variables.
        shard: "variables": each variable is sharded over the first axis, too.
    """

    placement: MeshPlacement
    axes: MeshAxes
    rules: LayoutRules | None
    shard: Shard

    def sharding(self, axes: Axes) -> NamedSharding:
        """Return the sharding along these axes."""
        return NamedSharding(self.placement.mesh, self.axes.spec(axes))

    def sharding_at_creation(self, variable: keras.Variable, shape: tuple[int, ...]) -> NamedSharding | None:
        """Return where the first value of a variable is laid; None: where that of plain Keras is, or of the variable that it belongs to.

        Before a model has been traced it is not known how its variables are used: until then their numbers are shared out evenly.
        """
        if has_layout(variable):  # An optimizer's, which Keras lays like the variable that it belongs to.
            return None
        if self.rules is None:
            return self._even_sharding(shape)
        try:
            axes = self.rules.axes_for(variable.path, shape)
        except ModelError:  # It may be an optimizer's; those of the model are checked when all are made.
            return None
        found = self.complete(axes or (None,) * len(shape), shape)
        return self.sharding(found) if any(found) else None

    def complete(self, axes: Axes, shape: Sequence[int]) -> Axes:
        """Return ``axes`` without those that do not divide the shape and, if variables are sharded over rows' axis, with that."""
        axes = self.axes.fitting(axes, shape)
        data = self.axes.data
        if self.shard is None or data in axes or not is_large(shape) or self.axes.sizes[data] == 1:
            return axes
        free = [n for n, length in enumerate(shape) if axes[n] is None and length % self.axes.sizes[data] == 0]
        longest = max(free, key=lambda n: shape[n], default=None)
        return tuple(data if n == longest else axis for n, axis in enumerate(axes))

    def _even_sharding(self, shape: Sequence[int]) -> NamedSharding | None:
        count = len(self.placement.devices)
        fitting = [axis for axis, length in enumerate(shape) if length % count == 0]
        if count == 1 or not fitting or not is_large(shape):
            return None
        longest = max(fitting, key=lambda axis: shape[axis])
        spec = PartitionSpec(*[None] * longest, self.placement.mesh.axis_names)
        return NamedSharding(self.placement.mesh, spec)


class ModelShardings:
    """Shardings of one model's variables, which are resolved before its first step.

    Attributes:
        is_resolved: whether the axes of all variables are known.
    """

    def __init__(self, model: keras.Model, options: MeshOptions, log: Callable[[str], None]) -> None:
        self._model, self._options, self._log = model, options, log
        self._variables: list[keras.Variable] = []  # those that are resolved, which keeps their ids their own
        self._axes: dict[int, Axes] = {}
        self._choices: dict[int, AxisChoice] = {}
        self.is_resolved = False

    @property
    def shard(self) -> Shard:
        """Which variables are sharded over the first axis of the mesh, too."""
        return self._options.shard

    def check_variables(self) -> None:
        """Notice variables that the model has got since, such as those of LoRA; to be called before a run of steps."""
        self.is_resolved &= all(id(variable) in self._axes for variable in self._model.variables)

    def resolve(self, x: Any) -> None:
        """Resolve where the variables lie; ``x`` has the inputs of a model that states none: a tree of arrays ``(rows, …)``, or of their shapes
        and types.

        Raises:
            ModelError: a rule matches nothing, two match the same variable, or one has another number of axes.
        """
        options, variables = self._options, self._model.variables
        self._axes = {}
        if options.rules is None:
            self._choices = self._choose(x)
        for variable in variables:
            wanted = self._wanted_axes(variable)
            self._axes[id(variable)] = found = options.complete(wanted, variable.shape)
            for number, (axis, kept) in enumerate(zip(wanted, found, strict=True)):
                if axis is not None and kept != axis:
                    self._log(
                        f"variable {variable.path!r} is not sharded along axis {number}, as its {variable.shape[number]} numbers cannot be "
                        f"divided by {options.axes.sizes[axis]}"
                    )
        if options.rules is not None:
            self._check_rules(options.rules)
        self._report_whole_variables()
        self._variables, self.is_resolved = variables, True

    def axes_of(self, variable: keras.Variable) -> Axes:
        """Return along which axes of the mesh a variable of the model is sharded."""
        return self._axes.get(id(variable), (None,) * len(variable.shape))

    def axes_of_optimizer(self) -> list[tuple[keras.Variable, Axes]]:
        """Return the variables of the optimizer, each with the axes of the variable that it belongs to."""
        own = {(one.path.replace("/", "_"), tuple(one.shape)): one for one in self._model.trainable_variables}
        return [(slot, self._axes_of_slot(slot, own)) for slot in optimizer_variables(self._model)]

    def all(self) -> Iterator[tuple[keras.Variable, NamedSharding]]:
        """Yield the variables of the model and of its optimizer with their shardings."""
        for variable in self._model.variables:
            yield variable, self.sharding_of(variable)
        for slot, axes in self.axes_of_optimizer():
            yield slot, self._options.sharding(axes)

    def sharding_of(self, variable: keras.Variable) -> NamedSharding:
        """Return the sharding of a variable of the model."""
        return self._options.sharding(self.axes_of(variable))

    def of_state(self, state: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shardings of a state: trainable and non-trainable variables, for training those of the optimizer, and metrics."""
        model, replicated = self._model, self._options.placement.replicated
        parts: list[Any] = [
            [self.sharding_of(variable) for variable in kind]
            for kind in (model.trainable_variables, model.non_trainable_variables)
        ]
        if len(state) > 3:
            parts.append([self._options.sharding(axes) for _, axes in self.axes_of_optimizer()])
        return tuple((*parts, replicated)[: len(state)])

    def is_gathered(self, variable: keras.Variable) -> bool:
        """Return whether a variable is gathered over the devices that hold different rows, where it is used."""
        return self._options.axes.data in self.axes_of(variable)

    def gather(self, variable: keras.Variable, value: jax.Array) -> jax.Array:
        """Return the value of a variable as each row of devices uses it; its gradient goes back to the shards."""
        if not self.is_gathered(variable):
            return value
        axes, data = self.axes_of(variable), self._options.axes.data
        used = self._options.sharding(tuple(None if axis == data else axis for axis in axes))
        return _gather(value, used, self._options.sharding(axes))

    def layers_with_rules(self) -> list[Any]:
        """Return the layers for whose outputs there is a rule."""
        rules = self._options.rules
        if rules is None:
            return []
        return [layer for layer in self._layers if rules.pattern_for(_output_path(layer)) is not None]

    def constrain_output(self, layer: Any, value: jax.Array) -> jax.Array:
        """Shard what a layer returns as its rule says, except along axes that are not divisible by those of the mesh.

        Raises:
            ModelError: the rule has another number of axes.
        """
        options = self._options
        axes = options.rules and options.rules.axes_for(_output_path(layer), value.shape)
        if not axes:
            return value
        sharding = options.sharding(options.axes.fitting(axes, value.shape))
        return copy_keras_mask(value, jax.lax.with_sharding_constraint(value, sharding))

    def layout(self) -> ModelLayout:
        """Return where the variables lie, with the reason for each."""
        options = self._options

        def row(owner: str, variable: keras.Variable, axes: Axes) -> VariableLayout:
            shape = tuple(variable.shape)
            size = math.prod(shape) * np.dtype(variable.dtype).itemsize
            parts = math.prod(options.axes.sizes[axis] for axis in axes if axis is not None)
            is_gathered = owner == "model" and options.axes.data in axes
            choice = self._choices.get(id(variable))
            return VariableLayout(
                variable.path,
                owner,
                shape,
                size,
                axes,
                size // parts,
                gathered="forward, backward" if is_gathered else "",
                reason=choice.reason if choice else "",
                collectives=choice.collectives if choice else (),
            )

        rows = [row("model", variable, self.axes_of(variable)) for variable in self._model.weights]
        rows += [row("optimizer", variable, axes) for variable, axes in self.axes_of_optimizer()]
        return ModelLayout(len(options.placement.devices), tuple(rows))

    @property
    def _layers(self) -> list[Any]:
        """The model, and models and layers within it at all depths."""
        return [*models_of(self._model), *layers_of(self._model)]

    def _wanted_axes(self, variable: keras.Variable) -> Axes:
        whole: Axes = (None,) * len(variable.shape)
        if self._options.rules is not None:
            return self._options.rules.axes_for(variable.path, variable.shape) or whole
        choice = self._choices.get(id(variable))
        if choice is None or choice.axis is None:
            return whole
        model_axis = list(self._options.axes.sizes)[1]
        return tuple(model_axis if axis == choice.axis else None for axis in range(len(whole)))

    def _choose(self, x: Any) -> dict[int, AxisChoice]:
        """Trace the forward pass, without effects, and return how each variable is sharded along the second axis of the mesh."""
        model = self._model
        _, num_shards = self._options.axes.sizes.values()
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in variables]
        count = len(model.trainable_variables)

        def forward(values: list[Any], inputs: Any) -> Any:
            return model.stateless_call(values[:count], values[count:], inputs, **training_argument(model))[0]

        inputs = inputs_of_model(model) or inputs_of_batch(x)
        try:
            with clear_synchronized(model), attributes_kept(model), random_state_kept():
                program = inputs.trace(forward, shapes)
        except Exception as error:  # of the model, of any type
            self._log(
                f'layout="auto" cannot follow its variables, as its call cannot be traced ({cause_of(error)}); they stay whole. Fix: '
                "give layout= rules"
            )
            return {}
        named = [(one.path, shape) for one, shape in zip(variables, shapes, strict=True)]
        choices = choose_axes(program, named, inputs.row_axes, num_shards)
        return {id(variable): choice for variable, choice in zip(variables, choices, strict=True)}

    def _axes_of_slot(self, slot: keras.Variable, own: dict[tuple[str, tuple[int, ...]], keras.Variable]) -> Axes:
        """Return the axes of an optimizer's variable, whose name begins with the path of the variable of its shape that it belongs to."""
        name, shape = slot.path.rpartition("/")[2], tuple(slot.shape)
        ends = [end for end, letter in enumerate(name) if letter == "_"]
        for end in reversed(ends):
            reference = own.get((name[:end], shape))
            if reference is not None:
                return self.axes_of(reference)
        return (None,) * len(shape)

    def _check_rules(self, rules: LayoutRules) -> None:
        paths = [variable.path for variable in self._model.variables]
        unused = rules.unmatched([*paths, *(_output_path(layer) for layer in self._layers)])
        if unused and rules.must_match:
            raise ModelError(
                f"layout: rule {unused[0]!r} matches no variable of model {self._model.name!r}. A rule must match the whole path. Fix: "
                f"change it, or leave it out; the paths are {', '.join(map(repr, paths[:12]))}{', …' if len(paths) > 12 else ''}."
            )
        for pattern in unused:
            self._log(f"layout: rule {pattern!r} matches none of its variables")

    def _report_whole_variables(self) -> None:
        """Log a sentence about each large variable that every device has as a whole."""
        if len(self._options.placement.devices) == 1:
            return
        for variable in self._model.variables:
            if not is_large(variable.shape) or any(self.axes_of(variable)):
                continue
            size = size_text(math.prod(variable.shape) * np.dtype(variable.dtype).itemsize)
            choice = self._choices.get(id(variable))
            reason = choice.reason if choice else "no rule matches it" if self._options.rules else "it was not traced"
            self._log(f"variable {variable.path!r} ({size}) is whole on each device: {reason}")


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(value: jax.Array, used: NamedSharding, kept: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(value, used)


def _gather_forward(value: jax.Array, used: NamedSharding, kept: NamedSharding) -> tuple[jax.Array, None]:
    return _gather(value, used, kept), None


def _gather_backward(used: NamedSharding, kept: NamedSharding, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(gradient, kept),)


_gather.defvjp(_gather_forward, _gather_backward)


def _output_path(layer: Any) -> str:
    return (layer.path or layer.name) + OUTPUT
