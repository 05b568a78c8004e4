"""The variables of a model in training, by name: their values at any time, and setting them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._errors import CheckpointError
from lockstep._keras import trainer

__all__ = ["KINDS", "ModelVariables", "copies_of", "variables_of"]

KINDS = ("trainable", "non_trainable", "optimizer", "metrics")


class ModelVariables:
    """All variables of a compiled model, named by kind and number, ``optimizer/3`` say.

    Args:
        model: that model.

    Attributes:
        state: what the last training step of the running epoch gave, as Keras's own variables do not have it until the epoch is over.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.state: Any = None

    def named(self) -> dict[str, keras.Variable]:
        """The variables, in the order of a training step's state."""
        groups = zip(KINDS, variables_of(self._model), strict=True)
        return {f"{kind}/{number}": x for kind, group in groups for number, x in enumerate(group)}

    def copies(self, *kinds: str) -> dict[str, jax.Array]:
        """Copies of their values now, because the next step takes their memory; of some kinds, or of all."""
        named = self.named()
        if self.state is None or trainer.is_synced(self._model):
            values = {name: variable.value for name, variable in named.items()}
        else:
            values = dict(zip(named, (array for part in self.state for array in part), strict=True))
        chosen = {name: value for name, value in values.items() if not kinds or name.partition("/")[0] in kinds}
        return dict(zip(chosen, copies_of(list(chosen.values())), strict=True))

    def set(self, arrays: Mapping[str, np.ndarray], paths: Mapping[str, str], where: str) -> None:
        """Give all variables other values.

        Args:
            arrays: by name.
            paths: of the variables that had them.
            where: they come from, for messages.

        Raises:
            CheckpointError: there is none of the shape of a variable; then none is changed.
        """
        named = self.named()
        for name, variable in named.items():
            kept = arrays.get(name)
            if kept is None or kept.shape != tuple(variable.shape):
                found = "nothing" if kept is None else f"{paths[name]} of shape {kept.shape}"
                raise CheckpointError(
                    f"{where} is of another model: for {variable.path} of shape {tuple(variable.shape)} it has {found}. Build the model "
                    "as it was, or take another directory."
                )
        for name, variable in named.items():
            variable.assign(arrays[name])


def variables_of(model: keras.Model) -> list[list[keras.Variable]]:
    """The variables in the order of a training step's state."""
    kinds = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables, model.metrics_variables
    return [list(kind) for kind in kinds]


@jax.jit
def _copied(values: list[Any]) -> list[Any]:
    return [jnp.copy(value) for value in values]


def copies_of(values: list[Any]) -> list[jax.Array]:
    """Copies that the devices make in their own time; of what every device has, the first one's."""
    arrays = map(jnp.asarray, values)
    return _copied([x.addressable_shards[0].data if x.is_fully_replicated else x for x in arrays])
