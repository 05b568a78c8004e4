"""The thread that reads ahead: order, bounds, errors, ends; nothing here compiles anything."""

import contextlib
import itertools
import logging
import sqlite3
import threading
import traceback

import keras
import pytest

from lockstep._keras import trainer
from lockstep.data import sources
from lockstep.data.prefetch import InlineReader, Prefetcher
from lockstep.data.sources import DatasetSource


def reading(items):
    iterator = iter(items)
    return lambda: next(iterator)


def drained(reader):
    found = []
    with contextlib.suppress(StopIteration):
        while True:
            found.append(reader.take())
    return found


def readers(items, ended=lambda: None):
    yield InlineReader(reading(items), ended)
    for depth in (1, 2, 7):
        yield Prefetcher(reading(items), ended, depth, "numbers")


def test_everything_comes_in_order_and_the_work_ends():
    before = set(threading.enumerate())
    for reader in readers(range(100)):
        reader.set_limit(float("inf"))
        assert drained(reader) == list(range(100))
        assert reader.close(failed=False) == []
    assert not [one for one in {*threading.enumerate()} - before if one.name == "lockstep-prefetch"]


def test_no_more_is_read_than_is_allowed():
    for make in (
        lambda read: InlineReader(read, lambda: None),
        lambda read: Prefetcher(read, lambda: None, 3, "numbers"),
    ):
        asked = []
        reader = make(reading(asked.append(number) or number for number in itertools.count()))
        for epoch in range(4):
            reader.set_limit(5)
            assert drained(reader) == list(range(5 * epoch, 5 * epoch + 5))
            assert len(asked) == 5 * (epoch + 1)
        reader.close(failed=False)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_more_is_read_ahead_than_the_depth(depth):
    state = {"asked": 0, "taken": 0, "ahead": 0}
    full = threading.Event()

    def read():
        state["asked"] += 1
        ahead = state["asked"] - state["taken"]
        state["ahead"] = max(state["ahead"], ahead)
        if ahead >= depth:
            full.set()
        return state["asked"]

    feed = Prefetcher(read, lambda: None, depth, "numbers")
    feed.set_limit(200)
    for _ in range(100):
        feed.take()
        state["taken"] += 1
    assert full.wait(10)
    left = feed.close(failed=False)
    assert state["ahead"] <= depth + 1  # The last take gave its place free a moment before it was counted here.
    assert left == list(range(101, state["asked"] + 1))


@pytest.fixture
def policies():
    """Restores Keras's policy of this thread."""
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


def test_a_policy_that_the_caller_sets_stays_and_holds_for_later_batches(policies):
    seen, begun, go_on = [], threading.Event(), threading.Event()

    def read():
        if len(seen) == 2:
            begun.set()
            assert go_on.wait(10)
        seen.append(keras.config.dtype_policy().name)
        return len(seen)

    feed = Prefetcher(read, lambda: None, 1, "numbers")
    feed.set_limit(8)
    assert feed.take() == 1
    assert feed.take() == 2
    assert begun.wait(10)  # The third batch is being read.
    keras.config.set_dtype_policy("mixed_bfloat16")
    go_on.set()
    for _ in range(6):
        feed.take()
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
    feed.close(failed=False)
    assert seen == ["float32"] * 3 + ["mixed_bfloat16"] * 5


def test_a_policy_that_was_made_for_a_batch_begun_before_does_not_undo_the_one_that_the_caller_has_set(policies):
    begun, go_on, numbers = threading.Event(), threading.Event(), itertools.count(1)

    def read():
        if (number := next(numbers)) == 3:
            begun.set()
            assert go_on.wait(10)
            keras.config.dtype_policy()  # Makes one, as there is none.
        return number

    trainer.set_thread_state({"dtype_policy": None})
    feed = Prefetcher(read, lambda: None, 2, "numbers")
    feed.set_limit(4)
    assert feed.take() == 1
    assert begun.wait(10)
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert feed.take() == 2
    go_on.set()
    for number in (3, 4):
        assert feed.take() == number
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
    feed.close(failed=False)


def test_a_policy_that_the_code_of_the_input_sets_holds_for_the_caller(policies):
    def read():
        keras.config.set_dtype_policy("mixed_bfloat16")

    feed = Prefetcher(read, lambda: None, 2, "numbers")
    feed.set_limit(1)
    feed.take()
    feed.close(failed=False)
    assert keras.config.dtype_policy().name == "mixed_bfloat16"


def test_an_error_comes_at_its_batch_with_its_own_traceback():
    def broken():
        yield from range(3)
        raise ZeroDivisionError("in the user's code")

    for reader in [
        InlineReader(reading(broken()), lambda: None),
        Prefetcher(reading(broken()), lambda: None, 2, "numbers"),
    ]:
        reader.set_limit(float("inf"))
        assert [reader.take() for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ZeroDivisionError) as caught:
            reader.take()
        assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        reader.close(failed=True)


def test_an_object_that_belongs_to_another_thread_is_explained():
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        reader = Prefetcher(lambda: connection.execute("select 1").fetchone(), lambda: None, 2, "numbers")
        reader.set_limit(1)
        with pytest.raises(sqlite3.ProgrammingError, match="thread") as caught:
            reader.take()
        reader.close(failed=True)
    assert caught.value.__notes__ == [
        "A thread reads the numbers; with InputOptions(prefetch=0) the thread of fit does."
    ]


class UnreadableError(Exception):
    """Has no text."""

    def __str__(self):
        return self.args[0]


def test_an_error_without_a_text_ends_the_wait_for_a_batch():
    def fail():
        raise UnreadableError(7)

    reader = Prefetcher(fail, lambda: None, 2, "numbers")
    reader.set_limit(1)
    with pytest.raises(UnreadableError):
        reader.take()
    reader.close(failed=True)


def test_a_thread_that_cannot_start_is_no_thread_to_wait_for(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    reader = Prefetcher(lambda: 1, lambda: None, 2, "numbers")
    reader.set_limit(1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        reader.take()
    assert reader.close(failed=True) == []


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, KeyError])
def test_an_error_in_a_thread_of_a_pydataset_reaches_fit(error):
    class Broken(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, number):
            if number == 2:
                raise error("file 2 is missing")
            return number

    batches = DatasetSource(Broken(workers=2)).batches()
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(error, match="file 2 is missing"):
        next(batches)


@pytest.mark.slow
def test_what_hangs_is_named_and_can_be_left(caplog):
    hanging = threading.Event()
    caplog.set_level(logging.INFO, "lockstep")
    feed = Prefetcher(lambda: hanging.wait() and None, lambda: None, 2, "generator 'slow'", patience=0.05)
    feed.set_limit(3)
    threading.Timer(0.5, hanging.set).start()
    feed.take()
    assert "without batch 1 of generator 'slow': its code has not returned it yet." in caplog.text
    hanging.clear()
    feed.close(failed=True)  # Returns although the thread is in somebody's code; the test's deadline says so.
    hanging.set()


def test_the_end_runs_in_the_thread_that_reads():
    ran = []
    feed = Prefetcher(reading(range(9)), lambda: ran.append(threading.current_thread().name), 2, "numbers")
    feed.set_limit(9)
    feed.take()
    assert len(feed.close(failed=False)) <= 2
    assert ran == ["lockstep-prefetch"]


def test_a_feed_that_was_never_used_has_no_thread():
    ran = []
    assert Prefetcher(reading(range(9)), lambda: ran.append(1), 2, "numbers").close(failed=False) == []
    assert ran == [1]


@pytest.mark.slow
def test_the_end_does_not_wait_for_ever_for_a_batch_that_was_read_ahead(caplog):
    hanging, reading_second = threading.Event(), threading.Event()
    caplog.set_level(logging.INFO, "lockstep")
    numbers = itertools.count()

    def read():
        number = next(numbers)
        if number:
            reading_second.set()
            hanging.wait()
        return number

    feed = Prefetcher(read, lambda: None, 2, "generator 'slow'", patience=0.05)
    feed.set_limit(3)
    assert feed.take() == 0
    assert reading_second.wait(10)
    assert feed.close(failed=False) == []
    assert "gave up batch 2 of generator 'slow', which was read ahead: its code has not returned it" in caplog.text
    hanging.set()


class OneHangs(keras.utils.PyDataset):
    """Item 1 hangs until ``released`` is set; item 2 fails or not."""

    num_batches = 4

    def __init__(self, fails):
        super().__init__(workers=3, max_queue_size=4)
        self.fails = fails
        self.hangs, self.released = threading.Event(), threading.Event()

    def __getitem__(self, number):
        if number == 1:
            self.hangs.set()
            self.released.wait()
        if number == 0 and self.fails:
            self.hangs.wait(10)
            raise ZeroDivisionError("item 0")
        return (number,)


def test_the_error_of_an_item_is_not_hidden_by_another_thread_that_hangs():
    dataset = OneHangs(fails=True)
    with pytest.raises(ZeroDivisionError, match="item 0"):
        next(DatasetSource(dataset).batches())
    dataset.released.set()


def test_a_pass_that_is_cut_short_waits_for_its_threads_but_not_for_ever(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    monkeypatch.setattr(sources, "_CLOSE_SECONDS", 0.1)
    dataset = OneHangs(fails=False)
    batches = DatasetSource(dataset).batches()
    next(batches)
    assert dataset.hangs.wait(10)
    batches.close()
    assert "OneHangs: gave up batches that were read ahead: after 0.1 s, 1 of its calls of __getitem__" in caplog.text
    dataset.released.set()
