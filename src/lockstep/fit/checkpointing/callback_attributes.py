"""Attributes of callbacks, and logs, as checkpoints hold them.

A process that can write checkpoints decides what training continues with; nothing in them is executed, names a file or sets an option. Of
the callbacks of Keras and of Lockstep only those attributes come back that training changes; of a user's callbacks all that are values,
but for methods, and the arguments of a constructor of Keras or Lockstep.

Functions of ``keras.ops`` are saved by name. Callbacks that monitor a metric have such a function.
"""

import contextlib
import hashlib
import inspect
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._array_encoding import DTYPES
from lockstep._keras.callback_state import CALLBACK_STATE, set_sign_of_min_delta
from lockstep._keras.variable_placement import set_from_host
from lockstep._padded_array import PaddedArray
from lockstep.checkpoint.serialization import array_digest
from lockstep.devices.placement import is_spread
from lockstep.fit.checkpointing.model_state import ValueOf

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


def state_of(kind: type) -> Mapping[str, str] | None:
    """Return the attributes of a class of Keras or Lockstep that training changes; None for other classes."""
    tables = {"keras": CALLBACK_STATE, "lockstep": _OWN_STATE}
    return tables.get(kind.__module__.partition(".")[0], {}).get(kind.__name__)


def _is_kept(kind: type, attribute: str) -> bool:
    """Return whether an attribute of a callback is state: neither an option, nor a method, nor unknown to its class."""
    if any(attribute in (state_of(base) or {}) for base in kind.__mro__):
        return True
    if attribute in _LEFT_OUT or state_of(kind) is not None or attribute in _options_of(kind):
        return False
    own = inspect.getattr_static(kind, attribute, None)
    return not (callable(own) or hasattr(type(own), "__set__") or isinstance(own, (classmethod, staticmethod)))


@lru_cache
def _options_of(kind: type) -> frozenset[str]:
    """Return the arguments of the constructors of Keras's and Lockstep's classes that a callback's class inherits from."""
    ours = [base for base in kind.__mro__ if state_of(base) is not None]
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
    value_of: ValueOf = _own_value,
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


def first_attributes(owner: Any, name: str, value_of: ValueOf = _own_value) -> FirstAttributes:
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


def _values(owner: Any, name: str, value_of: ValueOf) -> Iterator[tuple[str, Any, dict[str, np.ndarray]]]:
    """Yield the attributes that are values: the name, the value as JSON, and the arrays in it."""
    for attribute, value in vars(owner).items():
        arrays: dict[str, np.ndarray] = {}
        if (state_of(type(owner)) or {}).get(attribute) == "lists":  # of the logs, which may hold anything
            value = {key: items for key, items in value.items() if _has_value(items, value_of)}
        if _is_kept(type(owner), attribute):
            # A value that contains itself is none either.
            with contextlib.suppress(_NoValueError, RecursionError):
                yield attribute, _packed(value, f"{name}/{attribute}", arrays, value_of), arrays


def _has_value(items: list[Any], value_of: ValueOf) -> bool:
    try:
        _packed(items, "", {}, value_of)
    except (_NoValueError, RecursionError):
        return False
    return True


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
            restored = unpacked(value, arrays)
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


def _packed(value: Any, name: str, arrays: dict[str, np.ndarray], value_of: ValueOf) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    of_jax = isinstance(value, jax.Array)
    if isinstance(value, keras.Variable):
        value = value_of(value)
    if isinstance(value, PaddedArray):
        if is_spread(value):
            raise _NoValueError
        value = np.asarray(value)
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        packed = _packed_array(value, name, arrays)
        return packed | {"jax": True} if of_jax and "array" in packed else packed
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


def unpacked(packed: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return a value; LookupError, TypeError or ValueError if :func:`_packed` gives no such thing."""
    if packed is None or isinstance(packed, (bool, int, float, str)):
        return packed
    ((kind, inside),) = ((key, each) for key, each in packed.items() if key not in ("scalar", "jax"))
    if kind == "array":
        array = arrays[inside]
        if packed.get("jax"):  # Earlier versions have left this out.
            return jnp.asarray(array)
        return array[()] if packed["scalar"] and not array.ndim else array.copy()
    if kind == "complex":
        return complex(*inside)
    if kind == "key":
        implementation, data = inside
        return jax.random.wrap_key_data(unpacked(data, arrays), impl=implementation)
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
    found = [unpacked(item, arrays) for item in items]
    return deque(found, limit) if kind == "deque" else _SEQUENCES[kind](found)


def _unpacked_pairs(pairs: Any, arrays: Mapping[str, np.ndarray]) -> dict[Any, Any]:
    return {unpacked(key, arrays): unpacked(item, arrays) for key, item in pairs}


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
