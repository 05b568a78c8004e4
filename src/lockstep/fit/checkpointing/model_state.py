"""The variables of a model as checkpoints hold them: their names, copies of their values, and whether those of a checkpoint fit."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._errors import CheckpointError
from lockstep._keras import trainer
from lockstep._keras.variable_placement import set_from_host, stored_value
from lockstep._padded_array import PaddedArray
from lockstep.checkpoint.serialization import specs_of
from lockstep.checkpoint.shards import ArrayShard
from lockstep.devices.placement import gather_on_host, is_on_cpu, is_spread

KINDS = ("trainable", "non_trainable", "optimizer", "metrics")

ValueOf = Callable[[keras.Variable], Any]  # Returns the current value of a variable.


class ModelVariables:
    """All variables of a compiled model, named by kind and number, such as ``optimizer/3``.

    Attributes:
        state: the state after the last training step of the running epoch; Keras's own variables do not have it until the epoch ends.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.state: Any = None

    def named(self) -> dict[str, keras.Variable]:
        """The variables, in the order of a training step's state."""
        return named_variables(self._model)

    def are_spread(self) -> bool:
        """Return whether there is a variable that no process has as a whole."""
        return any(is_spread(stored_value(variable)) for variable in self.named().values())

    def copies(self, *kinds: str, wanted: bool = True, in_shards: bool = False) -> dict[str, Any]:
        """Copy the current values of some kinds of variables, or of all, as the next step reuses their memory.

        Args:
            *kinds: kinds of variables.
            wanted: whether this process needs the copies. All processes call this, as they have shards of sharded variables.
            in_shards: see :func:`copies_of`.
        """
        values = self._newest()
        chosen = {name: value for name, value in values.items() if not kinds or name.partition("/")[0] in kinds}
        copies = copies_of(list(chosen.values()), wanted=wanted, in_shards=in_shards)
        return dict(zip(chosen, copies, strict=True))

    def lookup(self) -> ValueOf:
        """Return a function that returns the current value of a variable of this model, or of another one."""
        newest = self._newest()
        known = {id(variable): newest[name] for name, variable in self.named().items()}

        def value_of(variable: keras.Variable) -> Any:
            own = known.get(id(variable))
            return stored_value(variable) if own is None else own

        return value_of

    def _newest(self) -> dict[str, Any]:
        named = self.named()
        if self.state is None or trainer.is_synced(self._model):
            return {name: stored_value(variable) for name, variable in named.items()}
        return dict(zip(named, (array for part in self.state for array in part), strict=True))

    def set(self, arrays: Mapping[str, np.ndarray], paths: Mapping[str, str], source: str) -> None:
        """Set all variables. Args and errors are those of :meth:`check`; after one of these no variable is changed."""
        self.check(arrays, paths, source)
        for name, variable in self.named().items():
            set_from_host(variable, arrays[name])

    def check(self, arrays: Mapping[str, np.ndarray], paths: Mapping[str, str], source: str) -> None:
        """Check that values, by name, are those of this model; ``paths`` are those of the variables from which they were read.

        Raises:
            CheckpointError: a value is missing, of another shape, dtype or optimizer, or there are others.
        """
        specs, named = specs_of(arrays), self.named()
        for name, variable in named.items():
            kept, shape = specs.get(name), tuple(variable.shape)
            if kept is None or kept.shape != shape:
                found = f"{paths.get(name, name)} of shape {kept.shape}" if kept else "nothing"
                raise _another_model(source, f"for {variable.path} of shape {shape} it has {found}")
            dtype = jax.dtypes.canonicalize_dtype(variable.dtype).name  # JAX may have no 64 bits.
            if kept.dtype != dtype:
                found = f"{paths.get(name, name)} of dtype {kept.dtype}"
                raise _another_model(source, f"for {variable.path} of dtype {dtype} it has {found}")
            if name.startswith("optimizer/") and _purpose(paths.get(name, "")) != _purpose(variable.path):
                raise _another_model(source, f"for {variable.path} of the optimizer it has {paths.get(name, name)}")
        if more := [path for name, path in paths.items() if name not in named]:
            raise _another_model(source, f"it also has {', '.join(more[:3])}{' and others' if more[3:] else ''}")
        if difference := _other_use(paths, {name: variable.path for name, variable in named.items()}):
            raise _another_model(source, difference)


def _other_use(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return which variable was trained then and is frozen now, or is at another place, given all paths by name; "" if there is none.

    Nothing is known if any path is another one, as Keras numbers the names of models that are built in one process.
    """

    def of(paths: Mapping[str, str], *kinds: str) -> dict[str, str]:
        return {name: path for name, path in paths.items() if name.partition("/")[0] in kinds}

    weights_then, weights_now = (of(paths, "trainable", "non_trainable") for paths in (then, now))
    if sorted(weights_then.values()) != sorted(weights_now.values()):
        return ""
    trained = {*of(now, "trainable").values()}
    for path in sorted(of(then, "trainable").values()):
        if path not in trained:
            return f"{path} was trained then and is frozen now"
    for name, path in weights_now.items():
        if (other := weights_then.get(name)) != path:
            return f"for {path} it has {other}, as its layers were made in another order"
    return ""


def _purpose(path: str) -> tuple[str, str]:
    """Return the name of the optimizer of a variable and what it holds there, such as "adam" and "velocity"; models may be renamed."""
    words = re.split("[/_]", re.sub(r"_\d+(?=[/_]|$)", "", path))  # Keras numbers equal names in one process.
    return path.partition("/")[0].rstrip("_0123456789"), words[-1]


def _another_model(source: str, difference: str) -> CheckpointError:
    return CheckpointError(
        f"{source} is of another model: {difference}. Fix: build and compile the model as it was, or take another directory."
    )


def named_variables(model: keras.Model, *kinds: str) -> dict[str, keras.Variable]:
    """Return the variables of some kinds, or all, by kind and number, such as ``optimizer/3``; in the order of a training step's state."""
    groups = zip(KINDS, trainer.variables_of(model), strict=True)
    return {f"{kind}/{n}": x for kind, group in groups if not kinds or kind in kinds for n, x in enumerate(group)}


@jax.jit
def _copied_on_devices(values: list[Any]) -> list[Any]:
    return [jnp.copy(value) for value in values]


def _copied(values: list[Any]) -> list[Any]:
    """Copy arrays on devices of this process: asynchronously on CPUs; from accelerators, whose memory may have no room for a second state, to
    the host.
    """
    if is_on_cpu(values):
        return list(_copied_on_devices(values))
    for value in values:
        value.copy_to_host_async()
    return [np.asarray(value) for value in values]


def copies_of(values: list[Any], *, wanted: bool = True, in_shards: bool = False) -> list[Any]:
    """Copy arrays.

    Args:
        values: the arrays, also with padding. Of one that every device has, the first device's is copied; one whose shards are on devices of several
            processes is gathered in the memory of the host.
        wanted: whether this process needs the copies. All processes call this with the same arrays.
        in_shards: whether each process gets its own shards of arrays on several processes, also if it does not want the others.

    Returns:
        The copies, which ``np.asarray`` makes arrays of the host; a list of shards for an array that is not gathered; None for what is
        not wanted.
    """
    shapes = [value.shape for value in values]
    arrays = [value.array if isinstance(value, PaddedArray) else jnp.asarray(value) for value in values]
    copies: list[Any] = [None] * len(arrays)
    for place, array in enumerate(arrays):
        if is_spread(array) and in_shards:
            copies[place] = _own_shards(array, shapes[place])
        elif is_spread(array):  # One after the other, as each needs the memory of a whole array on every device.
            copies[place] = gather_on_host(array, wanted)
    if not wanted:
        return copies
    whole = {place: x.addressable_shards[0].data for place, x in enumerate(arrays) if x.is_fully_replicated}
    sharded = {place: x for place, x in enumerate(arrays) if place not in whole and not is_spread(x)}
    for group in whole, sharded:  # Two programs, as they run on other devices.
        for place, copy in zip(group, _copied(list(group.values())), strict=True):
            copies[place] = copy
    pairs = zip(copies, shapes, strict=True)
    return [copy if copy is None or isinstance(copy, list) else _of_shape(copy, shape) for copy, shape in pairs]


def _of_shape(copy: Any, shape: tuple[int, ...]) -> Any:
    """Return a copy of this shape. Padding is dropped when NumPy takes it, as it may still be computed."""
    return copy if copy.shape == shape else PaddedArray(copy, shape)


def _own_shards(array: jax.Array, shape: tuple[int, ...]) -> list[ArrayShard]:
    """Copy the shards of a value of ``shape``, without its padding, that no process before this one has."""
    shards = []
    for shard in array.addressable_shards:
        start = tuple(part.start or 0 for part in shard.index)
        own = tuple(
            min(length, whole - first) for length, whole, first in zip(shard.data.shape, shape, start, strict=True)
        )
        if shard.replica_id == 0 and min(own) > 0:
            shards.append(ArrayShard(shape, start, _of_shape(_copied([shard.data])[0], own)))
    return shards
