"""The variables of one server, and the optimizer that is applied to them. It knows nothing of sockets and workers."""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from lockstep._errors import OptionError
from lockstep.parameter_server.variables.sharding import VariableSpec, whole_name
from lockstep.parameter_server.variables.sparse_gradients import Gradient, SparseGradient, as_update, padded

__all__ = ["OPTIMIZER", "Push", "VariableSnapshot", "VariableStore", "as_variable"]

OPTIMIZER = "optimizer/"  # Before the numbers of its variables, among names of variables.


@dataclass(frozen=True)
class VariableSnapshot:
    """All values at one moment: none is older or newer than another.

    Args:
        version: number of updates that made them.
        values: by name.
    """

    version: int
    values: Mapping[str, jax.Array]


@dataclass(frozen=True)
class Push:
    """What one worker adds to an update.

    Args:
        gradients: of each variable, by name.
        weight: of this among those that make one update together, such as its number of rows.
    """

    gradients: Mapping[str, Gradient]
    weight: float = 1.0


class VariableStore:
    """Variables of a server. Updates follow one another; who reads gets a snapshot at once, also while an update runs.

    Args:
        specs: the variables.
        optimizer: is built for them, so it must not be built yet. It runs on ``device``, compiled.
        device: where values are; None: the first CPU device.

    Raises:
        OptionError: the optimizer is built for other variables already.

    Attributes:
        snapshot: the newest values.
        is_filled: whether there are any yet; a server may have no variables at all.

    Example:
        >>> import keras, numpy as np
        >>> from lockstep.parameter_server.variables.sharding import VariableSpec, whole_name
        >>> from lockstep.parameter_server.variables.variable_store import Push, VariableStore
        >>> store = VariableStore([VariableSpec("w", (2,), "float32")], keras.optimizers.SGD(0.5))
        >>> store.fill({"w": np.float32([1, 2])})
        >>> store.apply([Push({"w": np.float32([1, 0])})])
        1
        >>> store.snapshot.values["w"].tolist()
        [0.5, 2.0]
    """

    def __init__(
        self, specs: Sequence[VariableSpec], optimizer: keras.optimizers.Optimizer, device: jax.Device | None = None
    ) -> None:
        if optimizer.built:
            raise OptionError(
                f"optimizer: {optimizer.name} is built for other variables; give each server one of its own."
            )
        self.specs = tuple(specs)
        self._optimizer, self._device = optimizer, device or jax.devices("cpu")[0]
        self._names = [spec.name for spec in self.specs]
        self._updating = threading.Lock()
        with jax.default_device(self._device):
            optimizer.build([as_variable(spec) for spec in self.specs])
        self._optimizer_values: list[jax.Array] = []
        self._update = jax.jit(self._updated, donate_argnums=1)
        self.snapshot, self.is_filled = VariableSnapshot(0, {}), False

    @property
    def optimizer_specs(self) -> tuple[VariableSpec, ...]:
        """What :meth:`fill` takes besides the variables."""
        variables = enumerate(self._optimizer.variables)
        return tuple(
            VariableSpec(f"{OPTIMIZER}{number}", tuple(one.shape), str(one.dtype)) for number, one in variables
        )

    def fill(self, state: Mapping[str, np.ndarray], version: int = 0) -> None:
        """Set all values.

        Args:
            state: by name; the optimizer's too, as :meth:`state` gives them, or it begins anew.
            version: number of updates that made them.
        """
        with self._updating:
            is_new = not all(spec.name in state for spec in self.optimizer_specs)
            known = self._fresh(state) if is_new else [state[spec.name] for spec in self.optimizer_specs]
            self._optimizer_values = [self._copied(value) for value in known]
            self.snapshot = VariableSnapshot(version, {name: self._copied(state[name]) for name in self._names})
            self.is_filled = True

    def apply(self, pushes: Sequence[Push]) -> int:
        """Apply the optimizer once, to the mean of what was pushed; gives the number of updates so far.

        Args:
            pushes: added in this order, so the same ones in the same order make the same bits.
        """
        with self._updating, jax.default_device(self._device):
            values = [self.snapshot.values[name] for name in self._names]
            gradients = [[self._fitted(spec, push.gradients[spec.name]) for push in pushes] for spec in self.specs]
            weights = [np.float32(push.weight) for push in pushes]
            values, self._optimizer_values = self._update(values, self._optimizer_values, weights, gradients)
            jax.block_until_ready(values)
            self.snapshot = VariableSnapshot(self.snapshot.version + 1, dict(zip(self._names, values, strict=True)))
            return self.snapshot.version

    def state(self) -> tuple[int, dict[str, np.ndarray]]:
        """The version, and all that :meth:`fill` needs to go on from here, as copies."""
        with self._updating:
            values = {name: np.array(value) for name, value in self.snapshot.values.items()}
            optimizer = {f"{OPTIMIZER}{n}": np.array(value) for n, value in enumerate(self._optimizer_values)}
            return self.snapshot.version, values | optimizer

    def _updated(self, values: list[Any], optimizer_values: list[Any], weights: list[Any], gradients: list[Any]) -> Any:
        means = [as_update(value, weights, each) for value, each in zip(values, gradients, strict=True)]
        return self._optimizer.stateless_apply(optimizer_values, means, values)

    def _fresh(self, state: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """What the optimizer knows before its first update; some begin with the values of the variables (ScheduleFreeAdamW)."""
        another = type(self._optimizer).from_config(self._optimizer.get_config())
        with jax.default_device(self._device):
            another.build([as_variable(spec, state[spec.name]) for spec in self.specs])
        return [np.array(variable.value) for variable in another.variables]

    def _copied(self, value: Any) -> jax.Array:
        """On the device; JAX would share the memory of an array that somebody else may write to."""
        return jax.device_put(np.array(value), self._device)

    def _fitted(self, spec: VariableSpec, gradient: Gradient) -> Gradient:
        return padded(gradient, spec.shape[0]) if isinstance(gradient, SparseGradient) else gradient


def as_variable(
    spec: VariableSpec, value: np.ndarray | str = "zeros", kind: type[keras.Variable] = keras.Variable
) -> keras.Variable:
    """What an optimizer is built for; it has the path and the name that the variable has in its model, by which some optimizers go.

    Args:
        spec: of the variable, or of a shard.
        value: of the variable, or how it begins.
        kind: its class.
    """
    *scopes, name = whole_name(spec).split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return kind(value, shape=spec.shape, dtype=spec.dtype, name=name)
