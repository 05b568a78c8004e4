"""State of a model and of callbacks as checkpoints hold it, and what their metadata must be like.

A process that can write checkpoints decides what training continues with; nothing in them is executed, names a file or sets an option. Of
the callbacks of Keras and of Lockstep only those attributes come back that training changes; of a user's callbacks all that are values,
but for methods, and the arguments of a constructor of Keras or Lockstep. Metadata that is not as this version writes it is refused, by the
name of its field, before anything has changed.

Functions of ``keras.ops`` are saved by name. Callbacks that monitor a metric have such a function.
"""

import contextlib
import hashlib
import inspect
import re
import reprlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._array_encoding import DTYPES
from lockstep._errors import CheckpointError
from lockstep._keras import trainer
from lockstep._keras.callback_state import CALLBACK_STATE, set_sign_of_min_delta
from lockstep._keras.variable_placement import set_from_host, stored_value
from lockstep._padded_array import PaddedArray
from lockstep.checkpoint.serialization import Loaded, array_digest, specs_of
from lockstep.checkpoint.shards import ArrayShard
from lockstep.data.random_state import check_order_state, check_random_state
from lockstep.data.resumable_iterator import expanded_hooks
from lockstep.devices.names import platform_of
from lockstep.devices.placement import gather_on_host, is_spread

KINDS = ("trainable", "non_trainable", "optimizer", "metrics")

_ValueOf = Callable[[keras.Variable], Any]  # Returns the current value of a variable.


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

    def lookup(self) -> _ValueOf:
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
        if frozen := _newly_frozen(paths, {name: variable.path for name, variable in named.items()}):
            raise _another_model(source, f"{frozen[0]} was trained then and is frozen now")


def _newly_frozen(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the paths of variables that were trained then and are frozen now, given all paths by name.

    Nothing is known if any path is another one, as Keras numbers the names of models that are built in one process.
    """

    def of(paths: Mapping[str, str], *kinds: str) -> list[str]:
        return sorted(path for name, path in paths.items() if name.partition("/")[0] in kinds)

    if of(then, "trainable", "non_trainable") != of(now, "trainable", "non_trainable"):
        return []
    trained = {*of(now, "trainable")}
    return [path for path in of(then, "trainable") if path not in trained]


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
    if not values or platform_of(next(iter(values[0].devices()))) == "cpu":
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
        The copies; a list of shards for an array that is not gathered; None for what is not wanted.
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
    return [copy if copy is None or isinstance(copy, list) else _cut(copy, shape) for copy, shape in pairs]


def _cut(copy: Any, shape: tuple[int, ...]) -> Any:
    """Return a copy without padding."""
    return copy if copy.shape == shape else np.asarray(copy)[tuple(map(slice, shape))]


def _own_shards(array: jax.Array, shape: tuple[int, ...]) -> list[ArrayShard]:
    """Copy the shards of a value of ``shape``, without its padding, that no process before this one has."""
    shards = []
    for shard in array.addressable_shards:
        start = tuple(part.start or 0 for part in shard.index)
        own = tuple(
            min(length, whole - first) for length, whole, first in zip(shard.data.shape, shape, start, strict=True)
        )
        if shard.replica_id == 0 and min(own) > 0:
            shards.append(ArrayShard(shape, start, _cut(_copied([shard.data])[0], own)))
    return shards


_LEFT_OUT = ("model", "_model", "params", "validation_data")

# What the callbacks of Lockstep change in training, and of which kind it is.
_OWN_STATE = {
    "KubeflowProgress": {},
    "LearningRateScaling": {"progress": "numbers by name", "_is_first": "flag"},
    "NanGuard": {"skipped": "count", "rollbacks": "count", "in_a_row": "count"},
    "PrometheusExporter": {},
    "RichProgress": {},
    "StalenessMetrics": {},
    "TensorBoard": {},
    "ThroughputMonitor": {"_last": "numbers by name"},
}


def _state_of(kind: type) -> Mapping[str, str] | None:
    """Return the attributes of a class of Keras or Lockstep that training changes; None for other classes."""
    tables = {"keras": CALLBACK_STATE, "lockstep": _OWN_STATE}
    return tables.get(kind.__module__.partition(".")[0], {}).get(kind.__name__)


def _is_kept(kind: type, attribute: str) -> bool:
    """Return whether an attribute of a callback is state: neither an option, nor a method, nor unknown to its class."""
    if any(attribute in (_state_of(base) or {}) for base in kind.__mro__):
        return True
    if attribute in _LEFT_OUT or _state_of(kind) is not None or attribute in _options_of(kind):
        return False
    own = inspect.getattr_static(kind, attribute, None)
    return not (callable(own) or hasattr(type(own), "__set__") or isinstance(own, (classmethod, staticmethod)))


@lru_cache
def _options_of(kind: type) -> frozenset[str]:
    """Return the arguments of the constructors of Keras's and Lockstep's classes that a callback's class inherits from."""
    ours = [base for base in kind.__mro__ if _state_of(base) is not None]
    return frozenset(name for base in ours for name in inspect.signature(base).parameters)


class _NoValueError(Exception):
    """A value is neither a number, text nor an array."""


def _own_value(variable: keras.Variable) -> Any:
    return variable.value


@dataclass(frozen=True)
class FirstAttributes:
    """The attributes of a callback that are values, when training begins.

    Args:
        values: as JSON, or a digest if there are arrays in them.
        objects: the containers and arrays in them, by path: the name of the attribute, and numbers of items in containers, such as
            ``"table/0"``. Data and other callbacks may have these objects, too.
    """

    values: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)


def packed_attributes(
    owner: Any,
    name: str,
    arrays: dict[str, np.ndarray],
    first: FirstAttributes,
    value_of: _ValueOf = _own_value,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the attributes of an object that are values, as JSON.

    Args:
        owner: a callback.
        name: prefix of the names of its arrays.
        arrays: gets copies of its arrays.
        first: result of :func:`first_attributes`; attributes that have not changed since are left out, so that another run may choose them
            anew. Objects that no attribute has any more are removed from it.
        value_of: returns the current value of a variable, as within an epoch those of the model do not have theirs.

    Returns:
        The values, by attribute; and where in them the objects of ``first`` are: their paths then, by their paths now.
    """
    found, paths, held = dict[str, Any](), dict[str, str](), set[int]()
    paths_then = {id(part): path for path, part in first.objects.items()}
    for attribute, packed, own_arrays in _values(owner, name, value_of):
        parts = dict(_mutable_parts(vars(owner)[attribute], attribute))
        held.update(map(id, parts.values()))
        if _is_changed(attribute, packed, own_arrays, parts.items(), first):
            arrays |= {key: array.copy() for key, array in own_arrays.items()}
            found[attribute] = packed
            paths |= {path: paths_then[id(part)] for path, part in parts.items() if id(part) in paths_then}
    for path in [path for path, part in first.objects.items() if id(part) not in held]:
        del first.objects[path]  # It may be large.
    return found, paths


def first_attributes(owner: Any, name: str, value_of: _ValueOf = _own_value) -> FirstAttributes:
    """Return the attributes of an object when training begins; see :func:`packed_attributes`."""
    first = FirstAttributes()
    for attribute, packed, arrays in _values(owner, name, value_of):
        first.values[attribute] = _comparable(packed, arrays)
        first.objects.update(_mutable_parts(vars(owner)[attribute], attribute))
    return first


def _is_changed(
    attribute: str,
    packed: Any,
    arrays: Mapping[str, np.ndarray],
    parts: Iterable[tuple[str, Any]],
    first: FirstAttributes,
) -> bool:
    """Return whether an attribute has another value or other objects than when training began, as one may have moved to another attribute."""
    if attribute not in first.values or any(first.objects.get(path) is not part for path, part in parts):
        return True
    return not _is_equal(packed, arrays, first.values[attribute])


def _mutable_parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a value and the items in it, with their paths, if :func:`_refilled` can give them another content."""
    kind = type(value)
    if kind in _REFILLED:
        yield path, value
    is_container = isinstance(value, (dict, list, tuple, deque))
    items = [*(value.values() if isinstance(value, dict) else value)] if is_container else []
    if not _PLAIN.issuperset(map(type, items)):
        for number, item in enumerate(items):
            yield from _mutable_parts(item, f"{path}/{number}")


@dataclass(frozen=True)
class _Digest:
    """Stands for a value with arrays, which are not copied."""

    digest: str


def _comparable(packed: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if not arrays:
        return packed
    found = hashlib.sha256(repr(packed).encode())
    for array in arrays.values():
        found.update(f"{array.dtype} {array.shape} {array_digest(array)}".encode())
    return _Digest(found.hexdigest())


def _is_equal(packed: Any, arrays: Mapping[str, np.ndarray], first: Any) -> bool:
    """Return whether :func:`_comparable` gives the same, without a digest of arrays where there were none."""
    return bool(arrays) is isinstance(first, _Digest) and _comparable(packed, arrays) == first


def _values(owner: Any, name: str, value_of: _ValueOf) -> Iterator[tuple[str, Any, dict[str, np.ndarray]]]:
    """Yield the attributes that are values: the name, the value as JSON, and the arrays in it."""
    for attribute, value in vars(owner).items():
        arrays: dict[str, np.ndarray] = {}
        if _is_kept(type(owner), attribute):
            # A value that contains itself is none either.
            with contextlib.suppress(_NoValueError, RecursionError):
                yield attribute, _packed(value, f"{name}/{attribute}", arrays, value_of), arrays


def unpacked_attributes(
    owner: Any,
    packed: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    first: FirstAttributes,
    paths: Mapping[str, str] | None = None,
) -> None:
    """Set the attributes that :func:`packed_attributes` gave. Objects of when training began get their content, others are replaced.

    Args:
        owner: a callback.
        packed: the values of :func:`packed_attributes`.
        arrays: by name.
        first: has the values for absent attributes, which had not changed; an epoch that is begun anew may have changed them.
        paths: the paths of :func:`packed_attributes`.
    """
    objects = {path: first.objects[then] for path, then in (paths or {}).items() if then in first.objects}
    absent = {key: value for key, value in first.values.items() if key not in packed and not isinstance(value, _Digest)}
    changed = {
        attribute: absent[attribute]
        for attribute, now, own_arrays in _values(owner, "", _own_value)
        if attribute in absent
        and _is_changed(attribute, now, own_arrays, _mutable_parts(vars(owner)[attribute], attribute), first)
    }
    for attribute, value in (changed | dict(packed)).items():
        if _is_kept(type(owner), attribute):
            own_objects = first.objects if attribute in changed else objects
            restored = _unpacked(value, arrays)
            vars(owner)[attribute] = _assigned(vars(owner).get(attribute), restored, attribute, own_objects)
    set_sign_of_min_delta(owner)


def _assigned(now: Any, restored: Any, path: str, objects: Mapping[str, Any]) -> Any:
    """Return a restored value with the variables that the attribute has now, and with objects, which get their content: others may have them.

    Args:
        now: the value that an attribute has, or an item in it.
        restored: the value of the checkpoint, which is changed.
        path: its path; see :class:`FirstAttributes`.
        objects: those to use, by path. Variables are never replaced.
    """
    if isinstance(now, keras.Variable):
        if isinstance(restored, np.ndarray) and restored.shape == tuple(now.shape):
            set_from_host(now, restored)
        return now
    now = objects.get(path, now)  # It may have been elsewhere, with its variables.
    is_alike = type(now) is type(restored)
    if isinstance(restored, dict):
        for number, (key, item) in enumerate(restored.items()):
            restored[key] = _assigned(now.get(key) if is_alike else None, item, f"{path}/{number}", objects)
    elif isinstance(restored, (list, tuple, deque)):
        before = [*now] if is_alike else []
        if not _PLAIN.issuperset(map(type, [*before, *restored])):
            pairs = enumerate(zip([*before, *[None] * len(restored)], restored, strict=False))
            items = [_assigned(*pair, f"{path}/{number}", objects) for number, pair in pairs]
            restored = deque(items, restored.maxlen) if isinstance(restored, deque) else type(restored)(items)
    return _refilled(now, restored) if path in objects else restored


def _refilled(now: Any, restored: Any) -> Any:
    """Give an object the content of another one, and return it; return the other one if that is impossible.

    As threads may read the object, what it has before and after is there at any time; keys of a dict that get another order are inserted
    anew one by one.
    """
    options = ("maxlen", "default_factory", "shape", "dtype")
    if type(now) is not type(restored) or any(getattr(now, x, None) != getattr(restored, x, None) for x in options):
        return restored
    if isinstance(now, np.ndarray):
        if not now.flags.writeable:
            return restored
        now[...] = restored
    elif isinstance(now, list):
        now[:] = restored
    elif isinstance(now, set):
        now &= restored
        now |= restored
    elif isinstance(now, dict):
        for key in now.keys() - restored.keys():
            del now[key]
        is_in_order = [*now] == [*restored][: len(now)]
        for key, item in restored.items():  # ``update`` of a Counter would add.
            if not is_in_order:
                now.pop(key, None)
            now[key] = item
    elif isinstance(now, deque):
        now.extend(restored)  # With a maxlen this may drop some of the items before.
        for _ in range(len(now) - len(restored)):
            now.popleft()
    else:
        return restored
    return now


_PLAIN = frozenset([type(None), bool, int, float, str])
_REFILLED = frozenset([np.ndarray, list, set, deque, dict, Counter, OrderedDict, defaultdict])

# The kinds of containers that checkpoints have, by name; a deque has its maxlen, too, and a defaultdict the name of what makes its items.
_SEQUENCES: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_MAPPINGS: dict[str, Any] = {kind.__name__: kind for kind in (dict, Counter, OrderedDict)}
_FACTORIES = _SEQUENCES | _MAPPINGS | {kind.__name__: kind for kind in (bool, int, float, str, deque)}


def _packed(value: Any, name: str, arrays: dict[str, np.ndarray], value_of: _ValueOf) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, keras.Variable):
        value = value_of(value)
    if isinstance(value, PaddedArray):
        if is_spread(value):
            raise _NoValueError
        value = np.asarray(value)
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return _packed_array(value, name, arrays)
    if isinstance(value, FunctionType) and vars(keras.ops).get(value.__name__) is value:
        return {"keras.ops": value.__name__}

    def items() -> list[Any]:
        copy = [*value]  # A thread may add to it.
        if _PLAIN.issuperset(map(type, copy)):
            return copy
        return [_packed(item, f"{name}/{n}", arrays, value_of) for n, item in enumerate(copy)]

    def pairs() -> list[Any]:
        """The items with their keys; numbers make the names, as keys may look alike: 1 and "1"."""
        return [
            [_packed(key, f"{name}/{n}/key", arrays, value_of), _packed(item, f"{name}/{n}", arrays, value_of)]
            for n, (key, item) in enumerate([*value.items()])
        ]

    if kind in _SEQUENCES.values():
        return {kind.__name__: items()}
    if kind in _MAPPINGS.values():
        return {kind.__name__: pairs()}
    if kind is deque:
        return {"deque": [items(), value.maxlen]}
    if kind is defaultdict and value.default_factory in (None, *_FACTORIES.values()):
        return {"defaultdict": [pairs(), value.default_factory and value.default_factory.__name__]}
    raise _NoValueError


def _packed_array(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, jax.Array):
        if isinstance(value, jax.core.Tracer) or value.is_deleted() or is_spread(value):
            raise _NoValueError
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = _packed_array(np.asarray(jax.random.key_data(value)), name, arrays)
            return {"key": [str(jax.random.key_impl(value)), data]}
    array = np.asarray(value)
    if array.dtype.name not in DTYPES:
        raise _NoValueError
    arrays[name] = array
    return {"array": name, "scalar": isinstance(value, np.generic)}


def _unpacked(packed: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return a value; LookupError, TypeError or ValueError if :func:`_packed` gives no such thing."""
    if packed is None or isinstance(packed, (bool, int, float, str)):
        return packed
    ((kind, inside),) = ((key, each) for key, each in packed.items() if key != "scalar")
    if kind == "array":
        array = arrays[inside]
        return array[()] if packed["scalar"] and not array.ndim else array.copy()
    if kind == "key":
        implementation, data = inside
        return jax.random.wrap_key_data(_unpacked(data, arrays), impl=implementation)
    if kind == "keras.ops":
        function = vars(keras.ops)[inside]
        if not isinstance(function, FunctionType):
            raise ValueError(f"keras.ops.{inside} is no function")
        return function
    if kind in _MAPPINGS:
        return _MAPPINGS[kind](_unpacked_pairs(inside, arrays))
    if kind == "defaultdict":
        pairs, factory = inside
        return defaultdict(None if factory is None else _FACTORIES[factory], _unpacked_pairs(pairs, arrays))
    items, limit = inside if kind == "deque" else (inside, None)
    if (kind not in _SEQUENCES and kind != "deque") or type(items) is not list:
        raise ValueError(f"a value of kind {kind}")
    unpacked = [_unpacked(item, arrays) for item in items]
    return deque(unpacked, limit) if kind == "deque" else _SEQUENCES[kind](unpacked)


def _unpacked_pairs(pairs: Any, arrays: Mapping[str, np.ndarray]) -> dict[Any, Any]:
    return {_unpacked(key, arrays): _unpacked(item, arrays) for key, item in pairs}


def packed_logs(logs: Mapping[Any, Any]) -> tuple[list[Any], list[Any]]:
    """Return the logs of a step as JSON, with numbers in place of the values, and the values, which may still be computed.

    The results of a metric may be a dict, list or tuple of values. What is of a class of its own, such as a named tuple, is left
    out, and so is a result with NumPy numbers as keys.
    """
    values, structure = jax.tree.flatten(logs)
    packed = []
    for name, result in jax.tree.unflatten(structure, range(len(values))).items():
        pair = name.item() if isinstance(name, np.generic) else name, result
        arrays: dict[str, np.ndarray] = {}
        with contextlib.suppress(_NoValueError):
            found = [_packed(each, "logs", arrays, _own_value) for each in pair]
            packed += [] if arrays else [found]
    return packed, values


def numbered_logs(packed: Any) -> dict[Any, Any]:
    """Return the logs of :func:`packed_logs`, with numbers in place of the values. Earlier versions have written this as it is."""
    return packed if isinstance(packed, dict) else _unpacked_pairs(packed, {})


# Metadata.


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float) or (isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0)


def _is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(map(fits, value))


def _is_dict_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is dict and all(type(key) is str and fits(each) for key, each in value.items())


def _is_lists_by_name(value: Any) -> bool:
    # A result may have a number as its name.
    return type(value) is dict and all(type(each) is list for each in value.values())


def _is_text(value: Any) -> bool:
    return type(value) is str


def _passes(check: Callable[[Any], object]) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        try:
            check(value)
        except ValueError:
            return False
        return True

    return fits


_is_random_state, _is_order = _passes(check_random_state), _passes(check_order_state)


def _is_hook(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and value[0] in ("begin", "end") and _is_random_state(value[1])


def _are_hooks(value: Any) -> bool:
    try:
        return type(value) is list and all(map(_is_hook, expanded_hooks(value)))
    except (RecursionError, TypeError, ValueError):
        return False


def _has_fields(value: Any, *names: str) -> bool:
    """Return whether a value has these fields; earlier versions have written no order."""
    return type(value) is dict and {*value, "order"} == {*names, "order"} and _or_none(_is_order)(value.get("order"))


def _is_before(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and all(map(_is_count, value))


def _is_position(value: Any) -> bool:
    if not _has_fields(value, "batches", "at_begin", "after", "digest"):
        return False
    digest, batches = value["digest"], value["batches"]
    is_digest = digest is None or (_is_text(digest) and re.fullmatch("[0-9a-f]{16}", digest) is not None)
    is_state = _is_random_state(value["at_begin"]) and _is_random_state(value["after"])
    return _is_count(batches) and batches >= 1 and is_digest and is_state


def _is_cache(value: Any) -> bool:
    if not _has_fields(value, "hooks", "random", "digest"):
        return False
    return _is_random_state(value["random"]) and _is_list_of(_is_hook)(value["hooks"]) and _is_text(value["digest"])


def _is_input(value: Any) -> bool:
    if type(value) is not dict or not _or_none(_is_before)(value.get("before")):
        return False
    if not _has_fields({name: each for name, each in value.items() if name != "before"}, "position", "hooks", "cache"):
        return False
    is_position = _or_none(_is_position)(value["position"]) and _or_none(_is_cache)(value["cache"])
    return is_position and _are_hooks(value["hooks"])


def _is_callback(value: Any) -> bool:
    """Return whether this is the state of a callback; earlier versions have not written what it monitors and paths of its objects."""
    if type(value) is not list or len(value) not in (2, 3, 4):
        return False
    name, attributes, *more = value
    checks = _is_dict_of(_is_text), _is_dict_of(_is_text)
    are_right = all(fits(each) for fits, each in zip(checks, more, strict=False))
    return _is_text(name) and type(attributes) is dict and are_right


class _Field(NamedTuple):
    """What a field of the metadata must be; an optional one is absent in checkpoints of earlier versions."""

    expected: str
    fits: Callable[[Any], bool]
    is_optional: bool = False


def _or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


_COUNT = _Field("a whole number of at least 0", _is_count)
_FLAG = _Field("true or false", lambda value: type(value) is bool)
_FIELDS = {
    "epoch": _COUNT,
    "batch": _COUNT,
    "is_epoch_over": _FLAG,
    "is_finished": _FLAG,
    "extends": _Field(*_COUNT[:2], is_optional=True),
    "stop_training": _FLAG,
    "rows": _Field("a whole number or null", _or_none(_is_count), is_optional=True),
    "rate": _Field("a number or null", _or_none(_is_number), is_optional=True),
    "position": _Field("null, or batches, at_begin, after and digest of a pass", _or_none(_is_position)),
    "hooks": _Field('a list of "begin" or "end" with a state of random generators', _are_hooks),
    "cache": _Field("null, or hooks, random and digest of a cache", _or_none(_is_cache), is_optional=True),
    "order": _Field("null, or the state of an order", _or_none(_is_order), is_optional=True),
    "before": _Field("null, or numbers of hooks and of batches", _or_none(_is_before), is_optional=True),
    "validation": _Field("null, or position, hooks and cache of an input", _or_none(_is_input), is_optional=True),
    "random": _Field("a state of random generators", _is_random_state),
    "callbacks": _Field(
        "a list of names with attributes, what they monitor and paths of objects", _is_list_of(_is_callback)
    ),
    "logs": _Field("values by name", lambda value: type(value) in (dict, list)),
    "setup": _Field("values by name", lambda value: type(value) is dict),
    "steps_per_execution": _Field(*_COUNT[:2], is_optional=True),
    "replicas": _Field(*_COUNT[:2], is_optional=True),
    "versions": _Field("texts by name", _is_dict_of(_is_text), is_optional=True),
    "variables": _Field("texts by name", _is_dict_of(_is_text)),
}

_KINDS_OF_STATE = {
    "array": _Field("an array", lambda value: isinstance(value, np.ndarray)),
    "arrays": _Field("a list of arrays, or null", _or_none(_is_list_of(lambda each: isinstance(each, np.ndarray)))),
    "count": _Field("a whole number of at least 0, or null", _or_none(_is_count)),
    "counts": _Field("a list of whole numbers", _is_list_of(_is_count)),
    "flag": _FLAG,
    "function": _Field("a function of keras.ops, or null", _or_none(callable)),
    "lists": _Field("lists by name", _is_lists_by_name),
    "number": _Field("a number or null", _or_none(_is_number)),
    "numbers by name": _Field("numbers by name", _is_dict_of(_is_number)),
    "texts": _Field("a list of texts, or null", _or_none(_is_list_of(_is_text))),
}


class MetadataCheck:
    """Checks the metadata of a checkpoint of ``fit`` before anything is restored, given the callbacks to restore; those that Keras adds are
    known.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        kinds = [keras.callbacks.History, keras.callbacks.ProgbarLogger, *map(type, callbacks)]
        self._kinds = {kind.__name__: kind for kind in kinds}

    def __call__(self, loaded: Loaded) -> None:
        """Check a checkpoint.

        Raises:
            CheckpointError: a field is absent or of another kind; the message names it.
        """
        metadata, arrays = loaded.metadata, loaded.arrays
        check_fields(loaded, _FIELDS)
        position = metadata["position"]
        if position is not None:
            most = _Field(f"at most the {loaded.step} steps of the run", lambda batches: batches <= loaded.step)
            _check(loaded, "'position'['batches']", most, position["batches"], lambda value: value)
        _check(loaded, "'logs'", _LOGS, metadata["logs"], lambda logs: _numbers_of_logs(logs, arrays))
        for number, (name, attributes, *_) in enumerate(metadata["callbacks"]):
            # A subclass may keep anything in an attribute.
            known = (name in self._kinds and _state_of(self._kinds[name])) or {}
            for attribute, packed in attributes.items():
                field = _KINDS_OF_STATE[known[attribute]] if attribute in known else _VALUE
                where = f"'callbacks'[{number}], {name}.{attribute}"
                _check(loaded, where, field, packed, lambda value: _unpacked(value, arrays))


def check_fields(loaded: Loaded, names: Iterable[str]) -> None:
    """Check some fields of the metadata of a checkpoint.

    Raises:
        CheckpointError: a field is absent or of another kind; the message names it.
    """
    metadata = loaded.metadata
    for name in names:
        field = _FIELDS[name]
        if name not in metadata and not field.is_optional:
            raise CheckpointError(f"{loaded.path}: metadata: {name!r}: expected {field.expected}, got nothing.")
        if name in metadata:
            _check(loaded, repr(name), field, metadata[name], lambda value: value)


_VALUE = _Field("a value", lambda value: True)
_LOGS = _Field("numbers of arrays by name", lambda value: True)


def _check(loaded: Loaded, where: str, field: _Field, value: Any, read: Callable[[Any], Any]) -> None:
    try:
        if field.fits(read(value)):
            return
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        pass  # The message shows the value.
    raise CheckpointError(f"{loaded.path}: metadata: {where}: expected {field.expected}, got {reprlib.repr(value)}.")


def _numbers_of_logs(logs: Any, arrays: Mapping[str, np.ndarray]) -> None:
    for number in jax.tree.leaves(numbered_logs(logs)):
        if not _is_count(number):
            raise ValueError(f"{number!r} is no number of an array")
        arrays[f"logs/{number}"]
