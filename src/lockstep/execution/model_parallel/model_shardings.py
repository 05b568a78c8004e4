"""Where the variables of one model, and of its optimizer, lie on a mesh: by rules, or as the traced forward pass suggests."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lockstep._errors import ModelError
from lockstep._keras.graph import cause_of, layers_of
from lockstep._keras.sharded_variable import has_layout
from lockstep.data.device_placement import MeshPlacement, PlacedRows, is_large, is_rows
from lockstep.execution.gathered_variables import ModelLayout, Shard, VariableLayout, mebibytes
from lockstep.execution.model_parallel.auto_layout import AxisChoice, choose_axes
from lockstep.execution.model_parallel.layout_rules import OUTPUT, Axes, LayoutRules, MeshAxes

ROWS = 8  # with which the forward pass is traced: what is chosen must not depend on the batch with which a run begins or resumes


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
    """Shardings of one model's variables, which are settled before its first step.

    Args:
        model: the model.
        options: of the strategy.
        log: logs a sentence about the model.

    Attributes:
        is_settled: whether the axes of all variables are known.
    """

    def __init__(self, model: keras.Model, options: MeshOptions, log: Callable[[str], None]) -> None:
        self._model, self._options, self._log = model, options, log
        self._variables: list[keras.Variable] = []  # those that are settled, which keeps their ids their own
        self._axes: dict[int, Axes] = {}
        self._choices: dict[int, AxisChoice] = {}
        self.is_settled = False

    @property
    def shard(self) -> Shard:
        """Which variables are sharded over the first axis of the mesh, too."""
        return self._options.shard

    def check_variables(self) -> None:
        """Notice variables that the model has got since, such as those of LoRA; to be called before a run of steps."""
        self.is_settled &= all(id(variable) in self._axes for variable in self._model.variables)

    def settle(self, x: Any) -> None:
        """Settle where the variables lie.

        Args:
            x: inputs of the model: a tree of arrays, or of their shapes and types, ``(rows, …)``.

        Raises:
            ModelError: a rule matches nothing, two match the same variable, or one has another number of axes.
        """
        options, variables = self._options, self._model.variables
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
        self._variables, self.is_settled = variables, True

    def axes_of(self, variable: keras.Variable) -> Axes:
        """Return along which axes of the mesh a variable of the model is sharded."""
        return self._axes.get(id(variable), (None,) * len(variable.shape))

    def axes_of_optimizer(self) -> list[Axes]:
        """Return the same for the variables of the optimizer: those of the variables to which they belong."""
        own = {_flat_path(one): one for one in self._model.trainable_variables}
        return [self._axes_of_slot(slot, own) for slot in self._optimizer_variables]

    def all(self) -> Iterator[tuple[keras.Variable, NamedSharding]]:
        """Yield the variables of the model and of its optimizer with their shardings."""
        for variable in self._model.variables:
            yield variable, self.sharding_of(variable)
        for slot, axes in zip(self._optimizer_variables, self.axes_of_optimizer(), strict=True):
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
            parts.append([self._options.sharding(axes) for axes in self.axes_of_optimizer()])
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
        return [layer for layer in layers_of(self._model) if rules.pattern_for(_output_path(layer)) is not None]

    def constrain_output(self, layer: Any, value: jax.Array) -> jax.Array:
        """Shard what a layer returns as its rule says, except along axes that the mesh does not divide.

        Raises:
            ModelError: the rule has another number of axes.
        """
        options = self._options
        axes = options.rules and options.rules.axes_for(_output_path(layer), value.shape)
        if not axes:
            return value
        return jax.lax.with_sharding_constraint(value, options.sharding(options.axes.fitting(axes, value.shape)))

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
        slots = zip(self._optimizer_variables, self.axes_of_optimizer(), strict=True)
        rows += [row("optimizer", variable, axes) for variable, axes in slots]
        return ModelLayout(len(options.placement.devices), tuple(rows))

    @property
    def _optimizer_variables(self) -> list[keras.Variable]:
        optimizer = getattr(self._model, "optimizer", None)
        return list(optimizer.variables) if optimizer else []

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
        """Trace the forward pass and return how each variable is sharded along the second axis of the mesh."""
        model = self._model
        _, ways = self._options.axes.sizes.values()
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in variables]
        count = len(model.trainable_variables)

        def forward(values: list[Any], inputs: Any) -> Any:
            return model.stateless_call(values[:count], values[count:], inputs, training=True)[0]

        inputs = jax.tree.map(_described, x, is_leaf=is_rows)
        try:
            program = _traced(forward, shapes, inputs)
        except Exception as error:  # of the model, of any type
            self._log(
                f'layout="auto" cannot follow its variables, as its call cannot be traced ({cause_of(error)}); they stay whole. Fix: '
                "give layout= rules"
            )
            return {}
        row_axes = [0 if leaf.ndim else None for leaf in jax.tree.leaves(inputs)]
        named = [(one.path, shape) for one, shape in zip(variables, shapes, strict=True)]
        choices = choose_axes(program, named, row_axes, ways)
        return {id(variable): choice for variable, choice in zip(variables, choices, strict=True)}

    def _axes_of_slot(self, slot: keras.Variable, own: dict[str, keras.Variable]) -> Axes:
        """Return the axes of an optimizer's variable, whose name begins with the path of the variable that it belongs to."""
        name, shape = slot.path.rpartition("/")[2], tuple(slot.shape)
        ends = [end for end, letter in enumerate(name) if letter == "_"]
        for end in reversed(ends):
            reference = own.get(name[:end])
            if reference is not None and tuple(reference.shape) == shape:
                return self.axes_of(reference)
        return (None,) * len(shape)

    def _check_rules(self, rules: LayoutRules) -> None:
        paths = [variable.path for variable in self._model.variables]
        unused = rules.unmatched([*paths, *(_output_path(layer) for layer in layers_of(self._model))])
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
            size = mebibytes(math.prod(variable.shape) * np.dtype(variable.dtype).itemsize)
            choice = self._choices.get(id(variable))
            reason = choice.reason if choice else "no rule matches it" if self._options.rules else "it was not traced"
            self._log(f"variable {variable.path!r} ({size} MiB) is whole on each device: {reason}")


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(value: jax.Array, used: NamedSharding, kept: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(value, used)


def _gather_forward(value: jax.Array, used: NamedSharding, kept: NamedSharding) -> tuple[jax.Array, None]:
    return _gather(value, used, kept), None


def _gather_backward(used: NamedSharding, kept: NamedSharding, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(gradient, kept),)


_gather.defvjp(_gather_forward, _gather_backward)


def _flat_path(variable: keras.Variable) -> str:
    return str(variable.path).replace("/", "_")


def _output_path(layer: Any) -> str:
    return (layer.path or layer.name) + OUTPUT


def _traced(forward: Callable[..., Any], shapes: list[Any], inputs: Any) -> Any:
    """Trace with ``ROWS`` rows, or, if the model does not take so many, with those of the inputs."""
    some = jax.tree.map(lambda leaf: leaf.update(shape=(ROWS, *leaf.shape[1:])) if leaf.ndim else leaf, inputs)
    try:
        return jax.make_jaxpr(forward)(shapes, some)
    except Exception:  # of the model, of any type
        return jax.make_jaxpr(forward)(shapes, inputs)


def _described(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and type of an input, as the model gets it."""
    dtype = leaf.dtype if isinstance(leaf, PlacedRows) else jax.typeof(leaf).dtype
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(dtype))
