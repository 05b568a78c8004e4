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
    "validation_data, weighted": {"validation_data": (*OTHERS, WEIGHTS[:9])},
    "validation_steps": {"validation_data": OTHERS, "validation_steps": 1},
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
    options = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False} | given
    if "callbacks" in options:
        options["callbacks"] = options["callbacks"]()
    with around():
        np.random.seed(3)  # Keras shuffles with it.
        history = model.fit(X, Y, **options).history
        return {**history, "evaluate": model.evaluate(X, Y, verbose=0)}, state_of(model)


CASES = [
    *(pytest.param(options, {}, id=f"compile {name}") for name, options in COMPILE.items()),
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
