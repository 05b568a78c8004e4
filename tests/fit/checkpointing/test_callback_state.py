"""Attributes of callbacks go to a checkpoint and come back; what is no value stays with its process."""

import copy
import itertools
import json
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest

from lockstep.checkpoint.manifest import Manifest, encode
from lockstep.fit.checkpointing import callback_attributes
from lockstep.fit.checkpointing.callback_attributes import (
    FirstAttributes,
    first_attributes,
    packed_attributes,
    unpacked_attributes,
)

VALUES = [
    None,
    True,
    3,
    0.1,
    float("inf"),
    "text",
    2 + 3j,
    jnp.arange(3.0),
    [1, (2, "three"), jnp.ones(2, "int8")[0]],
    {"a": [1.5], 2: None, (1, 2): "x"},
    np.arange(6, dtype="int16").reshape(2, 3),
    np.float32(0.25),
    np.ones(2, ml_dtypes.bfloat16),
    keras.ops.less,
    {1, "two", (3, None)},
    frozenset([0.5, np.int64(2)]),
    deque([1, [2]], maxlen=3),
    deque([1]),
    Counter("abca"),
    OrderedDict([("b", 1), ("a", {2})]),
    defaultdict(list, {np.int64(1): [2]}),
    defaultdict(None, a=1),
]


def there_and_back(owner, target):
    arrays = {}
    facts, _ = json.loads(json.dumps(packed_attributes(owner, "callback 0", arrays, FirstAttributes())))
    unpacked_attributes(target, facts, arrays, FirstAttributes())
    return target


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_it_was(value):
    target = SimpleNamespace()
    for _ in range(2):  # When training begins, and when its epoch does.
        found = there_and_back(SimpleNamespace(value=value), target).value
    assert type(found) is type(value)
    assert np.array_equal(found, value) if isinstance(value, (np.ndarray, jax.Array)) else found == value
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(found, "default_factory", None) == getattr(value, "default_factory", None)
    assert not isinstance(value, OrderedDict) or [*found] == [*value]


def test_a_variable_is_kept_by_its_value_also_beside_others():
    found = there_and_back(SimpleNamespace(value=[1, {"lr": keras.Variable(0.5)}]), SimpleNamespace()).value
    assert (found[0], float(found[1]["lr"])) == (1, 0.5)


def test_a_variable_that_an_attribute_has_gets_its_value():
    def made(number):
        inner = {"a": (keras.Variable(number), 1)}
        return SimpleNamespace(one=keras.Variable([number, 0.0]), more=[keras.Variable(number)], inner=inner)

    target = made(0.0)
    held = target.one, target.more[0], target.inner["a"][0]
    owner = made(3.0)
    owner.more.append(4)
    there_and_back(owner, target)
    assert (target.one, target.more, target.inner) == (held[0], [held[1], 4], {"a": (held[2], 1)})
    assert [np.asarray(each).tolist() for each in held] == [[3.0, 0.0], 3.0, 3.0]


def test_keys_that_look_alike_keep_their_arrays():
    value = {1: np.zeros(2), "1": np.ones(2), "a\0": np.full(2, 2.0)}
    found = there_and_back(SimpleNamespace(value=value), SimpleNamespace()).value
    assert {key: array[0] for key, array in found.items()} == {1: 0.0, "1": 1.0, "a\0": 2.0}


def test_keys_of_numpy_are_kept_apart():
    value = {np.int64(1): "a", np.int64(2): np.ones(2), (np.float32(0.5), np.int8(3)): np.float32(7)}
    found = there_and_back(SimpleNamespace(value=value), SimpleNamespace()).value
    assert [*found] == [*value]
    assert [type(key) for key in found] == [np.int64, np.int64, tuple]
    assert (found[1], found[2].tolist(), found[0.5, 3]) == ("a", [1, 1], 7)


CYCLE = {"children": []}
CYCLE["children"].append({"parent": CYCLE})

UNKEPT = {
    "cycle": CYCLE,
    "object": object(),
    "builtin": print,
    "function": there_and_back,
    "set": {object()},
    "list": [object()],
    "deque": deque([1, object()]),
    "dict": {"a": object()},
    "defaultdict": defaultdict(lambda: 0),
    "text": np.array(["a"]),
    "long double": np.ones(2, "longdouble"),
}


@pytest.mark.parametrize("value", UNKEPT.values(), ids=UNKEPT)
def test_what_is_no_value_is_left_alone(value):
    assert vars(there_and_back(SimpleNamespace(value=value), SimpleNamespace(value="own"))) == {"value": "own"}


def test_a_log_that_is_no_value_takes_no_other_with_it():
    history, target = keras.callbacks.History(), keras.callbacks.History()
    history.history = {"loss": [0.5, 0.25], "ended": [object(), object()]}
    assert there_and_back(history, target).history == {"loss": [0.5, 0.25]}


def test_what_comes_back_shares_no_memory():
    owner = SimpleNamespace(value=np.zeros(3))
    arrays = {}
    facts, _ = packed_attributes(owner, "callback 0", arrays, FirstAttributes())
    owner.value[:] = 1
    target = SimpleNamespace()
    unpacked_attributes(target, facts, arrays, FirstAttributes())
    assert target.value.tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_a_key_of_jax_comes_back(kind):
    key = jax.random.key(3, impl=kind)
    found = there_and_back(SimpleNamespace(key=key), SimpleNamespace()).key
    assert found.dtype == key.dtype
    assert jax.random.bits(found) == jax.random.bits(key)


def test_a_deleted_array_is_left_alone():
    array = jax.numpy.ones(3)
    array.delete()
    assert packed_attributes(SimpleNamespace(array=array), "", {}, FirstAttributes()) == ({}, {})


def test_arrays_that_have_not_changed_are_not_in_a_checkpoint():
    owner = SimpleNamespace(x=np.ones(3), seen=[np.zeros(2), 1])
    first = first_attributes(owner, "callback 0")
    owner.seen[0] += 1
    arrays, target = {}, SimpleNamespace(x=np.full(3, 5.0), seen=None)
    unpacked_attributes(target, packed_attributes(owner, "callback 0", arrays, first)[0], arrays, first)
    assert (target.x.tolist(), target.seen[0].tolist(), list(arrays)) == ([5, 5, 5], [1, 1], ["callback 0/seen/0"])


def test_arrays_where_there_were_none_are_not_hashed(monkeypatch):
    owner = SimpleNamespace(best=None, array=np.ones(2), seen=[])
    first, hashed = first_attributes(owner, ""), []
    monkeypatch.setattr(callback_attributes, "array_digest", lambda array: hashed.append(array.tolist()))
    owner.best, owner.seen = [np.zeros(3)], [np.zeros(3)]
    facts, _ = packed_attributes(owner, "", {}, first)
    assert [*facts] == ["best", "array", "seen"]
    assert hashed == [[1, 1]]


def test_many_numbers_cost_no_call_for_each():
    owner, calls = SimpleNamespace(losses=[0.5]), itertools.count()
    first = first_attributes(owner, "")
    owner.losses += [0.25] * 10_000
    sys.setprofile(lambda frame, event, argument: event == "call" and next(calls))
    try:
        facts, _ = packed_attributes(owner, "", {}, first)
        encode(Manifest(1, 0, {}, facts))
    finally:
        sys.setprofile(None)
    assert facts == {"losses": {"list": owner.losses}}
    assert next(calls) < 1000


def test_what_has_not_changed_may_be_chosen_anew():
    owner = SimpleNamespace(patience=3, wait=0, best=None)
    begun_with = first_attributes(owner, "callback 0")
    owner.wait, owner.best = 2, np.ones(2)
    arrays = {}
    target = SimpleNamespace(patience=9, wait=0, best=None)
    facts, _ = packed_attributes(owner, "callback 0", arrays, begun_with)
    unpacked_attributes(target, facts, arrays, FirstAttributes())
    assert (target.patience, target.wait, target.best.tolist()) == (9, 2, [1, 1])


def resumed(program, *changes):
    """A program's objects after a resume of its callback, to which ``changes`` give other states; each is saved, and the last one comes back."""
    owner, target = program(), program()
    first = first_attributes(owner.callback, "callback 0"), first_attributes(target.callback, "callback 0")
    for change in changes:
        change(owner.callback)
        arrays = {}
        facts, same = json.loads(json.dumps(packed_attributes(owner.callback, "callback 0", arrays, first[0])))
    for _ in range(2):  # When training begins, and when its epoch does.
        unpacked_attributes(target.callback, facts, arrays, first[1], same)
    return target


SHARED = {
    "list": ([1], lambda value: value.append(2)),
    "set": ({1, 2}, lambda value: value.symmetric_difference_update({2, 3})),
    "dict": ({"b": 1, "a": 2}, lambda value: value.update(b=value.pop("b"), c=3)),
    "Counter": (Counter("ab"), lambda value: value.update("ac")),
    "OrderedDict": (OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
    "defaultdict": (defaultdict(list), lambda value: value["a"].append(1)),
    "deque": (deque([1], maxlen=2), lambda value: value.extend([2, 3])),
    "array": (np.zeros(2), lambda value: value.__iadd__(1)),
    "nested": ([{"a": [0]}, (np.zeros(2), [1])], lambda value: (value[0]["a"].append(1), value[1][0].fill(3))),
}


@pytest.mark.parametrize(("made", "change"), SHARED.values(), ids=SHARED)
def test_an_object_that_a_program_shares_with_a_callback_gets_its_content(made, change):
    def program():
        value = copy.deepcopy(made)
        return SimpleNamespace(held=value, callback=SimpleNamespace(value=value, also=value))

    expected = copy.deepcopy(made)
    change(expected)
    found = resumed(program, lambda callback: change(callback.value))
    assert found.held is found.callback.value is found.callback.also
    assert repr(found.held) == repr(expected)


def test_items_that_a_program_shares_with_a_callback_get_their_content():
    def program():
        inner, array = [], np.zeros(2)
        value = {"inner": inner, "pair": (1, array)}
        return SimpleNamespace(inner=inner, array=array, callback=SimpleNamespace(value=value))

    def change(callback):
        callback.value = {"inner": callback.value["inner"], "pair": callback.value["pair"], "new": 1}
        callback.value["inner"].append(5)
        callback.value["pair"][1][:] = 7

    found = resumed(program, change)
    assert found.inner is found.callback.value["inner"]
    assert found.array is found.callback.value["pair"][1]
    assert (found.inner, found.array.tolist(), found.callback.value["new"]) == ([5], [7, 7], 1)


def test_an_object_that_a_callback_has_replaced_keeps_its_content():
    def program():
        plain, array, items = [1], np.zeros(2), {"a": [1]}
        owner = SimpleNamespace(plain=plain, array=array, items=items, also=plain)
        return SimpleNamespace(plain=plain, array=array, inner=items["a"], callback=owner)

    def change(callback):
        callback.plain, callback.array, callback.items["a"] = [2], callback.array + 1, [2]

    found = resumed(program, change)
    assert (found.plain, found.array.tolist(), found.inner) == ([1], [0, 0], [1])
    owner = found.callback
    assert (owner.plain, owner.array.tolist(), owner.items, owner.also) == ([2], [1, 1], {"a": [2]}, [1])
    assert owner.also is found.plain


def test_a_replaced_array_does_not_stay_in_memory():
    owner = SimpleNamespace(value=[np.zeros(2)])
    first, held = first_attributes(owner, ""), weakref.ref(owner.value[0])
    owner.value = [np.ones(2)]
    assert packed_attributes(owner, "", {}, first)[1] == {}
    assert held() is None


@pytest.mark.parametrize("other", [np.zeros(3), np.zeros(2, "float32"), [0.0, 0.0], deque([0.0])], ids=str)
def test_an_object_of_another_form_is_replaced(other):
    owner, target = SimpleNamespace(value=np.zeros(2), last=deque([0], 2)), SimpleNamespace(value=other, last=deque())
    first, arrays = first_attributes(owner, ""), {}
    owner.value += 1
    owner.last.append(1)
    facts, same = packed_attributes(owner, "", arrays, first)
    unpacked_attributes(target, facts, arrays, first_attributes(target, ""), same)
    assert (target.value.tolist(), [*other], [*target.last]) == ([1, 1], [0] * len(other), [0, 1])


def test_a_read_only_array_is_replaced():
    held = np.zeros(2)
    held.flags.writeable = False
    target = SimpleNamespace(value=held)
    first = first_attributes(target, "")
    facts, same = {"value": {"array": "a", "scalar": False}}, {"value": "value"}
    unpacked_attributes(target, facts, {"a": np.ones(2)}, first, same)
    assert (target.value.tolist(), held.tolist()) == ([1, 1], [0, 0])


def test_what_has_not_changed_stays_the_object_of_the_program():
    held = [1]
    target = SimpleNamespace(value=held)
    first = first_attributes(target, "")
    held.append(2)  # as the beginning of an epoch may
    unpacked_attributes(target, {}, {}, first)
    assert target.value is held
    assert held == [1]


def moved_to_end(callback):
    callback.items.move_to_end("a")
    callback.items["a"].append(7)


def renamed(callback):
    callback.old, callback.items = callback.items, [[0], [0]]
    callback.old[0].append(7)


MOVES = {
    "order of keys": (OrderedDict, moved_to_end),
    "an earlier key": (dict, lambda callback: (callback.items.pop("a"), callback.items["b"].append(7))),
    "an earlier item": (list, lambda callback: (callback.items.insert(0, [9]), callback.items[2].append(7))),
    "order of items": (list, lambda callback: (callback.items.reverse(), callback.items[0].append(7))),
    "items of a deque": (deque, lambda callback: (callback.items.rotate(), callback.items[0].append(7))),
    "another attribute": (
        list,
        lambda callback: (vars(callback).update(old=callback.items.pop(0)), callback.old.append(7)),
    ),
    "replaced by an equal one": (list, renamed),
}


@pytest.mark.parametrize(("kind", "change"), MOVES.values(), ids=MOVES)
def test_objects_that_a_callback_has_moved_get_their_content(kind, change):
    def program():
        a, b = [0], [0]
        items = {"a": a, "b": b}
        items = kind(items if issubclass(kind, dict) else items.values())
        return SimpleNamespace(a=a, b=b, held=items, callback=SimpleNamespace(items=items, old=None))

    expected = program()
    change(expected.callback)
    found = resumed(program, change)
    assert found == expected

    def places(owner):
        values = [each for each in (owner.callback.items, owner.callback.old) if each]
        items = [item for each in values for item in (each.values() if isinstance(each, dict) else each)]
        return [item is held for item in items for held in (owner.a, owner.b, owner.held)]

    assert places(found) == places(expected)
    assert (found.callback.items is found.held) == (expected.callback.items is expected.held)


def test_a_variable_stays_in_an_object_that_a_callback_has_moved():
    def program():
        items = [keras.Variable(0.0), [0]]
        return SimpleNamespace(items=items, variable=items[0], callback=SimpleNamespace(items=items, old=None))

    def change(callback):
        callback.old, callback.items = callback.items, []
        callback.old[0].assign(3.0)

    found = resumed(program, change)
    assert found.callback.old is found.items
    assert (found.items[0] is found.variable, float(found.variable), found.callback.items) == (True, 3.0, [])


@pytest.mark.parametrize("made", [lambda: np.zeros(2), lambda: [0, 0]], ids=["array", "list"])
@pytest.mark.parametrize("swaps", [1, 2])
def test_objects_that_change_their_places_get_their_content(made, swaps):
    def program():
        first, second = made(), made()
        return SimpleNamespace(first=first, second=second, callback=SimpleNamespace(now=first, before=second))

    def swap(callback):
        callback.now, callback.before = callback.before, callback.now
        callback.now[0] += 1  # The other one may be as it was.

    expected = program()
    for _ in range(swaps):
        swap(expected.callback)
    found = resumed(program, *[swap] * swaps)
    assert (found.callback.now is found.first) == (expected.callback.now is expected.first) == (swaps == 2)
    assert found.callback.before is (found.second if swaps == 2 else found.first)
    assert [*found.first, *found.second] == [*expected.first, *expected.second]


def test_what_is_as_it_was_is_not_touched():
    held = [1]
    target = SimpleNamespace(value={"a": deque([held])})
    unpacked_attributes(target, {}, {}, first_attributes(target, ""))
    assert target.value["a"][0] is held


class Watched:
    """Of a dict or deque: notes whether it has been without an item that it had."""

    was_without = False

    def __delitem__(self, key):
        super().__delitem__(key)
        self.note()

    def clear(self):
        super().clear()
        self.note()

    def popleft(self):
        super().popleft()
        self.note()

    def note(self):
        self.was_without |= "a" not in self


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (dict(a=1, b=2), dict(a=3, c=4)),
        (dict(b=2, a=1), dict(a=3, c=4)),
        (dict(a=1), dict(a=2, c=4)),
        (deque("ab"), deque("ca")),
        (deque("ab", 3), deque("cda", 3)),
    ],
    ids=str,
)
def test_what_stays_is_there_at_any_time(before, after):
    kind = type(before)
    watched = type("kind", (Watched, kind), {})
    now = watched(before) if kind is dict else watched(before, before.maxlen)
    restored = watched(after) if kind is dict else watched(after, after.maxlen)
    assert callback_attributes._refilled(now, restored) is now
    assert repr(kind(now)) == repr(kind(restored))
    assert not now.was_without
