"""What the metadata of a checkpoint must be like.

Metadata that is not as this version writes it is refused, by the name of its field, before anything has changed.
"""

import re
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from lockstep._errors import CheckpointError
from lockstep.checkpoint.serialization import Loaded
from lockstep.data.random_state import check_order_state, check_random_state
from lockstep.data.resumable_iterator import expanded_hooks
from lockstep.fit.checkpointing.callback_attributes import numbered_logs, state_of, unpacked


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


def check_metadata(loaded: Loaded, callbacks: Iterable[Any]) -> None:
    """Check the metadata of a checkpoint of ``fit`` before anything is restored into ``callbacks`` and those that Keras adds.

    Raises:
        CheckpointError: a field is absent or of another kind; the message names it.
    """
    metadata, arrays = loaded.metadata, loaded.arrays
    check_fields(loaded, _FIELDS)
    position = metadata["position"]
    if position is not None:
        most = _Field(f"at most the {loaded.step} steps of the run", lambda batches: batches <= loaded.step)
        _check(loaded, "'position'['batches']", most, position["batches"])

    def are_numbers(logs: Any) -> bool:
        numbers = jax.tree.leaves(numbered_logs(logs))
        return all(_is_count(number) and f"logs/{number}" in arrays for number in numbers)

    _check(loaded, "'logs'", _Field("numbers of arrays by name", are_numbers), metadata["logs"])
    kinds = [keras.callbacks.History, keras.callbacks.ProgbarLogger, *map(type, callbacks)]
    states = {kind.__name__: state_of(kind) or {} for kind in kinds}
    for number, (name, attributes, *_) in enumerate(metadata["callbacks"]):
        known = states.get(name, {})  # A subclass may keep anything in an attribute.
        for attribute, packed in attributes.items():
            field = _KINDS_OF_STATE[known[attribute]] if attribute in known else _VALUE
            where = f"'callbacks'[{number}], {name}.{attribute}"
            _check(loaded, where, field, packed, lambda value: unpacked(value, arrays))


def check_fields(loaded: Loaded, names: Iterable[str]) -> None:
    """Check some fields of the metadata of a checkpoint.

    Raises:
        CheckpointError: a field is absent or of another kind; the message names it.
    """
    metadata = loaded.metadata
    for name in names:
        field = _FIELDS[name]
        if name not in metadata and not field.is_optional:
            raise CheckpointError(f"{loaded.path}: metadata: {name!r}: expected {field.expected}, got nothing. {_FIX}")
        if name in metadata:
            _check(loaded, repr(name), field, metadata[name])


_FIX = "Fix: use a directory in which this program has written its checkpoints, or an empty one."
_VALUE = _Field("a value", lambda value: True)


def _check(
    loaded: Loaded, where: str, field: _Field, value: Any, read: Callable[[Any], Any] = lambda value: value
) -> None:
    try:
        if field.fits(read(value)):
            return
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        pass  # The message shows the value.
    raise CheckpointError(
        f"{loaded.path}: metadata: {where}: expected {field.expected}, got {reprlib.repr(value)}. {_FIX}"
    )
