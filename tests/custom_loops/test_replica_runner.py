"""Custom training loops: ``run``, meetings of replicas, reductions, contexts; on several topologies."""

import contextlib
import dataclasses
import gc
import itertools
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from keras import layers, losses, ops

import lockstep
from lockstep import PerReplica, get_replica_context
from lockstep.custom_loops.per_replica import is_cut, is_per_replica
from tests.support.marks import quick_first, some_of

TOPOLOGIES = [(1, 1), (2, 1), (2, 2), (3, 2), (4, 3), (2, 3)]  # replicas, devices


@pytest.fixture(params=TOPOLOGIES, ids=lambda pair: f"R{pair[0]}P{pair[1]}")
def strategy(request):
    return make(*request.param)


def make(replicas, devices=1, **options):
    return lockstep.MirroredStrategy([f"cpu:{i}" for i in range(devices)], replicas=replicas, **options)


def one_batch(strategy, batch):
    (value,) = strategy.experimental_distribute_dataset([batch])
    return value


def numbers(value):
    return [np.asarray(own).tolist() for own in value.values]


# --- run -----------------------------------------------------------------------------------------------------------------


def test_each_replica_gets_its_rows_and_returns_its_own_value(strategy):
    x = np.arange(7.0, dtype="float32")
    found = strategy.run(lambda rows: {"sum": rows.sum(), "rows": rows * 2}, args=(one_batch(strategy, x),))
    np.testing.assert_allclose(strategy.reduce("SUM", found["sum"], axis=None), x.sum())
    np.testing.assert_array_equal(strategy.gather(found["rows"], axis=0), x * 2)
    if strategy.num_replicas_in_sync == 3:
        assert numbers(found["sum"]) == [3.0, 12.0, 6.0]


def test_what_all_replicas_share_comes_back_as_one_value(strategy):
    def step(rows, weight, power=1):
        context = get_replica_context()
        total = context.all_reduce("SUM", rows.sum())
        return weight - 0.1 * total**power, rows.shape[0]

    x = np.arange(8.0, dtype="float32")
    weight, rows = strategy.run(step, (one_batch(strategy, x),), {"weight": jnp.float32(1), "power": 2})
    assert isinstance(weight, jax.Array)
    np.testing.assert_allclose(weight, 1 - 0.1 * x.sum() ** 2, rtol=1e-6)
    assert sum(map(int, strategy.experimental_local_results(rows))) == 8


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 6, 7, 12])
def test_what_comes_from_shapes_alone_has_one_form_for_every_number_of_rows(strategy, rows):
    def step(rows):
        return rows.shape[0], jnp.asarray([rows.shape[0]]), jnp.ones(()) + rows.shape[0]

    number, array, computed = strategy.run(step, args=(one_batch(strategy, np.ones(rows, "float32")),))
    assert int(strategy.reduce("SUM", number, axis=None)) == rows
    assert strategy.gather(array, axis=0).tolist() == numbers(number)
    assert float(strategy.reduce("SUM", computed, axis=None)) == rows + strategy.num_replicas_in_sync


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, lambda f: lambda w: lax.cond(w[0] > 0, f, f, w)])
def test_a_call_with_an_array_that_depends_on_the_rows_has_a_value_for_each_replica(transform):
    def step(rows, weight):
        scale = np.full(2, rows.shape[0], "float32")
        return transform(lambda w: w * scale)(weight)

    found = make(2, 2).run(step, args=(one_batch(make(2, 2), np.ones(5, "float32")), np.ones(2, "float32")))
    assert numbers(found) == [[3.0, 3.0], [2.0, 2.0]]


def test_arguments_that_are_no_arrays_reach_the_function_as_they_are():
    def step(rows, how, nothing):
        assert nothing is None
        return getattr(jnp, how)(rows)

    strategy = make(2)
    batch = one_batch(strategy, np.asarray([1.0, 2.0, 5.0, 7.0]))
    assert numbers(strategy.run(step, (batch, "max", None))) == [2.0, 7.0]
    assert numbers(strategy.run(step, (batch, "min", None))) == [1.0, 5.0]


def test_a_function_is_traced_once_for_arguments_of_one_kind():
    traces = []

    def step(rows, weight):
        traces.append(rows.shape)
        return (rows * weight).sum()

    strategy = make(2, 2)
    for start in range(3):
        strategy.run(step, (one_batch(strategy, np.arange(start, start + 4.0)), jnp.float32(start)))
    assert traces == [(2,)]


class Owner:
    """Has what a function reads, and such a function; it has no hash."""

    def __init__(self):
        self.variable, self.traces = keras.Variable([1.0, 2.0]), 0

    def __eq__(self, other):
        return True

    def step(self, rows):
        self.traces += 1
        return rows.sum() + self.variable

    __call__ = step


class Fixed(NamedTuple):
    """Without weak references."""

    traces: list

    def step(self, rows):
        self.traces.append(rows.shape)
        return rows.sum()


@pytest.mark.parametrize("made", [Owner, lambda: Fixed([])], ids=["object", "tuple"])
def test_a_bound_method_is_traced_once_for_each_object(made):
    strategy = make(2, 2)
    batch = one_batch(strategy, np.arange(4.0))
    for owner in made(), made():
        strategy.run(owner.step, (batch,))
        count = owner.traces if isinstance(owner, Owner) else len(owner.traces)
        assert count
        strategy.run(owner.step, (batch,))
        assert count == (owner.traces if isinstance(owner, Owner) else len(owner.traces))


@pytest.mark.slow
@pytest.mark.parametrize(
    "function_of",
    [lambda owner: lambda rows: owner.step(rows), lambda owner: owner.step, lambda owner: owner],
    ids=["function", "method", "object"],
)
def test_what_a_function_has_read_is_freed_with_it(function_of):
    strategy, owner = make(2, 2), Owner()
    freed = [weakref.ref(owner), weakref.ref(owner.variable)]
    strategy.run(function_of(owner), (one_batch(strategy, np.arange(4.0)),))
    del owner
    gc.collect()
    assert [ref() for ref in freed] == [None, None]


@dataclasses.dataclass(frozen=True)
class Multiply:
    """Equal to others of the same factor."""

    factor: float

    def __call__(self, rows):
        FACTORS.append(self.factor)
        return self.factor * rows.sum()


FACTORS = []


@pytest.mark.slow
def test_equal_objects_share_a_program():
    strategy, batch = make(2, 2), np.arange(4.0)
    FACTORS.clear()
    for factor in (2.0, 2.0, 3.0, 2.0):
        strategy.run(Multiply(factor), (one_batch(strategy, batch),))
        gc.collect()
    assert FACTORS in ([2.0, 3.0], [2.0, 2.0, 3.0, 3.0])  # Once for each kind of replicas.


def test_a_model_that_a_function_calls_is_freed_with_it():
    strategy = make(2, 2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dropout(0.5), layers.Dense(2)])
    freed = weakref.ref(model)
    strategy.run(lambda rows, own=model: own(rows), (one_batch(strategy, np.ones((4, 3), "float32")),))
    del model
    gc.collect()
    assert freed() is None


def test_it_becomes_part_of_a_step_that_the_user_compiles(strategy):
    @jax.jit
    def step(batch, weight):
        per_replica = strategy.run(lambda rows: (rows * weight).sum(), args=(batch,))
        return strategy.reduce("SUM", per_replica, axis=None)

    x = np.arange(7.0, dtype="float32")
    np.testing.assert_allclose(step(one_batch(strategy, x), 2.0), 2 * x.sum())


# --- meetings ---------------------------------------------------------------------------------------------------------------


def test_sum_mean_gather_and_merge_call(strategy):
    def step(rows):
        context = get_replica_context()
        merged = context.merge_call(lambda strategy, value: strategy.reduce("SUM", value, axis=0), args=(rows,))
        own = context.merge_call(lambda _, number: number, args=(context.replica_id_in_sync_group,))
        return {
            "mean": context.all_reduce("MEAN", rows.sum()),
            "gathered": context.all_gather(rows, axis=0),
            "twice": context.all_gather(context.all_gather(rows, axis=0)[None], axis=0),
            "merged": merged,
            "own": own + 0,
        }

    x = np.arange(14.0, dtype="float32").reshape(7, 2)
    found = strategy.run(step, args=(one_batch(strategy, x),))
    replicas = strategy.num_replicas_in_sync
    np.testing.assert_allclose(found["mean"], x.sum() / replicas)
    np.testing.assert_array_equal(found["gathered"], x)
    np.testing.assert_array_equal(found["twice"], np.stack([x] * replicas))
    np.testing.assert_allclose(found["merged"], x.sum(axis=0))
    assert numbers(found["own"]) == list(range(replicas))


def test_sync_points_can_be_differentiated(strategy):
    """The gradient of a sum over replicas is the sum of the replicas' gradients."""
    replicas = strategy.num_replicas_in_sync

    def step(rows):
        context = get_replica_context()
        of_sum = jax.grad(lambda rows: context.all_reduce("SUM", (rows**2).sum()))(rows)
        of_mean = jax.grad(lambda rows: context.all_reduce("MEAN", (rows**2).sum()))(rows)
        of_gather = jax.grad(lambda rows: (context.all_gather(rows, axis=0) ** 2).sum())(rows)
        return of_sum, of_mean, of_gather

    x = np.arange(1, 8.0, dtype="float32")
    found = [strategy.gather(value, axis=0) for value in strategy.run(step, args=(one_batch(strategy, x),))]
    np.testing.assert_allclose(found[0], 2 * x * replicas)
    np.testing.assert_allclose(found[1], 2 * x)
    np.testing.assert_allclose(found[2], 2 * x * replicas)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float16", "bool"])
def test_sums_keep_their_dtype(dtype):
    for strategy in (make(2, 1), make(2, 2), make(3, 2)):
        batch = one_batch(strategy, np.ones(6, dtype))
        found = strategy.run(lambda rows: get_replica_context().all_reduce("SUM", rows[0]), (batch,))
        assert str(found.dtype) == ("int32" if dtype == "bool" else dtype)
        assert float(found) == strategy.num_replicas_in_sync


def test_the_strategys_own_operation_adds_between_devices():
    called = []

    def noted(array, axis):
        called.append(array.shape)
        return lax.psum(array, axis)

    strategy = make(2, 2, cross_device_ops=noted)
    batch = one_batch(strategy, np.ones((4, 3), "float32"))
    strategy.run(lambda rows: get_replica_context().all_reduce("SUM", rows.sum(axis=0)), (batch,))
    assert called == [(3,)]


def bad_scan(context, rows):
    return lax.scan(lambda carry, _: (context.all_reduce("SUM", carry), None), rows.sum(), None, length=2)[0]


def bad_vmap(context, rows):
    return jax.vmap(lambda row: context.all_reduce("SUM", row))(rows)


def bad_shapes(context, rows):
    return context.all_reduce("SUM", rows)


def bad_order(context, rows):
    return context.all_reduce("SUM" if rows.shape[0] == 4 else "MEAN", rows.sum())


def bad_derivative(context, rows):
    return jax.grad(lambda rows: context.merge_call(lambda strategy, x: strategy.reduce("SUM", x, axis=0), (rows,)))(
        rows
    )


@pytest.mark.parametrize(
    ("step", "error", "says"),
    [
        (bad_scan, lockstep.ModelError, "cannot sync inside jax.lax.scan"),
        (bad_vmap, lockstep.ModelError, "cannot be used inside jax.vmap"),
        (bad_shapes, lockstep.InputError, "different shapes"),
        (bad_order, lockstep.ModelError, "do not sync in the same order"),
        (bad_derivative, lockstep.ModelError, "merge_call cannot be differentiated"),
        (lambda context, rows: context.all_reduce("MAX", rows), lockstep.OptionError, "reduce_op"),
        (lambda context, rows: context.all_gather(rows.sum(), axis=0), lockstep.InputError, "axis 0 is not one"),
        (
            lambda context, rows: context.strategy.run(lambda: 0),
            lockstep.ScopeError,
            "strategy.run was called by a function",
        ),
        (lambda context, rows: context.strategy.reduce("SUM", rows, axis=None), lockstep.ScopeError, "strategy.reduce"),
    ],
)
def test_run_refuses_what_replicas_cannot_do(step, error, says):
    strategy = make(2)
    batch = one_batch(strategy, np.ones(7, "float32"))
    with pytest.raises(error, match=says):
        strategy.run(lambda rows: step(get_replica_context(), rows), args=(batch,))


@pytest.mark.parametrize(
    "use",
    [
        lambda context: context.all_reduce("SUM", np.ones(3)),
        lambda context: context.all_gather(np.ones(3), axis=0),
        lambda context: context.merge_call(lambda strategy, x: x, args=(np.ones(3),)),
    ],
)
def test_a_replica_that_is_not_running_cannot_sync(use):
    strategy, kept = make(2), []
    batch = one_batch(strategy, np.ones(7, "float32"))
    strategy.run(lambda rows: kept.append(get_replica_context()) or rows, args=(batch,))
    with pytest.raises(lockstep.ScopeError, match="while its replica is not running"):
        use(kept[0])
    with pytest.raises(lockstep.ScopeError, match="while its replica is not running"):
        strategy.run(
            lambda rows: get_replica_context().merge_call(
                lambda _, x, own: use(own), args=(rows, get_replica_context())
            ),
            args=(batch,),
        )


# --- reduce, gather, local results ------------------------------------------------------------------------------------------


def test_reduce_follows_tf_distribute():
    strategy = make(2)
    (value,) = strategy.distribute_datasets_from_function(lambda _: [np.asarray([1.0, 2.0, 3.0]), np.asarray([10.0])])
    assert float(strategy.reduce("MEAN", value, axis=0)) == 4.0  # by the true number of rows
    assert float(strategy.reduce(lockstep.ReduceOp.SUM, value, axis=0)) == 16.0
    with pytest.raises(lockstep.InputError, match=r"different shapes \(\(1,\), \(3,\)\)"):
        strategy.reduce("SUM", value, axis=None)
    with pytest.raises(lockstep.OptionError, match="one value and not one for each replica"):
        strategy.reduce("SUM", 1.0, axis=None)
    assert float(strategy.reduce("MEAN", 1.5, axis=None)) == 1.5
    with pytest.raises(lockstep.OptionError, match="reduce_op"):
        strategy.reduce("MAX", value, axis=0)
    with pytest.raises(
        lockstep.InputError, match=r"axis 1 is not one of a value of shape \(3,\)\. Fix: count axes from 0"
    ):
        strategy.reduce("SUM", value, axis=1)


def test_a_function_of_numbers_without_rows_is_refused():
    dataset = make(2).distribute_datasets_from_function(lambda context: [1.0, 2.0, 3.0])
    with pytest.raises(lockstep.InputError, match=r"expected batches of arrays with rows.* got the number 1\.0"):
        next(iter(dataset))


def test_gather_refuses_values_that_differ_elsewhere():
    strategy = make(2)
    value = one_batch(strategy, np.ones((3, 4)))  # of two rows, and of one
    assert strategy.gather(value, axis=0).shape == (3, 4)
    with pytest.raises(
        lockstep.InputError, match=r"may differ along axis 1 only, and have the shapes \[2, 4\], \[1, 4\]"
    ):
        strategy.gather(value, axis=1)


def test_local_results_are_there_while_a_function_is_traced(strategy):
    value = one_batch(strategy, {"x": np.arange(7.0)})

    @jax.jit
    def sums(value):
        return [own["x"].sum() for own in strategy.experimental_local_results(value)]

    expected = [own["x"].sum() for own in strategy.experimental_local_results(value)]
    np.testing.assert_allclose(sums(value), expected)


def test_reduce_and_gather_keep_trees(strategy):
    x = np.arange(12.0, dtype="float32").reshape(6, 2)
    value = one_batch(strategy, {"a": x, "b": (x[:, 0],)})
    total = strategy.reduce("MEAN", value, axis=0)
    np.testing.assert_allclose(total["a"], x.mean(axis=0))
    np.testing.assert_allclose(total["b"][0], x[:, 0].mean())
    np.testing.assert_array_equal(strategy.gather(value, axis=0)["a"], x)
    np.testing.assert_array_equal(strategy.gather(np.ones((2, 1)), axis=1), np.ones((2, 1)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_mean_of_many_numbers_of_16_bits_is_that_of_numpy_in_32(strategy, dtype):
    x = jnp.asarray(np.random.default_rng(0).random(70_000), dtype)
    found = strategy.reduce("MEAN", one_batch(strategy, x), axis=0)
    assert found.dtype == x.dtype
    assert float(found) == float(jnp.asarray(np.asarray(x, "float32").mean(), dtype))
    large = strategy.experimental_distribute_values_from_function(lambda _: jnp.asarray(60_000.0, dtype))
    in_replicas = strategy.run(lambda value: get_replica_context().all_reduce("MEAN", value), (large,))
    for mean in (strategy.reduce("MEAN", large, axis=None), in_replicas):
        assert mean.dtype == x.dtype
        assert float(mean) == float(jnp.asarray(60_000.0, dtype))


def test_reduce_over_another_axis_and_of_a_shared_value():
    strategy = make(2)
    x = np.arange(12.0, dtype="float32").reshape(4, 3)
    np.testing.assert_allclose(strategy.reduce("SUM", one_batch(strategy, x), axis=1), (x[:2] + x[2:]).sum(axis=1))
    assert float(strategy.reduce("MEAN", np.asarray([1.0, 3.0]), axis=0)) == 2.0


def test_local_results():
    strategy = make(2)
    value = strategy.experimental_distribute_values_from_function(
        lambda context: {"id": context.replica_id_in_sync_group, "of": np.ones(context.num_replicas_in_sync)}
    )
    assert [int(one["id"]) for one in strategy.experimental_local_results(value)] == [0, 1]
    assert strategy.experimental_local_results(3.0) == (3.0,)
    assert repr(value["id"]).startswith("PerReplica(0: 0, 1: 1")


# --- contexts --------------------------------------------------------------------------------------------------------------------


def test_context_functions_return_the_current_context():
    strategy = make(2)
    seen = []

    def note(where):
        context = get_replica_context()
        seen.append(
            (
                where,
                lockstep.get_strategy(),
                lockstep.has_strategy(),
                lockstep.in_cross_replica_context(),
                context is None,
            )
        )

    def step():
        note("replica")
        get_replica_context().merge_call(lambda _: note("merge") or 0)
        return 0

    note("outside")
    with strategy.scope():
        note("scope")
        strategy.run(step)
    alone = lockstep.get_strategy()
    assert alone.cluster_resolver is None
    assert [(where, one is strategy, has, cross, none) for where, one, has, cross, none in dict.fromkeys(seen)] == [
        ("outside", False, False, False, False),
        ("scope", True, True, True, True),
        ("replica", True, True, False, False),
        ("merge", True, True, True, True),
    ]
    assert alone.num_replicas_in_sync == 1
    assert float(alone.run(lambda x: get_replica_context().all_reduce("SUM", x), (2.0,))) == 2.0
    assert get_replica_context().all_reduce("SUM", 5) == 5
    with alone.scope():
        assert not lockstep.has_strategy()


def test_a_deterministic_strategy_refuses():
    with pytest.raises(lockstep.OptionError, match=r"does not support deterministic=True"):
        make(2, deterministic=True).run(lambda: 0)


def test_arguments_need_a_tuple():
    with pytest.raises(lockstep.OptionError, match=r"write args=\(value,\)"):
        make(2).run(lambda x: x, args=np.ones(2))


# --- training ----------------------------------------------------------------------------------------------------------------------


def net():
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(3)])


def net_with_state():
    inner = [layers.Dense(8, activation="tanh"), layers.BatchNormalization(), layers.Dropout(0.4)]
    return keras.Sequential([keras.Input((6,)), *inner, layers.Dense(3)])


# Rows of all, and of a batch. With 21 all batches have one shape, which is uneven for two replicas and more; with 17 the last
# batch has one row, and all replicas but one have none.
BATCH = {21: 7, 17: 8}
EPSILON = 1e-3  # With Adam's own, gradients that are nothing but rounding make steps as long as others.


def by_hand(strategy, build, x, y):
    """Train as ``fit`` does, in a loop over three batches, twice."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
        optimizer = keras.optimizers.Adam(0.05, epsilon=EPSILON)
        optimizer.build(model.trainable_variables)
    size = BATCH[len(x)]
    batches = [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]
    dataset = strategy.experimental_distribute_dataset(batches)

    def replica_step(trainable, non_trainable, rows, x, y):
        def loss(trainable):
            logits, state = model.stateless_call(trainable, non_trainable, x, training=True)
            each = losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            return lockstep.compute_average_loss(each, global_batch_size=rows), state

        (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
        return *get_replica_context().all_reduce("SUM", (value, gradients)), state

    @jax.jit
    def step(trainable, non_trainable, variables, batch):
        x, y = batch
        rows = sum(array.shape[0] * array.shape[1] for array in y.groups)
        value, gradients, state = strategy.run(replica_step, (trainable, non_trainable, rows, x, y))
        trainable, variables = optimizer.stateless_apply(variables, gradients, trainable)
        return value, trainable, state, variables

    values = [
        [v.value for v in kind]
        for kind in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    ]
    logs = []
    for _ in range(2):
        for batch in dataset:
            value, *values = step(*values, batch)
            logs.append(float(value))
    return logs, [np.asarray(value) for value in values[0] + values[1]]


def by_fit(strategy, build, x, y):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
    model.compile(keras.optimizers.Adam(0.05, epsilon=EPSILON), losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=BATCH[len(x)], epochs=2, shuffle=False, verbose=0)
    return [np.asarray(variable.value) for variable in (*model.trainable_variables, *model.non_trainable_variables)]


# The larger net on even and uneven last batches, one and several replicas of a device; the nightly set has the whole product.
LOOPS = [
    ((2, 2), 21, net_with_state),
    ((3, 2), 17, net_with_state),
    ((1, 1), 17, net),
    ((4, 3), 21, net),
    ((4, 2), 17, net),
]


@pytest.mark.parametrize(
    ("topology", "rows", "build"),
    quick_first(some_of(LOOPS, [(2, 2), (1, 1), (3, 2), (4, 3), (4, 2)], BATCH, [net_with_state, net])),
)
def test_a_loop_by_hand_gives_what_fit_gives(topology, rows, build):
    """Law 1 for loops, with the noise, the statistics and the seeds of fit."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 6)).astype("float32"), rng.integers(0, 3, rows)
    logs, values = by_hand(make(*topology), build, x, y)
    expected = by_fit(make(*topology), build, x, y)
    assert sum(logs[3:]) < sum(logs[:3])  # in the second epoch, and in the first
    for ours, theirs in zip(values, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_each_replica_draws_its_own_noise_and_one_seed_is_kept():
    strategy = make(3, 2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((50,)), layers.Dropout(0.5, seed=1)])
    seeds = [variable.value for variable in model.non_trainable_variables]

    def step(x):
        return model.stateless_call([], seeds, x, training=True)

    outputs, state = strategy.run(step, (one_batch(strategy, np.ones((6, 50), "float32")),))
    masks = [np.asarray(own)[0] for own in outputs.values]
    assert not any(np.array_equal(a, b) for a, b in ((masks[0], masks[1]), (masks[1], masks[2]), (masks[0], masks[2])))
    plain, kept = keras.Sequential([keras.Input((50,)), layers.Dropout(0.5, seed=1)]).stateless_call(
        [], seeds, np.ones((2, 50), "float32"), training=True
    )
    np.testing.assert_array_equal(masks[0], np.asarray(plain)[0])  # replica 0 draws what one device draws
    np.testing.assert_array_equal(np.asarray(state[0]), np.asarray(kept[0]))
    assert isinstance(state[0], jax.Array)
    assert "stateless_call" not in vars(model)


class Keeps(layers.Layer):
    """Keeps what a function computes of its rows in a variable."""

    def __init__(self, compute, dtype="float32", aggregation=None):
        super().__init__()
        self.compute, self.options = compute, {"dtype": dtype, "aggregation": aggregation}

    def build(self, shape):
        self.kept = self.add_weight(shape=(), initializer="ones", trainable=False, autocast=False, **self.options)

    def call(self, x, training=False):
        if training:
            self.kept.assign(self.kept + ops.cast(self.compute(x), self.kept.dtype))
        return x


def rows_of(x):
    return ops.shape(x)[0]


def one_of(x):
    return 1


KEPT = [
    *itertools.product([ops.mean, one_of], ["float32"], [None, "mean", "sum", "only_first_replica"]),
    *itertools.product([rows_of, ops.max], ["float32", "int32"], ["sum", "only_first_replica"]),
    *itertools.product([one_of], ["int32"], [None, "mean"]),
]
REFUSED = [
    *itertools.product([rows_of, ops.sum, ops.max, ops.var], ["float32"], [None]),
    *itertools.product([rows_of, ops.mean], ["int32"], [None, "mean"]),
]


def kept_by_run(compute, dtype, aggregation, replicas=2, **call):
    """Return what a layer keeps of 5 rows, the model, and the rows."""
    strategy = make(replicas)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Keeps(compute, dtype, aggregation)])
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")

    def step(state, x):
        return model.stateless_call([], state, x, training=True, **call)[1]

    state = [variable.value for variable in model.non_trainable_variables]
    return strategy.run(step, (state, one_batch(strategy, x)))[0], model, x


@pytest.mark.parametrize(
    ("compute", "dtype", "aggregation", "replicas"),
    [*((*case, 2) for case in KEPT), (ops.max, "float32", None, 1), (rows_of, "int32", "mean", 1)],
)
def test_a_layer_keeps_what_fit_keeps(compute, dtype, aggregation, replicas):
    kept, model, x = kept_by_run(compute, dtype, aggregation, replicas)
    model.compile(loss="mse")
    model.fit(x, x, batch_size=5, shuffle=False, verbose=0)
    np.testing.assert_allclose(np.asarray(kept), np.asarray(model.layers[0].kept.value), rtol=1e-6)


@pytest.mark.parametrize(("compute", "dtype", "aggregation"), REFUSED)
def test_a_layer_that_needs_the_global_batch_needs_an_aggregation(compute, dtype, aggregation):
    with pytest.raises(
        lockstep.ModelError,
        match=r"keeps values that differ between replicas: variable 'sequential.*\. Fix: make the variable",
    ):
        kept_by_run(compute, dtype, aggregation, return_losses=True)


class OfTwoRows(layers.Layer):
    """Takes two rows only, and has a constant."""

    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x, training=False):
        return ops.reshape(x, (2, 3)) * self.factor


def test_a_layer_whose_state_stays_needs_no_aggregation():
    strategy = make(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), OfTwoRows()])
    state = [variable.value for variable in model.non_trainable_variables]
    x = np.ones((4, 3), "float32")

    def step(state, x):
        return model.stateless_call([], state, x, training=True)[1]

    assert strategy.run(step, (state, one_batch(strategy, x))) == [1]


class Adds(layers.Layer):
    """Adds losses with the functions for loops."""

    def call(self, x):
        self.add_loss(lockstep.scale_regularization_loss(2.0))
        self.add_loss(lockstep.compute_average_loss(ops.sum(x**2, axis=-1)))
        return x


def average(y, predicted):
    return lockstep.compute_average_loss(ops.sum((y - predicted) ** 2, axis=-1))


def average_of_twelve(y, predicted):
    return lockstep.compute_average_loss(ops.sum((y - predicted) ** 2, axis=-1), global_batch_size=12)


@pytest.mark.parametrize(
    ("options", "loss", "is_inside"),
    quick_first(
        some_of(
            [
                ({}, average, True),
                ({}, average_of_twelve, False),
                ({"run_eagerly": True}, average, False),
                ({"jit_compile": False}, average_of_twelve, True),
            ],
            [{}, {"run_eagerly": True}, {"jit_compile": False}],
            [average, average_of_twelve],
            [True, False],
        )
    ),
)
def test_within_fit_functions_for_losses_give_what_they_give_on_one_device(options, loss, is_inside):
    # Batches of 12 and 9 rows; where each operation is compiled alone, of 11, which is uneven for three replicas.
    rows, size = (22, 11) if options else (21, 12)
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")
    found = []
    for strategy in (None, lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=3)):
        scope = strategy.scope() if strategy else contextlib.nullcontext()
        with contextlib.ExitStack() as stack:
            keras.utils.set_random_seed(0)
            with scope:
                model = keras.Sequential([keras.Input((3,)), Adds(), layers.Dense(2)])
                model.compile("sgd", loss, **options)
            if is_inside and strategy:
                stack.enter_context(strategy.scope())
            logs = model.fit(x, x[:, :2], batch_size=size, epochs=2, shuffle=False, verbose=0).history["loss"]
            logs += [model.evaluate(x, x[:, :2], batch_size=size, verbose=0)]
            logs += [float(model.train_on_batch(x[:size], x[:size, :2]))]
        found.append((logs, model.get_weights()))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [0, -1, 10.5, np.float32(8), np.ones(2, int), True])
def test_average_loss_refuses_what_is_no_number_of_rows(rows):
    with pytest.raises(lockstep.InputError, match="expected global_batch_size as a whole number of rows"):
        lockstep.compute_average_loss(jnp.ones(2), global_batch_size=rows)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_the_average_of_many_losses_of_few_bits_is_that_of_numpy_in_32(dtype):
    average = lockstep.compute_average_loss(jnp.full(2048, 100, dtype), global_batch_size=2048)
    assert (float(average), average.dtype) == (100.0, "float32" if dtype == "int8" else dtype)


def test_without_a_strategy_data_sets_come_to_the_only_replica():
    strategy, batches = lockstep.get_strategy(), [np.arange(3.0), np.arange(2.0)]
    seen = []
    own = strategy.distribute_datasets_from_function(lambda context: seen.append(context) or batches)
    assert seen == [lockstep.InputContext()]
    for dataset in (strategy.experimental_distribute_dataset(batches), own):
        sums = [strategy.reduce("SUM", strategy.run(lambda x: x.sum(), (batch,)), axis=None) for batch in dataset]
        assert [float(value) for value in sums] == [3.0, 1.0]


def test_average_loss_and_regularization():
    each = jnp.asarray([1.0, 3.0])
    assert float(lockstep.compute_average_loss(each)) == 2.0
    assert float(lockstep.compute_average_loss(each, sample_weight=[1.0, 0.0])) == 0.5
    with make(4).scope():
        assert float(lockstep.compute_average_loss(each)) == 0.5
        assert float(lockstep.scale_regularization_loss([jnp.asarray([1.0, 2.0]), 1.0])) == 1.0
    found = make(2).run(lambda: lockstep.scale_regularization_loss(3.0))
    assert float(make(2).reduce("SUM", found, axis=None)) == 3.0
    with pytest.raises(lockstep.InputError, match="a loss for each row"):
        lockstep.compute_average_loss(2.0)


@pytest.mark.parametrize(
    ("shape", "expected"), [((), 20.0), ((4,), 30.0), ((4, 1), 30.0), ((4, 5), 30.0), ((4, 5, 1), 30.0)]
)
def test_weights_of_rows_may_have_an_axis_of_length_1_at_the_end(shape, expected):
    rows = jnp.arange(4.0).reshape((4,) + (1,) * (len(shape) - 1)) if shape else 1.0
    found = lockstep.compute_average_loss(jnp.ones((4, 5)), jnp.broadcast_to(rows, shape), global_batch_size=1)
    assert float(found) == expected


@pytest.mark.parametrize("shape", [(1,), (3, 1), (4, 2), (1, 5), (4, 1, 1)])
def test_weights_of_another_shape_than_the_losses_are_refused(shape):
    with pytest.raises(
        lockstep.InputError, match=r"sample_weight has the shape .* and the losses have \(4, 5\). Fix: "
    ):
        lockstep.compute_average_loss(jnp.ones((4, 5)), jnp.ones(shape))


def test_values_of_replicas_are_a_tree_for_jax():
    strategy = make(3)
    value = one_batch(strategy, np.arange(7.0))
    doubled = jax.jit(lambda value: jax.tree.map(lambda x: 2 * x, value))(value)
    assert isinstance(doubled, PerReplica)
    assert numbers(doubled) == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0], [12.0]]


def test_a_copy_on_the_host_is_used_as_the_value_itself():
    strategy = make(3)
    value = one_batch(strategy, np.arange(7.0))
    assert str(jax.tree.map(np.shape, value)).startswith("PerReplica(groups=")  # JAX's trees may hold anything.
    copied = jax.device_get(value)
    assert repr(copied) == repr(value)
    for own, expected in zip(
        strategy.experimental_local_results(copied), strategy.experimental_local_results(value), strict=True
    ):
        np.testing.assert_array_equal(own, expected)


def test_a_scope_can_be_entered_again_and_within_itself():
    scope = make(2).scope()
    for _ in range(2):
        with scope as outer, scope as inner:
            assert inner is outer is lockstep.get_strategy()
        assert not lockstep.has_strategy()
    with pytest.raises(KeyError), scope:
        raise KeyError
    assert not lockstep.has_strategy()
    assert scope(lockstep.get_strategy)() is outer
    plain = lockstep.get_strategy()
    assert plain is not outer
    with plain.scope() as own:
        assert own is plain


@pytest.mark.parametrize("method", ["checkpoint", "doctor", "self_check"])
def test_without_a_strategy_methods_of_strategies_are_refused(method):
    with pytest.raises(lockstep.ScopeError, match=rf"get_strategy\(\)\.{method}: no scope .* is open"):
        getattr(lockstep.get_strategy(), method)("x")


def test_the_default_strategy_has_the_properties_of_strategies():
    plain = lockstep.get_strategy()
    assert (plain.devices, plain.deterministic) == (("cpu:0",), False)
    assert isinstance(plain.cross_device_ops, lockstep.AutoAllReduce)


@pytest.mark.parametrize("method", ["train_on_batch", "test_on_batch", "predict_on_batch"])
def test_values_of_replicas_are_no_batch_of_a_model(method):
    strategy = make(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    (batch,) = strategy.experimental_distribute_dataset([np.ones((4, 1), "float32")])
    with pytest.raises(lockstep.InputError, match=f"{method}: x: expected arrays .* got a PerReplica"):
        getattr(model, method)(batch)


def test_a_keras_variable_stands_for_its_value():
    strategy = make(2)
    variable = keras.Variable([1.0, 2.0])

    def step(rows, own):
        return own * rows.sum(), get_replica_context().merge_call(lambda _, value: value, (own,))

    found, merged = strategy.run(step, (one_batch(strategy, np.ones(3, "float32")), variable))
    assert numbers(found) == [[2.0, 4.0], [1.0, 2.0]]
    assert np.asarray(merged).tolist() == [1.0, 2.0]
    variable.assign([0.0, 0.0])
    assert not np.asarray(strategy.run(lambda own: own * 2, (variable,))).any()


def test_a_variable_that_a_function_reads_has_its_newest_value(strategy):
    first, second, traced = keras.Variable([1.0, 2.0]), keras.Variable(3.0), []

    def step(rows):
        traced.append(rows.shape)
        return get_replica_context().all_reduce("SUM", rows.sum()) + first * second

    batch = one_batch(strategy, np.ones(4 * strategy.num_replicas_in_sync, "float32"))
    total = 4 * strategy.num_replicas_in_sync
    assert np.asarray(strategy.run(step, (batch,))).tolist() == [total + 3, total + 6]
    count = len(traced)
    first.assign([0.0, 1.0])
    second.assign(5.0)
    assert np.asarray(strategy.run(step, (batch,))).tolist() == [total, total + 5]
    assert len(traced) == count  # The values are arguments of the compiled program.


def test_half_precision_is_for_gradients_and_not_for_statistics():
    strategy = make(2, 2, cross_device_ops=lockstep.HalfPrecisionAllReduce("bfloat16"))
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), layers.BatchNormalization(momentum=0.99)])
    weights, state = ([v.value for v in kind] for kind in (model.trainable_variables, model.non_trainable_variables))
    batch = one_batch(strategy, np.full((602, 1), 1.001, "float32"))

    @jax.jit
    def step(state, batch):
        return strategy.run(lambda state, x: model.stateless_call(weights, state, x, training=True)[1], (state, batch))

    for _ in range(3):
        state = step(state, batch)
    np.testing.assert_allclose(np.asarray(state[0]), 1.001 * (1 - 0.99**3), rtol=1e-5)


@pytest.mark.parametrize("value", [np.int32([3, 4]), np.array([True, False])], ids=["int", "bool"])
def test_the_mean_of_a_shared_value_is_a_floating_point_number(value):
    found = make(2).reduce("MEAN", value, axis=None)
    assert found.dtype == "float32"
    np.testing.assert_array_equal(found, value)


def test_joined_arrays_are_exact_whatever_adds_gradients():
    strategy = make(2, 2, cross_device_ops=lockstep.HalfPrecisionAllReduce())
    x = np.float32([257, 258.5, 100_001, 3])
    found = strategy.run(lambda rows: get_replica_context().all_gather(rows, axis=0), args=(one_batch(strategy, x),))
    np.testing.assert_array_equal(found, x)


def test_an_uneven_batch_takes_no_longer_for_a_long_function_of_shared_values():
    """How shared values were computed was compared as a tree, whose size is 2 to the power of this depth."""
    strategy = make(2, 2)

    def step(rows, weight):
        for _ in range(64):
            weight = weight * jnp.tanh(weight)
        return rows.sum() * weight, weight

    _, weight = strategy.run(step, args=(one_batch(strategy, np.arange(3.0, dtype="float32")), jnp.float32(0.5)))
    assert isinstance(weight, jax.Array)


def test_what_all_replicas_share_can_be_printed(capfd):
    def step(rows):
        total = get_replica_context().all_reduce("SUM", rows.sum())
        jax.debug.print("the sum is {total}", total=total)
        return total

    strategy = make(2)
    assert float(strategy.run(step, (one_batch(strategy, np.arange(4.0)),))) == 6.0
    jax.effects_barrier()
    assert "the sum is 6.0" in capfd.readouterr().out


def test_local_results_of_a_mesh_are_whole():
    strategy = lockstep.ModelParallelStrategy({"data": 1, "model": 2}, {}, devices=["cpu:0", "cpu:1"])
    columns = jax.sharding.NamedSharding(strategy._placement.mesh, jax.sharding.PartitionSpec(None, "model"))
    weights = jax.device_put(np.arange(8.0, dtype="float32").reshape(2, 4), columns)
    step = jax.jit(lambda rows, weights: strategy.run(lambda rows, w: rows @ w, (rows, weights)))
    result = step(one_batch(strategy, np.eye(2, dtype="float32")), weights)
    assert is_cut(result.groups[0])
    (found,) = strategy.experimental_local_results(result)
    np.testing.assert_array_equal(found, weights)


def test_texts_reach_a_function_that_merges():
    strategy = make(3)

    def merged(rows, how):
        merge = lambda strategy, how, value: strategy.reduce(how, value, axis=None)  # noqa: E731
        return get_replica_context().merge_call(merge, (how, rows.sum()))

    batch = one_batch(strategy, np.arange(6.0))
    assert [float(strategy.run(merged, (batch, how))) for how in ("SUM", lockstep.ReduceOp.MEAN)] == [15.0, 5.0]
    uneven = one_batch(strategy, np.arange(5.0))
    with pytest.raises(lockstep.ModelError, match=r"merge_call of \['1 rows'\]"):
        strategy.run(
            lambda x: get_replica_context().merge_call(lambda _, name, x: x, (f"{len(x)} rows", x.sum())),
            (uneven,),
        )


def test_a_model_made_outside_the_scope_is_called_as_one_of_the_strategy():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), layers.Dropout(0.5), layers.BatchNormalization(scale=False)])
    values = [
        [variable.value for variable in kind] for kind in (model.trainable_variables, model.non_trainable_variables)
    ]
    strategy = make(2)
    step = lambda x: model.stateless_call(*values, x, training=True)  # noqa: E731
    outputs, state = strategy.run(step, (one_batch(strategy, np.random.default_rng(0).normal(size=(4, 8))),))
    first, second = (np.asarray(own) == 0 for own in outputs.values)
    assert (first != second).any()
    assert not any(map(is_per_replica, state))


class OfLists(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(keras.ops.convert_to_tensor(x))


def test_a_model_may_be_called_with_lists_of_numbers():
    strategy, rows = make(2), [[1.0, 2.0, 3.0]]
    with strategy.scope():
        model = OfLists()
        expected = model(np.array(rows, "float32"))
    values = [variable.value for variable in model.trainable_variables]
    outputs, _ = strategy.run(lambda values: model.stateless_call(values, [], rows), (values,))
    for own in strategy.experimental_local_results(outputs):
        np.testing.assert_allclose(own, expected, rtol=1e-6)


@pytest.mark.parametrize("rows", [6, 5, 4, 2])
def test_a_function_that_merges_sees_the_shapes_of_all_replicas(rows):
    strategy = make(3)

    def step(own):
        everything = get_replica_context().merge_call(lambda strategy, x: strategy.gather(x, axis=0), (own,))
        return everything.mean() + 0 * own.sum(), get_replica_context().merge_call(lambda _, x: x, (own,))

    batch = one_batch(strategy, np.arange(float(rows)))
    means, values = strategy.run(step, (batch,))
    assert [float(own) for own in means.values] == [(rows - 1) / 2] * 3
    assert numbers(values) == numbers(batch)


def test_a_function_that_merges_may_be_made_on_each_replica():
    strategy = make(2)

    def step(own):
        twice = lambda x: 2 * x  # noqa: E731  # another object in the trace of each group of replicas
        merge = lambda strategy, f, x: f(strategy.reduce("SUM", x, axis=None))  # noqa: E731
        return get_replica_context().merge_call(merge, (twice, own.sum()))

    assert float(strategy.run(step, (one_batch(strategy, np.arange(3.0)),))) == 6


def test_a_merge_whose_shape_needs_a_value_of_each_replica_is_refused():
    strategy = make(2)

    def step(own):
        context = get_replica_context()
        total = context.all_reduce("SUM", own)
        return context.merge_call(lambda strategy, x: strategy.gather(x, axis=0), (total,)).mean()

    with pytest.raises(
        lockstep.ModelError, match=r"expected a result of shape \(4,\) for replicas \[0, 1\], got \(2,\)"
    ):
        strategy.run(step, (one_batch(strategy, np.arange(4.0)),))


@pytest.mark.parametrize("use", ["run", "reduce", "gather"])
@pytest.mark.parametrize(
    "change", [lambda x: x.reshape(-1, 2), lambda x: x[:1], lambda x: x[0, 0]], ids=["cut", "some", "one"]
)
def test_stacks_that_are_no_longer_of_one_value_for_each_replica_are_refused(use, change):
    strategy = make(2)
    changed = jax.tree.map(change, one_batch(strategy, np.arange(8.0)))
    with pytest.raises(lockstep.InputError, match="the values of 2 replicas along the first axis"):
        {
            "run": lambda: strategy.run(lambda own: own.sum(), (changed,)),
            "reduce": lambda: strategy.reduce("SUM", changed, axis=None),
            "gather": lambda: strategy.gather(changed, axis=0),
        }[use]()


@pytest.mark.parametrize(
    ("step", "args", "says"),
    [
        (lambda: "text", (), r"fn returned 'text', a str; expected arrays"),
        (lambda: {"a": {1, 2}}, (), r"fn returned \{1, 2\}, a set"),
        (lambda x: 1, ({1, 2},), "args: a set is not a tree of arrays and is not hashable"),
    ],
)
def test_run_refuses_values_that_no_device_can_hold(step, args, says):
    with pytest.raises(lockstep.OptionError, match=says):
        make(2).run(step, args)


# --- replicas whose numbers of rows differ -------------------------------------------------------------------------------


class Film(keras.Model):
    """Normalizes rows that are shifted by what all replicas share, which comes first in the inputs."""

    def __init__(self):
        super().__init__()
        self.normalization = layers.BatchNormalization(momentum=0.0)

    def build(self, *_):
        self.normalization.build((None, 1))
        self.built = True

    def call(self, inputs, training=None):
        return self.normalization(inputs["x"] + ops.mean(inputs["codes"]), training=training)


@pytest.mark.parametrize("rows", [[0, 0, 9], [9]])
def test_statistics_are_weighted_by_the_rows_and_not_by_a_shared_input(rows):
    strategy = make(2, 2)
    with strategy.scope():
        model = Film()
        model.build()
    trainable, state = ([x.value for x in part] for part in (model.trainable_variables, model.non_trainable_variables))

    def step(trainable, state, codes, x):
        return model.stateless_call(trainable, state, {"codes": codes, "x": x}, training=True)[1]

    x = np.asarray(rows, "float32")[:, None]
    found = strategy.run(step, (trainable, state, np.zeros((4, 1), "float32"), one_batch(strategy, x)))
    np.testing.assert_allclose(found[0], x.mean(0), rtol=1e-6)


def test_a_compiled_function_gathers_what_each_call_gives():
    strategy = make(2)

    def value(*rows):
        return strategy.experimental_distribute_values_from_function(
            lambda context: np.full(
                rows[context.replica_id_in_sync_group], 10.0 * (1 + context.replica_id_in_sync_group)
            )
        )

    def step(x, y):
        join = jax.jit(lambda v: get_replica_context().all_gather(v, 0))
        return join(x), join(y)

    first, second = strategy.run(step, (value(3, 1), value(3, 2)))
    assert first.tolist() == [10, 10, 10, 20]
    assert second.tolist() == [10, 10, 10, 20, 20]
    first, second = strategy.run(step, (one_batch(strategy, np.arange(3.0)), np.zeros(2)))
    assert (first.tolist(), second.tolist()) == ([0, 1, 2], [0, 0, 0, 0])


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_outputs_of_all_replicas_are_in_the_loss_of_each(rows):
    """A replica without rows syncs in the backward pass, too."""
    strategy = make(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    weights = [variable.value for variable in model.trainable_variables]
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")

    def loss(weights, x, join=lambda z: z):
        z = model.stateless_call(weights, [], x)[0]
        return (z @ join(z).T).sum()

    def step(weights, x):
        context = get_replica_context()
        return context.all_reduce("SUM", jax.grad(loss)(weights, x, lambda z: context.all_gather(z, 0)))

    found = strategy.run(step, (weights, one_batch(strategy, x)))
    for mine, expected in zip(found, jax.grad(loss)(weights, x), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


def other_results(x):
    return {"loss": x.sum()} if len(x) else {"accuracy": x.sum()}


def other_sums(x):
    return get_replica_context().all_reduce("SUM", other_results(x))


@pytest.mark.parametrize(("step", "what"), [(other_results, "return"), (other_sums, r"give to all_reduce\(SUM\)")])
def test_trees_that_differ_between_replicas_are_refused(step, what):
    strategy = make(2)
    with pytest.raises(lockstep.ModelError, match=rf"replicas \[0\] {what} .*loss.*, \[1\] .*accuracy.*Fix: "):
        strategy.run(step, (one_batch(strategy, np.ones(1)),))


def test_arrays_that_a_function_makes_do_not_tell_replicas_apart():
    strategy = make(2)

    def step(weight, x):
        rate = jnp.interp(weight, jnp.array([0.0, 10.0]), jnp.array([0.0, 0.1]))
        return weight - rate * get_replica_context().all_reduce("SUM", x.sum())

    found = [strategy.run(step, (2.0, one_batch(strategy, np.ones(rows, "float32")))) for rows in (4, 3)]
    np.testing.assert_allclose(found, [2 - 0.02 * 4, 2 - 0.02 * 3], rtol=1e-6)


class Scale:
    """A callback whose text is always the same."""

    def __init__(self, factor):
        self.factor = factor

    def __repr__(self):
        return "Scale"

    def __call__(self, weight):
        return np.asarray(weight * self.factor, "float32")


def test_a_callback_that_depends_on_the_rows_has_a_value_for_each_replica():
    strategy = make(2)

    def step(x, weight):
        return jax.pure_callback(Scale(len(x)), jax.ShapeDtypeStruct((), "float32"), weight)

    assert numbers(strategy.run(step, (one_batch(strategy, np.ones(3)), np.float32(2)))) == [4.0, 2.0]
