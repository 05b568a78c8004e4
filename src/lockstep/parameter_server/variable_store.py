"""State of one server, without sockets: its variables, and the optimizer that is applied to them."""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import keras
import numpy as np

from lockstep._array_encoding import ArraySpec
from lockstep._errors import OptionError
from lockstep._keras.trainer import optimizer_maker
from lockstep.parameter_server.sharding import variable_name
from lockstep.parameter_server.sparse_rows import Gradient, SparseGradient, mean_gradient, pad_rows

OPTIMIZER = "optimizer/"  # Prefix of the optimizer's variables, which are numbered, among the names of variables.


@dataclass(frozen=True)
class VariableSnapshot:
    """All values, by name, after ``version`` updates."""

    version: int
    values: Mapping[str, jax.Array]


@dataclass(frozen=True)
class Push:
    """Contribution of one worker to an update.

    Args:
        gradients: gradients of each variable, by name.
        weight: weight of this push among those that make one update together, such as its number of rows.
    """

    gradients: Mapping[str, Gradient]
    weight: float = 1.0


@dataclass(frozen=True)
class UpdateRules:
    """What Keras's optimizer asks of the variables of a model besides their values, by their names.

    Args:
        constraints: applied after each update.
        without_decay: names of the variables that are excluded from weight decay.
    """

    constraints: Mapping[str, Any] = field(default_factory=dict)
    without_decay: frozenset[str] = frozenset()


NO_RULES = UpdateRules()


class VariableStore:
    """Variables of a server. Updates run one after another; a reader gets the newest snapshot at once, even during an update.

    Args:
        specs: the variables.
        optimizer: not built yet; it is built for ``specs``, and runs on the first CPU device, compiled.
        rules: rules of the variables.

    Raises:
        OptionError: the optimizer is already built for other variables.

    Attributes:
        snapshot: the newest values.
        is_filled: whether values were set; needed because a server may hold no variables at all.

    Example:
        >>> import keras, numpy as np
        >>> from lockstep._array_encoding import ArraySpec
        >>> from lockstep.parameter_server.variable_store import Push, VariableStore
        >>> store = VariableStore([ArraySpec("w", (2,), "float32")], keras.optimizers.SGD(0.5))
        >>> store.load(*store.prepare({"w": np.float32([1, 2])}))
        >>> store.apply([Push({"w": np.float32([1, 0])})])
        1
        >>> store.snapshot.values["w"].tolist()
        [0.5, 2.0]
    """

    def __init__(
        self,
        specs: Sequence[ArraySpec],
        optimizer: keras.optimizers.Optimizer,
        rules: UpdateRules = NO_RULES,
    ) -> None:
        if optimizer.built:
            raise OptionError(
                f"optimizer: {optimizer.name} is already built for other variables. Fix: give each server an optimizer of its own."
            )
        self.specs = tuple(specs)
        self._optimizer, self._device = optimizer, jax.devices("cpu")[0]
        self._names = [spec.name for spec in self.specs]
        self._update_lock = threading.Lock()
        with jax.default_device(self._device):
            _build(optimizer, [make_variable(spec) for spec in self.specs], list(map(variable_name, self.specs)), rules)
        self._optimizer_values: list[jax.Array] = []
        self._compiled_update = jax.jit(self._apply_optimizer, donate_argnums=1)
        self.snapshot, self.is_filled = VariableSnapshot(0, {}), False

    @property
    def optimizer_specs(self) -> tuple[ArraySpec, ...]:
        """Specs of the optimizer's variables, which :meth:`prepare` takes besides the values."""
        variables = enumerate(self._optimizer.variables)
        return tuple(ArraySpec(f"{OPTIMIZER}{number}", tuple(one.shape), str(one.dtype)) for number, one in variables)

    def prepare(self, state: Mapping[str, np.ndarray], version: int = 0) -> tuple[VariableSnapshot, list[jax.Array]]:
        """Copy all values to the device, for :meth:`load`.

        Runs code of the optimizer's class, so it is separate from :meth:`load`, which callers may call under a lock.

        Args:
            state: by name; with the optimizer's variables, as :meth:`state` gives them, or these get their initial values.
            version: number of updates that made them.
        """
        is_new = not all(spec.name in state for spec in self.optimizer_specs)
        known = self._initial_optimizer_values(state) if is_new else [state[spec.name] for spec in self.optimizer_specs]
        snapshot = VariableSnapshot(version, {name: self._copy_to_device(state[name]) for name in self._names})
        return snapshot, [self._copy_to_device(value) for value in known]

    def load(self, snapshot: VariableSnapshot, optimizer: list[jax.Array]) -> None:
        """Set all values to those of :meth:`prepare`."""
        with self._update_lock:
            self._optimizer_values, self.snapshot, self.is_filled = optimizer, snapshot, True

    def apply(self, pushes: Sequence[Push]) -> int:
        """Apply the optimizer once, to the weighted mean of the gradients, and return the number of updates so far.

        Args:
            pushes: added in this order, so equal pushes in the same order give the same bits.
        """
        with self._update_lock, jax.default_device(self._device):
            values = [self.snapshot.values[name] for name in self._names]
            gradients = [
                [self._pad_gradient(spec, push.gradients[spec.name]) for push in pushes] for spec in self.specs
            ]
            weights = [np.float32(push.weight) for push in pushes]
            values, self._optimizer_values = self._compiled_update(values, self._optimizer_values, weights, gradients)
            jax.block_until_ready(values)
            self.snapshot = VariableSnapshot(self.snapshot.version + 1, dict(zip(self._names, values, strict=True)))
            return self.snapshot.version

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of all arrays that :meth:`prepare` needs to restore this state."""
        with self._update_lock:
            values = {name: np.array(value) for name, value in self.snapshot.values.items()}
            optimizer = {f"{OPTIMIZER}{n}": np.array(value) for n, value in enumerate(self._optimizer_values)}
            return values | optimizer

    def _apply_optimizer(
        self, values: list[Any], optimizer_values: list[Any], weights: list[Any], gradients: list[Any]
    ) -> Any:
        means = [mean_gradient(value, weights, each) for value, each in zip(values, gradients, strict=True)]
        return self._optimizer.stateless_apply(optimizer_values, means, values)

    def _initial_optimizer_values(self, state: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return the optimizer's state before its first update, which may depend on the variables (ScheduleFreeAdamW)."""
        another = optimizer_maker(self._optimizer)()
        with jax.default_device(self._device):
            another.build([make_variable(spec, state[spec.name]) for spec in self.specs])
        return [np.array(variable.value) for variable in another.variables]

    def _copy_to_device(self, value: np.ndarray) -> jax.Array:
        """Copy first: JAX would share the memory of an array that the caller may change later."""
        return jax.device_put(np.array(value), self._device)

    def _pad_gradient(self, spec: ArraySpec, gradient: Gradient) -> Gradient:
        return pad_rows(gradient, spec.shape[0]) if isinstance(gradient, SparseGradient) else gradient


def _build(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], names: Sequence[str], rules: UpdateRules
) -> None:
    """Build an optimizer for variables that have the rules of those of the model with these names."""
    pairs = list(zip(names, variables, strict=True))
    for name, variable in pairs:
        variable.constraint = rules.constraints.get(name)
    if rules.without_decay:
        optimizer.exclude_from_weight_decay(var_list=[one for name, one in pairs if name in rules.without_decay])
    optimizer.build(variables)


def make_variable(
    spec: ArraySpec, value: np.ndarray | str = "zeros", kind: type[keras.Variable] = keras.Variable
) -> keras.Variable:
    """Return a variable to build an optimizer for, with the path and name that it has in its model: some optimizers select by them."""
    *scopes, name = variable_name(spec).split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return kind(value, shape=spec.shape, dtype=spec.dtype, name=name)


class CompletedIds:
    """Set of the completed ones of the numbers 0, 1, 2, …; small while they complete nearly in order.

    Args:
        below: all smaller numbers are complete from the beginning.

    Attributes:
        below: all smaller numbers are complete; this one is not.

    Example:
        >>> completed = CompletedIds()
        >>> completed.add(0), completed.add(2), completed.add(2), completed.below, 2 in completed
        (True, True, False, 1, True)
        >>> completed.add(1), completed.below
        (True, 3)
        >>> completed.raise_to(7), completed.below, completed.add(6)
        (None, 7, False)
    """

    def __init__(self, below: int = 0) -> None:
        self.below = below
        self._above: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self._above

    def __len__(self) -> int:
        return self.below + len(self._above)

    def raise_to(self, below: int) -> None:
        """Mark all smaller numbers as complete, including those that were never added."""
        if below > self.below:
            self.below = below
            self._above = {number for number in self._above if number >= below}
            self._compact()

    def add(self, number: int) -> bool:
        """Mark a number as complete; return False if it already was."""
        if number in self:
            return False
        self._above.add(number)
        self._compact()
        return True

    def _compact(self) -> None:
        while self.below in self._above:
            self._above.remove(self.below)
            self.below += 1
