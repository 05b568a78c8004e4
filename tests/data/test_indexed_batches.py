"""Batches by their numbers: what one process is given is what Keras's loop takes in another one, wherever it begins and whatever it skips."""

import json
import random
from collections import deque
from dataclasses import dataclass

import keras
import numpy as np
import pytest

from lockstep import InputError
from lockstep.data.keras_adapter import KerasInput, next_batch
from lockstep.data.sources import IterableSource, make_source

from .programs import BATCH, ROWS, STEPS, cut, data

# Keras says this wherever an input ends whose number of batches it cannot know.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

EPOCHS = 3
FACTS = {"pass": 1, "at_begin": {}, "hooks": [], "taken_before": 0, "order": None}


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, number):
        return cut(*data())[number]


class Reordered(Batches):
    """Its own code draws another order where an epoch ends, and adds something where one begins."""

    def __init__(self, **options):
        super().__init__(**options)
        self.order, self.noise = list(range(STEPS)), 0.0

    def __getitem__(self, number):
        x, y = super().__getitem__(self.order[number])
        return x + self.noise, y

    def on_epoch_begin(self):
        self.noise = np.float32(random.random())

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def function():
    batches = cut(*data())
    return lambda step: batches[step] if step < len(batches) else None


def endless():
    while True:
        yield from cut(*data())


def drawing():
    """Its order is drawn anew for each epoch from the generator that all code shares."""
    x, y = data()
    while True:
        order = np.random.permutation(ROWS)
        yield from cut(x[order], y[order])


def arrays(shuffle):
    return {"x": data()[0], "y": data()[1], "batch_size": BATCH, "shuffle": shuffle}


KINDS = {
    "arrays": lambda: arrays(False),
    "arrays, shuffled": lambda: arrays(True),
    "arrays, shuffled batches": lambda: arrays("batch"),
    "PyDataset": lambda: {"x": Batches()},
    "PyDataset, workers": lambda: {"x": Batches(workers=3, max_queue_size=2)},
    "PyDataset, shuffled": lambda: {"x": Batches(), "shuffle": True},
    "PyDataset, with its own code": lambda: {"x": Reordered()},
    "PyDataset, with its own code, shuffled": lambda: {"x": Reordered(), "shuffle": True},
    "function": lambda: {"x": function()},
}
ONE_PASS = {"generator": lambda: {"x": endless()}, "generator that draws": lambda: {"x": drawing()}}


def fit(x, take, **options):
    """Keras's loop, whose steps only take batches."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(1)])  # Not built on purpose: Keras looks at the first batch.
    model.compile("sgd", "mse")

    def step(state, iterator):
        take(iterator)
        return {"loss": np.float32(0)}, state

    model.make_train_function = lambda force=False: None
    model.train_function = step
    model.fit(x, verbose=0, **options)


def by_keras(given, **options):
    """The batches that plain Keras takes."""
    found = []
    given.setdefault("shuffle", False)
    fit(take=lambda iterator: found.append(next(iterator)), **given, **options)
    return found


def input_of(given, depth=0, steps=None):
    given = {"shuffle": False, "steps_per_epoch": steps, "pending": deque()} | given
    pending = given.pop("pending")  # what was read of a generator and not used
    source = make_source(**given, pending=lambda generator: pending)
    return KerasInput(source, lambda batch: batch, depth, steps, lambda sentence: None)


@dataclass
class Taken:
    """What the chief tells of one batch."""

    number: int
    facts: dict
    batch: object


def by_the_chief(given, depth=0, steps=None, epochs=EPOCHS, hooks=None):
    """The batches that the chief's loop takes, each with what is told of it; facts are those of its epoch's begin."""
    made, found = input_of(given, depth, steps), []
    made.track_state(None)

    def take(iterator):
        batch = next_batch(iterator, None)
        pass_, number = made.last_taken
        facts = json.loads(json.dumps(made.pass_metadata()))
        if found and (found[-1].facts["pass"], found[-1].facts["hooks"]) == (pass_, facts["hooks"]):
            facts = found[-1].facts
        found.append(Taken(number, facts, batch))
        assert made.total_taken == len(found)

    fit(made, take, epochs=epochs, **({"steps_per_epoch": steps} if steps else {}))
    made.close()
    if hooks is not None:
        hooks += made.epoch_hooks
    return found


class Reader:
    """Another process, which has drawn other numbers before."""

    def __init__(self, given, seed=99):
        random.seed(seed)
        np.random.seed(seed)
        self.input = input_of(given)
        self.input.peek()
        self.batches = self.input.indexed_batches()
        self._facts = None

    def batch(self, taken, lowest=None):
        if taken.facts is not self._facts:
            self._facts = taken.facts
            self.batches.begin(taken.facts)
        return self.batches.batch(taken.number, taken.number if lowest is None else lowest)


def assert_same(found, expected):
    for one, other in zip(keras.tree.flatten(tuple(found)), keras.tree.flatten(tuple(expected)), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0, 2])
def test_each_batch_is_the_one_that_keras_takes(kind, depth):
    taken = by_the_chief(KINDS[kind](), depth)
    assert [one.number for one in taken] == list(range(STEPS)) * EPOCHS
    if (
        kind != "function" and "workers" not in kind
    ):  # Keras takes no functions, and its queue keeps what it read at first.
        for one, expected in zip(taken, by_keras(KINDS[kind](), epochs=EPOCHS), strict=True):
            assert_same(one.batch, expected)
    reader = Reader(KINDS[kind]())
    for one in taken:
        assert_same(reader.batch(one), one.batch)


@pytest.mark.parametrize("kind", KINDS)
def test_who_takes_some_of_the_batches_takes_those_of_the_same_numbers(kind):
    taken = by_the_chief(KINDS[kind]())
    for share in (slice(0, None, 3), slice(1, None, 2), slice(STEPS + 2, STEPS + 3), slice(-1, None)):
        reader = Reader(KINDS[kind]())  # The last two begin late: in the second pass, and with the last batch of all.
        for one in taken[share]:
            assert_same(reader.batch(one), one.batch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_was_skipped_can_be_asked_for_until_all_below_are_done(kind):
    taken = by_the_chief(KINDS[kind](), epochs=2)
    reader = Reader(KINDS[kind]())
    for order in ((3, 0, 4, 1, 2), (4, 3, 2, 1, 0)):
        for number in order:
            assert_same(reader.batch(taken[number], lowest=0), taken[number].batch)
        taken = taken[STEPS:]


def test_what_nobody_will_ask_for_is_not_kept():
    taken, reader = by_the_chief(KINDS["arrays"](), epochs=1), Reader(KINDS["arrays"]())
    reader.batch(taken[3], lowest=1)
    assert sorted(reader.batches._kept) == [1, 2, 3]
    reader.batch(taken[4], lowest=2)
    assert sorted(reader.batches._kept) == [2, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [2, 7])
def test_epochs_of_so_many_steps_are_read_pass_by_pass(kind, steps):
    taken = by_the_chief(KINDS[kind](), steps=steps, epochs=4)
    reader = Reader(KINDS[kind]())
    for one in taken[::2]:
        assert_same(reader.batch(one), one.batch)


@pytest.mark.parametrize("kind", ONE_PASS)
@pytest.mark.parametrize("steps", [2, STEPS, 7])
def test_a_generator_goes_on_from_epoch_to_epoch(kind, steps):
    keras.utils.set_random_seed(1)
    generator = ONE_PASS[kind]()["x"]
    expected = [next(generator) for _ in range(EPOCHS * steps)]
    taken = by_the_chief(ONE_PASS[kind](), steps=steps)
    for one, batch in zip(taken, expected, strict=True):
        assert_same(one.batch, batch)
    for share in (slice(None), slice(1, None, 2), slice(-1, None)):
        reader = Reader(ONE_PASS[kind](), seed=1)  # With the chief's numbers, as at the beginning of a job.
        for one in taken[share]:
            assert_same(reader.batch(one), one.batch)


def test_a_second_fit_goes_on_with_a_generator_where_the_first_has_ended_here_and_there():
    chief, reader = ({"x": endless(), "pending": deque()} for _ in range(2))
    expected = [batch for _ in range(2) for batch in cut(*data())]
    for call in range(2):
        taken = by_the_chief(chief, steps=3, epochs=1)
        other = Reader(reader)
        for number in (0, 1):
            assert_same(taken[number].batch, expected[3 * call + number])
            assert_same(other.batch(taken[number]), taken[number].batch)
        other.batches.read_up_to(len(taken))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_second_fit_begins_with_what_the_data_s_own_code_has_made_of_them(shuffle):
    chief, reader = ({"x": Reordered(), "shuffle": shuffle} for _ in range(2))
    for _ in range(2):
        hooks = []
        taken, other = by_the_chief(chief, hooks=hooks), Reader(reader)
        for one in taken[1::2]:
            assert_same(other.batch(one), one.batch)
        other.batches.run_hooks(hooks)
    assert (reader["x"].order, reader["x"].noise) == (chief["x"].order, chief["x"].noise)


def numbers(count):
    return [(np.array(number),) for number in range(count)]


def numbered(iterable, **facts):
    batches = KerasInput(IterableSource(iterable), lambda batch: batch, 0, None, lambda s: None).indexed_batches()
    batches.begin(FACTS | facts)
    return batches


def test_a_pass_of_what_goes_on_begins_after_the_batches_of_those_before():
    batches = numbered(iter(numbers(5)), taken_before=2)
    assert int(batches.batch(1, 1)[0]) == 3
    assert int(numbered(numbers(5), taken_before=2).batch(1, 1)[0]) == 1


def test_only_what_goes_on_from_pass_to_pass_is_skipped():
    for iterable, following in ((numbers(5), 1), (iter(numbers(5)), 4)):
        batches = numbered(iterable)
        batches.batch(0, 0)
        batches.read_up_to(4)
        assert int(batches.batch(following, following)[0]) == following


@pytest.mark.parametrize("kind", ["function", "arrays", "generator", "PyDataset", "PyDataset, shuffled"])
def test_less_data_than_the_chief_has_is_refused(kind):
    given = (KINDS | {"generator": lambda: {"x": iter_once()}})[kind]()
    batches = input_of(given).indexed_batches()
    batches.begin(FACTS)
    with pytest.raises(
        InputError, match=rf"ends before batch ({STEPS}|{STEPS + 2}) here \(counted from 0\), and not at the chief"
    ):
        batches.batch(STEPS + 2, STEPS + 2)


def iter_once():
    yield from cut(*data())


@pytest.mark.parametrize("kind", [*KINDS, "generator"])
def test_a_look_takes_nothing(kind):
    looked, plain = input_of((KINDS | ONE_PASS)[kind]()), []
    first = looked.peek()
    fit(looked, lambda iterator: plain.append(next_batch(iterator, None)), epochs=1, steps_per_epoch=STEPS)
    looked.close()
    assert len(plain) == STEPS
    if "shuffled" not in kind and "own code" not in kind:
        assert_same(first, plain[0])
        assert [int(batch[1][0, 0]) for batch in plain] == list(range(0, ROWS, BATCH))


def test_a_look_at_nothing_gives_nothing():
    assert input_of({"x": lambda step: None}).peek() is None
