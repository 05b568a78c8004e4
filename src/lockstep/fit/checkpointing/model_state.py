"""State of a model and of callbacks as checkpoints hold it.

Functions of ``keras.ops`` are saved by name. Callbacks that monitor a metric have such a function; if they had to choose it again, they
would reset other attributes, too.
"""

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._arrays import DTYPES
from lockstep._errors import CheckpointError
from lockstep._keras import trainer

__all__ = ["KINDS", "ModelVariables", "copies_of", "packed_attributes", "unpacked_attributes", "variables_of"]


KINDS = ("trainable", "non_trainable", "optimizer", "metrics")


class ModelVariables:
    """All variables of a compiled model, named by kind and number, such as ``optimizer/3``.

    Args:
        model: a compiled model.

    Attributes:
        state: the state after the last training step of the running epoch; Keras's own variables do not have it until the epoch ends.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.state: Any = None

    def named(self) -> dict[str, keras.Variable]:
        """The variables, in the order of a training step's state."""
        groups = zip(KINDS, variables_of(self._model), strict=True)
        return {f"{kind}/{number}": x for kind, group in groups for number, x in enumerate(group)}

    def copies(self, *kinds: str) -> dict[str, jax.Array]:
        """Copy the current values of some kinds of variables, or of all, as the next step reuses their memory."""
        named = self.named()
        if self.state is None or trainer.is_synced(self._model):
            values = {name: variable.value for name, variable in named.items()}
        else:
            values = dict(zip(named, (array for part in self.state for array in part), strict=True))
        chosen = {name: value for name, value in values.items() if not kinds or name.partition("/")[0] in kinds}
        return dict(zip(chosen, copies_of(list(chosen.values())), strict=True))

    def set(self, arrays: Mapping[str, np.ndarray], paths: Mapping[str, str], source: str) -> None:
        """Set all variables.

        Args:
            arrays: the values by name.
            paths: paths of the variables from which the values were read.
            source: of the values, for messages.

        Raises:
            CheckpointError: a value is missing or of another shape; then no variable is changed.
        """
        named = self.named()
        for name, variable in named.items():
            kept = arrays.get(name)
            if kept is None or kept.shape != tuple(variable.shape):
                found = "nothing" if kept is None else f"{paths[name]} of shape {kept.shape}"
                raise CheckpointError(
                    f"{source} is of another model: for {variable.path} of shape {tuple(variable.shape)} it has {found}. Fix: build the "
                    "model as it was, or take another directory."
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
    """Copy arrays asynchronously on their devices; of an array that every device has, copy the first device's."""
    arrays = map(jnp.asarray, values)
    return _copied([x.addressable_shards[0].data if x.is_fully_replicated else x for x in arrays])


_LEFT_OUT = ("model", "_model", "params", "validation_data")


class _NoValueError(Exception):
    """A value is neither a number, text nor an array."""


def packed_attributes(
    owner: Any, name: str, arrays: dict[str, np.ndarray] | None, first: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the attributes of an object that are values, as JSON.

    Args:
        owner: a callback.
        name: prefix of the names of its arrays.
        arrays: gets its arrays; None: attributes with arrays are left out.
        first: an earlier result; attributes that have not changed since are left out, so that another run may choose them anew.
    """
    found = {}
    for attribute, value in vars(owner).items():
        new_arrays: dict[str, np.ndarray] = {}
        if attribute in _LEFT_OUT:
            continue
        try:
            packed = _packed(value, f"{name}/{attribute}", new_arrays)
        except _NoValueError:
            continue
        if new_arrays and arrays is not None:
            arrays |= new_arrays
        elif new_arrays or (first is not None and attribute in first and first[attribute] == packed):
            continue
        found[attribute] = packed
    return found


def unpacked_attributes(
    owner: Any, packed: Mapping[str, Any], arrays: Mapping[str, np.ndarray], first: Mapping[str, Any] | None = None
) -> None:
    """Set the attributes that :func:`packed_attributes` gave.

    Args:
        owner: a callback.
        packed: the result of :func:`packed_attributes`.
        arrays: by name.
        first: values for absent attributes, which had not changed; an epoch that is begun anew may have changed them.
    """
    now = packed_attributes(owner, "", None)
    unchanged = {attribute: value for attribute, value in (first or {}).items() if attribute in now}
    for attribute, value in (unchanged | dict(packed)).items():
        vars(owner)[attribute] = _unpacked(value, arrays)


def _packed(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    if value is None or (isinstance(value, (bool, int, float, str)) and type(value) in (bool, int, float, str)):
        return value
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        array = np.asarray(value)
        if array.dtype.name not in DTYPES:
            raise _NoValueError
        arrays[name] = array.copy()
        return {"array": name, "scalar": isinstance(value, np.generic)}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_packed(item, f"{name}/{n}", arrays) for n, item in enumerate(value)]}
    if type(value) is dict:
        pairs = enumerate(value.items())  # Numbers make the names, as keys may look alike: 1 and "1".
        return {
            "dict": [[_packed(key, name, arrays), _packed(item, f"{name}/{n}", arrays)] for n, (key, item) in pairs]
        }
    if isinstance(value, FunctionType) and vars(keras.ops).get(value.__name__) is value:
        return {"keras.ops": value.__name__}
    raise _NoValueError


def _unpacked(packed: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if not isinstance(packed, dict):
        return packed
    if "array" in packed:
        array = arrays[packed["array"]]
        return array[()] if packed["scalar"] else array.copy()
    if "dict" in packed:
        return {_unpacked(key, arrays): _unpacked(item, arrays) for key, item in packed["dict"]}
    if "keras.ops" in packed:
        return vars(keras.ops)[packed["keras.ops"]]
    ((kind, values),) = packed.items()
    items = [_unpacked(item, arrays) for item in values]
    return tuple(items) if kind == "tuple" else items
