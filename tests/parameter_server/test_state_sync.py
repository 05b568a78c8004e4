"""What steps change besides the trained variables adds up: in any order where it is a sum, and over parts as over replicas."""

import itertools
from unittest.mock import Mock

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep._keras import trainer
from lockstep._keras.graph import is_seed
from lockstep._keras.trainer import variables_of
from lockstep.execution.replica import replica_seed
from lockstep.parameter_server.gradient_step import nonempty_parts, part_of, specs_of
from lockstep.parameter_server.sharding import plan_shards
from lockstep.parameter_server.state_sync import (
    Additivity,
    DeltaAccumulator,
    StateSync,
    add_deltas,
    compute_delta,
    compute_deltas,
    is_additive,
    merge_rules,
    with_changing_values,
)

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(28, 4)).astype("float32")
Y = (RANDOM.normal(size=(28, 1)) > 0).astype("float32")
BATCHES = [(X[at : at + 7], Y[at : at + 7]) for at in range(0, 28, 7)]
NONE = frozenset()


class Counts(layers.Layer):
    """One variable of each kind that changes in the forward pass."""

    def build(self, shape):
        def weight(name, dtype, aggregation):
            return self.add_weight(
                shape=(), dtype=dtype, initializer="zeros", trainable=False, name=name, aggregation=aggregation
            )

        self.calls = weight("calls", "int32", "sum")
        self.rows = weight("rows", "float32", "sum")
        self.first = weight("first", "float32", "only_first_replica")
        self.largest = weight("largest", "float32", "mean")
        self.was_called = weight("was_called", "bool", "only_first_replica")

    def call(self, x):
        self.calls.assign(self.calls + 1)
        self.rows.assign(self.rows + ops.cast(ops.shape(x)[0], "float32"))
        self.first.assign(self.first + x[0, 0])
        self.largest.assign(ops.max(x))
        self.was_called.assign(ops.logical_or(self.was_called, ops.max(x) > -1e9))
        return x


class Largest(keras.metrics.Metric):
    """Keeps a maximum, which does not add up."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y_pred))))

    def result(self):
        return ops.cast(self.largest, "float32")


class HasSeen(Largest):
    """Knows a word, and not a number."""

    def __init__(self):
        keras.metrics.Metric.__init__(self, name="has_seen")
        self.largest = self.add_variable((), "zeros", dtype="bool", name="has_seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(ops.logical_or(self.largest, ops.any(ops.convert_to_tensor(y_true) > 0)))


def made(*more, metrics=(), rate=0.0):
    keras.utils.set_random_seed(1)
    inner = [layers.Dense(3), layers.BatchNormalization(momentum=0.8), *more, layers.Dense(1, activation="sigmoid")]
    model = keras.Sequential([keras.Input((4,)), *inner])
    model.compile(keras.optimizers.SGD(rate), "binary_crossentropy", metrics=list(metrics))
    trainer.training_state(model, BATCHES[0])
    return model


def host(state):
    return tuple([np.array(value) for value in part] for part in state)


def state_of(model):
    return host([variable.value for variable in group] for group in variables_of(model))


def compiled(model):
    """``(state, batch) -> state`` of plain Keras."""
    step = jax.jit(model.train_step)
    return lambda state, batch: host(step(state, batch)[1])


def one_after_the_other(step, state, batches):
    for batch in batches:
        state = step(state, batch)
    return state


def changed_by(step, state, others, batch, no_sums=NONE):
    """As a worker finds it: metrics begin anew."""
    trainable, _, optimizer, zero = state
    _, new, _, metrics = step((trainable, others, optimizer, zero), batch)
    return compute_deltas((new, others), (metrics, zero), no_sums)


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # float32, added up in another order.


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_metrics_of_batches_in_any_order_are_those_of_one_after_the_other(order):
    metrics = [keras.metrics.AUC(num_thresholds=20), "mae", "accuracy", keras.metrics.F1Score(threshold=0.5)]
    model = made(metrics=metrics)
    step, state = compiled(model), state_of(model)
    expected = one_after_the_other(step, state, BATCHES)
    totals = DeltaAccumulator(model)
    totals.set(state[1], state[3])
    for number in order:
        totals.add([changed_by(step, state, state[1], BATCHES[number])], [7], NONE)
    assert_close(totals.metrics, expected[3])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_the_newest_values_give_the_averages_and_counters_of_one_process(order):
    model = made(Counts())
    step, state = compiled(model), state_of(model)
    batches = [BATCHES[number] for number in order]
    expected = one_after_the_other(step, state, batches)
    totals = DeltaAccumulator(model)
    totals.set(state[1], state[3])
    for batch in batches:
        others = with_changing_values(state[1], totals.changing_values())
        totals.add([changed_by(step, state, others, batch)], [7], NONE)
    assert_close(totals.non_trainable, expected[1])
    assert {number for number, value in enumerate(expected[1]) if (value != state[1][number]).any()} == totals.changing


def test_concurrent_changes_add_up_in_any_order():
    model = made(Counts())
    step, state = compiled(model), state_of(model)
    expected = one_after_the_other(step, state, BATCHES)[1]
    found = [changed_by(step, state, state[1], batch) for batch in BATCHES]
    ends = []
    for order in itertools.islice(itertools.permutations(found), 0, None, 5):
        totals = DeltaAccumulator(model)
        totals.set(state[1], state[3])
        for one in order:
            totals.add([one], [7], NONE)
        ends.append(totals.non_trainable)
        counters = [
            n for n, x in enumerate(model.non_trainable_variables) if x.name in ("calls", "rows", "first", "was_called")
        ]
        assert len(counters) == 4
        assert_close([totals.non_trainable[n] for n in counters], [expected[n] for n in counters])
    for end in ends[1:]:
        assert_close(end, ends[0])


@pytest.mark.slow
@pytest.mark.parametrize("parts", [3, 5])
def test_parts_of_a_batch_are_merged_as_the_replicas_of_one_process(parts):
    strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=parts)
    more = lambda: (Counts(), layers.Dropout(0.3, seed=3))  # noqa: E731
    with strategy.scope():
        mirrored = made(*more())
    mirrored.fit(*BATCHES[0], batch_size=7, shuffle=False, verbose=0)
    model = made(*more())
    step, state = compiled(model), state_of(model)
    totals = DeltaAccumulator(model)
    totals.set(state[1], state[3])
    pieces = [part_of(BATCHES[0], part, parts) for part in range(nonempty_parts(7, parts))]
    found = []
    for number, piece in enumerate(pieces):
        pairs = zip(state[1], model.non_trainable_variables, strict=True)
        others = [
            np.asarray(replica_seed(jax.numpy.asarray(value), number)) if is_seed(variable) else value
            for value, variable in pairs
        ]
        found.append(changed_by(step, state, others, piece))
    totals.add(found, [len(x) for x, _ in pieces], NONE)
    assert_close(totals.non_trainable, state_of(mirrored)[1])


def test_seeds_advance_and_are_not_sent_with_each_task():
    model = made(layers.Dropout(0.3, seed=3))
    step, state = compiled(model), state_of(model)
    totals = DeltaAccumulator(model)
    totals.set(state[1], state[3])
    (seed,) = [n for n, variable in enumerate(model.non_trainable_variables) if is_seed(variable)]
    totals.add([changed_by(step, state, state[1], BATCHES[0])], [7], NONE)
    assert (totals.non_trainable[seed] != state[1][seed]).any()
    assert seed not in totals.changing
    assert f"other/{seed}" not in totals.changing_values()


def test_a_worker_gets_all_that_has_ever_changed_also_after_metrics_were_reset():
    model = made(Counts())
    step, state = compiled(model), state_of(model)
    totals = DeltaAccumulator(model)
    totals.set(state[1], state[3])
    totals.add([changed_by(step, state, state[1], BATCHES[0])], [7], NONE)
    totals.set(totals.non_trainable, state[3])  # As at the beginning of an epoch: only metrics are other ones.
    assert_close(with_changing_values(state[1], totals.changing_values()), totals.non_trainable)
    assert_close(totals.metrics, state[3])


def test_a_metric_that_does_not_add_up_is_seen_and_shows_the_last_batch():
    model = made(metrics=[Largest(), HasSeen(), "mae", keras.metrics.AUC(num_thresholds=5)])
    step, state = compiled(model), state_of(model)
    first = step(state, BATCHES[0])
    second = step((*state[:3], first[3]), BATCHES[0])
    three = zip(first[3], state[3], second[3], strict=True)
    no_sums = frozenset(number for number, each in enumerate(three) if not is_additive(*each))
    names = [variable.path.rpartition("/")[2] for variable in variables_of(model)[3]]
    assert [names[number] for number in sorted(no_sums)] == ["largest", "has_seen"]
    totals = DeltaAccumulator(model)
    totals.set(state[1], state[3])
    for batch in BATCHES:
        totals.add([changed_by(step, state, state[1], batch, no_sums)], [7], no_sums)
    (largest, seen) = sorted(no_sums)
    last = step(state, BATCHES[-1])[3]
    assert (totals.metrics[largest], totals.metrics[seen]) == (last[largest], last[seen])
    whole = one_after_the_other(step, state, BATCHES)[3]
    assert_close(
        [value for number, value in enumerate(totals.metrics) if number not in no_sums],
        [value for number, value in enumerate(whole) if number not in no_sums],
    )


class Observed(layers.Layer):
    """Values that the newest one replaces, next to a counter and an average; the largest number begins without a number."""

    def build(self, shape):
        def weight(name, value, dtype="float32"):
            initializer = keras.initializers.Constant(value)
            return self.add_weight(shape=(), dtype=dtype, initializer=initializer, trainable=False, name=name)

        self.most, self.far, self.last = weight("most", -np.inf), weight("far", 1e10), weight("last", 0)
        self.calls, self.mean, self.set = weight("calls", 0, "int32"), weight("mean", 1000), weight("set", 0, "int32")

    def call(self, x):
        self.most.assign(ops.maximum(self.most, ops.max(x)))
        self.far.assign(ops.min(x))
        self.last.assign(x[0, 0])
        self.calls.assign_add(1)
        self.mean.assign(0.99 * self.mean + 0.01 * ops.mean(x))
        self.set.assign(1)
        return x


def test_changes_add_up_of_counters_and_averages_only():
    model = made(Observed(), layers.Dropout(0.3, seed=3))
    step, state = compiled(model), state_of(model)
    expected = one_after_the_other(step, state, BATCHES)
    known, totals = Additivity(merge_rules(model)), DeltaAccumulator(model)
    totals.set(state[1], state[3])
    for batch in BATCHES:
        others = [
            new if is_seed(variable) else old
            for new, old, variable in zip(state[1], totals.non_trainable, model.non_trainable_variables, strict=True)
        ]
        new = step((state[0], others, *state[2:]), batch)
        repeat = lambda others, metrics: step((state[0], others, state[2], metrics), batch)[1::2]  # noqa: B023, E731
        known.observe((others, state[3]), new[1::2], repeat)
        changed = compute_deltas((new[1], others), (new[3], state[3]), known.no_sums, known.replaced)
        totals.add([changed], [7], known.no_sums)
    names = [variable.path.rpartition("/")[2] for variable in model.non_trainable_variables]
    assert {names[number] for number in known.replaced} == {"most", "far", "last", "set"}
    kept = [number for number, variable in enumerate(model.non_trainable_variables) if not is_seed(variable)]
    assert_close([totals.non_trainable[n] for n in kept], [expected[1][n] for n in kept])


def test_a_metric_that_a_first_batch_leaves_as_it_is_is_tested_by_a_later_one():
    known, zero = Additivity([]), np.float32(0)
    for largest, expected in ((0, NONE), (3, {1})):  # A sum, which all batches change, and a maximum.
        after, again = [np.float32(2), np.float32(largest)], [np.float32(4), np.float32(largest)]
        known.observe(([], [zero, zero]), ([], after), lambda others, metrics: ([], again))  # noqa: B023
        assert known.no_sums == expected


class Scaled(layers.Layer):
    """Divides by a moving average that the step itself moves, so that a repeated step has another loss."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False, name="scale")

    def call(self, x):
        self.scale.assign(0.5 * self.scale + 0.5 * ops.mean(ops.abs(x)))
        return x / self.scale


def test_a_loss_that_depends_on_state_that_the_step_moves_adds_up():
    model = made(Scaled(), metrics=["mae"])
    step, state = compiled(model), state_of(model)
    new = step(state, BATCHES[0])
    known = Additivity(merge_rules(model))
    repeat = lambda others, metrics: step((state[0], others, state[2], metrics), BATCHES[0])[1::2]  # noqa: E731
    known.observe((state[1], state[3]), new[1::2], repeat)
    assert (known.replaced, known.no_sums) == (NONE, NONE)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_metric_that_is_no_number_stays_so(value):
    model = made(metrics=["mae"])
    state = state_of(model)
    totals = DeltaAccumulator(model)
    totals.set(state[1], state[3])
    after = [np.full_like(one, value) for one in state[3]]
    totals.add([compute_deltas(([], []), (after, state[3]), NONE)], [7], NONE)
    assert not any(np.isfinite(one).any() for one in totals.metrics)


def test_changes_of_several_steps_are_those_of_all_in_turn():
    one, two = np.float32(1), np.float32(2)
    total = {}
    for deltas in ({"other/0": one}, {"other/0": two, "new/1": one}, {"new/0": one, "other/1": two}, {"other/0": two}):
        add_deltas(total, deltas)
    assert total == {"new/0": 3, "new/1": 3}


@pytest.mark.parametrize("rule", ["mean", "only_first_replica"])
def test_parts_of_which_one_has_a_new_value_are_merged(rule):
    class State(layers.Layer):
        def build(self, shape):
            self.add_weight(shape=(), initializer="zeros", trainable=False, name="state", aggregation=rule)

        def call(self, x):
            return x

    model = made(State())
    (number,) = (n for n, one in enumerate(model.non_trainable_variables) if one.path.endswith("/state"))
    totals, state = DeltaAccumulator(model), state_of(model)
    totals.set(state[1], state[3])
    totals.non_trainable[number] = np.float32(10)
    totals.add([{f"other/{number}": np.float32(2)}, {f"new/{number}": np.float32(20)}, {}], [2, 1, 1], NONE)
    assert totals.non_trainable[number] == (12 * 2 + 20 + 10) / 4 if rule == "mean" else 20


@pytest.mark.parametrize(
    ("first", "start", "second", "expected"),
    [
        (np.float32(5), np.float32(2), np.float32(8), True),
        (np.float32(5), np.float32(0), np.float32(5), False),
        (np.int32([1, 2]), np.int32([0, 0]), np.int32([2, 4]), True),
        (np.int32([1, 2]), np.int32([0, 0]), np.int32([2, 3]), False),
        (np.float32(np.nan), np.float32(0), np.float32(np.nan), True),
        (np.bool_(True), np.bool_(False), np.bool_(True), False),
        (np.bool_(True), np.bool_(True), np.bool_(True), True),
    ],
)
def test_a_metric_is_additive_if_a_step_adds_the_same_again(first, start, second, expected):
    assert is_additive(*map(np.asarray, (first, start, second))) == expected


def test_integer_deltas_wrap_around_and_equal_values_have_none():
    new, old = np.uint32([1, 5]), np.uint32([4, 5])
    changed = compute_delta(new, old)
    assert changed.dtype == "uint32"
    assert (old + changed == new).all()
    assert compute_delta(new, new.copy()) is None
    assert compute_delta(np.array(True), np.array(False)) is None


def test_unchanged_values_are_not_sent():
    same, new, old = np.ones(3, "float32"), np.zeros((2,), "float32"), np.ones((2,), "float32")
    found = compute_deltas(
        ([same, np.array(True), new], [same.copy(), np.array(False), old]), ([same], [same.copy()]), NONE
    )
    assert sorted(found) == ["new/1", "other/2"]
    assert found["new/1"].dtype == bool


def test_workers_learn_of_a_learning_rate_that_a_callback_has_changed():
    model = made(rate=0.5)
    sync = StateSync(model, Mock(), plan_shards(specs_of(model), 1, None), Mock())
    state = state_of(model)
    number = [one is model.optimizer._learning_rate for one in model.optimizer.variables].index(True)
    sync.broadcast([True] * 4, state, 0, 0)
    assert sync.optimizer_scalars[str(number)] == 0.5
    state[2][number] = np.float32(0.1)
    sync.broadcast([False, False, True, False], state, 3, 3)
    assert np.float32(sync.optimizer_scalars[str(number)]) == np.float32(0.1)
    assert all(model.optimizer.variables[int(n)].shape == () for n in sync.optimizer_scalars)
