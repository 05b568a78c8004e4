"""Every argument of compile and fit, inside and outside of the scope; every public function where code can stand."""

import contextlib
import inspect

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from tests.laws.compare import assert_close, state_of
from tests.support.marks import quick_first

ROWS = 22
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(ROWS, 3)).astype("float32"), RNG.integers(0, 2, (ROWS, 1)).astype("float32")
WEIGHTS = RNG.uniform(0.5, 2, ROWS).astype("float32")
OTHERS = RNG.normal(size=(9, 3)).astype("float32"), RNG.integers(0, 2, (9, 1)).astype("float32")

COMPILE = {
    "loss_weights": {"loss_weights": [0.3]},
    "metrics": {"metrics": ["mae", keras.metrics.BinaryAccuracy]},
    "weighted_metrics": {"weighted_metrics": ["mae"]},
    "run_eagerly": {"run_eagerly": True},
    "steps_per_execution": {"steps_per_execution": 2},
    "jit_compile": {"jit_compile": False},
    "auto_scale_loss": {"auto_scale_loss": False},
}
FIT = {
    "nothing": {},
    "batch_size": {"batch_size": 5},
    "epochs": {"epochs": 3},
    "callbacks": {"callbacks": lambda: [keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch))]},
    "validation_split": {"validation_split": 0.3},
    "validation_data": {"validation_data": OTHERS},
    "validation_data, weighted": {"validation_data": (*OTHERS, WEIGHTS[:9]), "validation_batch_size": 3},
    "validation_steps": {"validation_data": OTHERS, "validation_batch_size": 3, "validation_steps": 2},
    "validation_batch_size": {"validation_data": OTHERS, "validation_batch_size": 2},
    "validation_freq": {"validation_data": OTHERS, "validation_freq": 2},
    "class_weight": {"class_weight": {0: 0.5, 1: 3.0}},
    "sample_weight": {"sample_weight": WEIGHTS},
    "initial_epoch": {"initial_epoch": 1},
    "steps_per_epoch": {"steps_per_epoch": 1},
    "shuffle": {"shuffle": True},
}


def trained(scope, around, compiled, given):
    keras.utils.set_random_seed(1)
    with scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1, "sigmoid")])
        made = [one() if isinstance(one, type) else one for one in compiled.get("metrics", [])]
        model.compile(
            keras.optimizers.Adam(0.1), "binary_crossentropy", **compiled | ({"metrics": made} if made else {})
        )
    # Both batches of an epoch have 11 rows, which is uneven for two replicas.
    options = {"batch_size": 11, "epochs": 2, "verbose": 0, "shuffle": False} | given
    if "callbacks" in options:
        options["callbacks"] = options["callbacks"]()
    with around():
        np.random.seed(3)  # Keras shuffles with it.
        history = model.fit(X, Y, **options).history
        return {**history, "evaluate": model.evaluate(X, Y, batch_size=11, verbose=0)}, state_of(model)


BESIDES = {
    "steps_per_execution": {"batch_size": 8},  # Of three batches the last is a call of its own.
    **{key: {"epochs": 1} for key in ["run_eagerly", "jit_compile"]},  # Not compiled, each step takes long.
}
CASES = [
    *(pytest.param(options, BESIDES.get(name, {}), id=f"compile {name}") for name, options in COMPILE.items()),
    *(pytest.param({}, options, id=f"fit {name}") for name, options in FIT.items()),
]


@pytest.mark.parametrize("place", ["outside", pytest.param("inside", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("compiled", "given"), quick_first(CASES))
def test_fit_gives_the_numbers_of_plain_keras_inside_and_outside_of_the_scope(compiled, given, place):
    expected, variables = trained(contextlib.nullcontext, contextlib.nullcontext, compiled, given)
    scope = lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope
    history, found = trained(scope, scope if place == "inside" else contextlib.nullcontext, compiled, given)
    assert history.keys() == expected.keys()
    for name, numbers in expected.items():
        np.testing.assert_allclose(history[name], numbers, rtol=1e-5, atol=1e-6, err_msg=name)
    for (name, value), theirs in zip(found.items(), variables.values(), strict=True):
        assert_close(value, theirs, 1e-5, name)


def test_all_arguments_of_compile_and_fit_are_tried():
    def names(method):
        return set(inspect.signature(method).parameters) - {"self", "x", "y", "optimizer", "loss", "verbose"}

    assert {key for options in COMPILE.values() for key in options} == names(keras.Model.compile)
    assert {key for options in FIT.values() for key in options} | {"epochs"} == names(keras.Model.fit)


# --- where code can stand --------------------------------------------------------------------------------------------

PLACES = ("in the scope", "without a strategy", "in jit", "in a replica")
OWN = lockstep.MirroredStrategy(["cpu:0"], replicas=2)


def at(place, call):
    """What a call gives at a place: of a replica, the sum over both."""
    if place == "without a strategy":
        return call(lockstep.get_strategy())
    if place == "in the scope":
        with OWN.scope():
            return call(OWN)
    if place == "in jit":
        with OWN.scope():
            return jax.jit(lambda: call(OWN))()
    return OWN.reduce("SUM", OWN.run(lambda: call(OWN)), axis=None)


def batch(strategy):
    (value,) = strategy.experimental_distribute_dataset([np.arange(4.0, dtype="float32")])
    return value


BATCH = batch(OWN)
LOSSES = jnp.asarray([1.0, 3.0])
EVERYWHERE = {  # (in the scope, without a strategy, in jit, of both replicas)
    "compute_average_loss": (lambda _: lockstep.compute_average_loss(LOSSES), (1.0, 2.0, 1.0, 2.0)),
    "scale_regularization_loss": (lambda _: lockstep.scale_regularization_loss(jnp.float32(3)), (1.5, 3.0, 1.5, 3.0)),
    "has_strategy": (lambda _: jnp.int32(lockstep.has_strategy()), (1, 0, 1, 2)),
    "get_strategy": (lambda _: jnp.int32(lockstep.get_strategy().num_replicas_in_sync), (2, 1, 2, 4)),
    "in_cross_replica_context": (lambda _: jnp.int32(lockstep.in_cross_replica_context()), (1, 0, 1, 0)),
    "get_replica_context": (lambda _: jnp.int32(lockstep.get_replica_context() is not None), (0, 1, 0, 2)),
    "num_replicas_in_sync": (lambda strategy: jnp.int32(strategy.num_replicas_in_sync), (2, 1, 2, 4)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_function_knows_where_it_stands(name, place):
    call, expected = EVERYWHERE[name]
    assert float(at(place, call)) == expected[PLACES.index(place)]


METHODS = {
    "run": lambda strategy: strategy.run(lambda: jnp.float32(2)),
    "reduce": lambda strategy: strategy.reduce("MEAN", BATCH if strategy is OWN else batch(strategy), axis=0),
    "gather": lambda strategy: strategy.gather(BATCH if strategy is OWN else batch(strategy), axis=0),
    "experimental_distribute_values_from_function": lambda strategy: (
        strategy.experimental_distribute_values_from_function(
            lambda context: np.float32(context.replica_id_in_sync_group)
        )
    ),
    "experimental_distribute_dataset": lambda strategy: batch(strategy),
    "distribute_datasets_from_function": lambda strategy: next(
        iter(strategy.distribute_datasets_from_function(lambda context: [np.ones(2, "float32")] * 2))
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", METHODS)
def test_methods_for_all_replicas_work_everywhere_but_in_one(name, place):
    if place == "in a replica":
        with pytest.raises(
            lockstep.ScopeError, match=f"strategy.{name} was called by a function that strategy.run runs"
        ):
            at(place, METHODS[name])
        return
    if place == "in jit" and "dataset" in name:
        with pytest.raises(lockstep.ScopeError, match="It would be traced once, and use that batch"):
            at(place, METHODS[name])
        return
    found = at(place, METHODS[name])
    expected = METHODS[name](lockstep.get_strategy() if place == "without a strategy" else OWN)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "merge_call"])
def test_a_context_of_replicas_is_there_without_a_strategy_too(name):
    def step():
        context = lockstep.get_replica_context()
        if name == "all_reduce":
            return context.all_reduce("SUM", jnp.ones(1))
        if name == "all_gather":
            return context.all_gather(jnp.ones(1), axis=0)
        return context.merge_call(lambda strategy, value: strategy.reduce("MEAN", value, axis=None), (jnp.ones(1),))

    alone = {"all_reduce": [1], "all_gather": [1], "merge_call": [1]}
    together = {"all_reduce": [2], "all_gather": [1, 1], "merge_call": [1]}
    assert step().tolist() == jax.jit(step)().tolist() == alone[name]
    assert OWN.run(step).tolist() == together[name]


def test_a_compiled_function_is_right_in_each_scope():
    average = jax.jit(lambda losses: lockstep.compute_average_loss(losses))
    found = []
    for replicas in (None, 2, 4, 2, None):
        scope = lockstep.MirroredStrategy(["cpu:0"], replicas=replicas).scope if replicas else contextlib.nullcontext
        with scope():
            found.append(float(average(LOSSES)))
    assert found == [2.0, 1.0, 0.5, 1.0, 2.0]


def test_a_step_is_compiled_once_for_inside_and_outside_of_the_scope():
    traced = []

    class Counting(layers.Layer):
        def call(self, x):
            traced.append(x.shape)
            return x

    with OWN.scope():
        model = keras.Sequential([keras.Input((3,)), Counting(), layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=11, verbose=0)
    traced.clear()
    model.fit(X, Y, batch_size=11, verbose=0)
    assert not traced


@pytest.mark.parametrize(
    ("weights", "shape"), [(2.0, (4,)), ([1, 2, 3, 4], (4,)), ([[1], [2], [3], [4]], (4,)), ([1, 2, 3, 4], (4, 3))]
)
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_weights_of_rows_are_multiplied_row_by_row(weights, shape, dtype):
    losses = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    expected = sum((np.reshape(weights, (-1,)) * losses.T / 4).ravel())
    assert float(lockstep.compute_average_loss(losses, weights)) == pytest.approx(expected)
    half = lockstep.compute_average_loss(losses, np.asarray(weights) * 0.5)
    assert float(half) == pytest.approx(expected / 2)


@pytest.mark.parametrize("weights", [[[1.0, 2.0]], [1.0, 2.0, 3.0], [[[1.0]], [[2.0]]]])
def test_weights_of_other_rows_are_refused(weights):
    with pytest.raises(lockstep.InputError, match="sample_weight has the shape"):
        lockstep.compute_average_loss(LOSSES, weights)


@pytest.mark.parametrize("rows", [0, -4, np.asarray(-4), jnp.int32(0), jnp.int32(-4), "8", True, 10.5, [8]])
def test_a_batch_size_that_is_no_number_of_rows_is_refused(rows):
    with pytest.raises(lockstep.InputError, match="expected global_batch_size as a whole number of rows"):
        lockstep.compute_average_loss(LOSSES, global_batch_size=rows)


def test_the_average_over_no_rows_is_0():
    (value,) = OWN.experimental_distribute_dataset([np.ones(1, "float32")])
    losses = OWN.run(lockstep.compute_average_loss, (value,))
    assert [float(loss) for loss in losses.values] == [0.5, 0.0]


class OfRows(layers.Layer):
    """A layer with a loss that is a mean over rows."""

    def call(self, x):
        self.add_loss(keras.ops.mean(x**2))
        return x


def trained_on_one_row(strategy, share):
    """Loss and gradients; of the losses of rows only a share."""
    with strategy.scope():
        keras.utils.set_random_seed(2)
        parts = [layers.Dense(4, kernel_regularizer="l2"), layers.BatchNormalization(), OfRows()]
        model = keras.Sequential([keras.Input((3,)), *parts, layers.Dense(2, activity_regularizer="l2")])

    def loss(trainable, others, x):
        p, _, (*of_rows, of_weights) = model.stateless_call(trainable, others, x, training=True, return_losses=True)
        average = lockstep.compute_average_loss((p**2)[:, 0], global_batch_size=1)
        return average + lockstep.scale_regularization_loss([*(share * each for each in of_rows), of_weights])

    def step(trainable, others, x):
        return lockstep.get_replica_context().all_reduce("SUM", jax.value_and_grad(loss)(trainable, others, x))

    values = [[v.value for v in kind] for kind in (model.trainable_variables, model.non_trainable_variables)]
    (batch,) = strategy.experimental_distribute_dataset([X[:1]])
    return jax.tree.leaves(strategy.run(step, (*values, batch)))


@pytest.mark.slow
def test_losses_of_a_replica_without_rows_are_0_and_those_of_weights_stay():
    found = trained_on_one_row(OWN, share=1.0)
    expected = trained_on_one_row(lockstep.MirroredStrategy(["cpu:0"], replicas=1), share=0.5)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_close(np.asarray(one), np.asarray(other), 1e-5, str(number))


@pytest.mark.parametrize(
    "make",
    [
        lambda: OWN.experimental_distribute_values_from_function(
            lambda context: (1.0, 2.0) if context.replica_id_in_sync_group else 1.0
        ),
        lambda: list(OWN.distribute_datasets_from_function(lambda _: [np.ones(2), (np.ones(2), np.ones(2))])),
    ],
)
def test_other_trees_for_other_replicas_are_refused(make):
    with pytest.raises(lockstep.InputError, match="expected the same tree of arrays for each replica"):
        make()


@pytest.mark.parametrize("axis", ["a", None, (0,), 0.0, True, 3])
def test_an_axis_that_is_none_is_refused(axis):
    for value in (BATCH, jnp.arange(4.0)):
        with pytest.raises(lockstep.InputError, match="axis"):
            OWN.gather(value, axis)
        if axis is not None:
            with pytest.raises(lockstep.InputError, match="axis"):
                OWN.reduce("MEAN", value, axis)


@pytest.mark.parametrize(
    "call",
    [
        lambda: OWN.reduce("MEAN", "x", axis=None),
        lambda: OWN.gather("x", axis=0),
        lambda: OWN.run(lambda: lockstep.get_replica_context().all_reduce("SUM", "x")),
        lambda: lockstep.get_replica_context().all_reduce("SUM", np.asarray(["x"])),
        lambda: lockstep.scale_regularization_loss("x"),
        lambda: OWN.experimental_distribute_values_from_function(lambda _: np.datetime64("2026-01-01")),
    ],
)
def test_what_is_no_number_is_refused(call):
    with pytest.raises(lockstep.InputError, match="numbers"):
        call()


def test_true_and_false_are_counted():
    (value,) = OWN.experimental_distribute_dataset([np.asarray([True, True, False, True])])
    assert int(OWN.reduce("SUM", value, axis=0)) == 3
    assert OWN.reduce("SUM", value, axis=None).tolist() == [1, 2]
    assert OWN.run(lambda x: lockstep.get_replica_context().all_reduce("SUM", x), (value,)).tolist() == [1, 2]
    assert OWN.gather(value, axis=0).tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    "use",
    [
        lambda x: [1, 2][lockstep.get_replica_context().replica_id_in_sync_group],
        lambda x: x[x > 1],
        lambda x: x if x.sum() > 1 else -x,
    ],
)
def test_a_value_that_a_trace_does_not_have_is_told(use):
    with pytest.raises(lockstep.ModelError, match="needs the value of an array while it is traced"):
        OWN.run(use, (BATCH,))


def test_contexts_have_defaults_and_know_rows():
    assert lockstep.experimental.ValueContext() == lockstep.experimental.ValueContext(0, 1)
    for replicas, rows in ((0, 4), (3, -3)):
        with pytest.raises(lockstep.OptionError, match="expected a whole number"):
            lockstep.InputContext(1, 0, replicas).get_per_replica_batch_size(rows)


def test_a_distributed_data_set_is_true_whether_or_not_its_length_is_known():
    assert OWN.experimental_distribute_dataset(np.ones(1) for _ in range(2))
