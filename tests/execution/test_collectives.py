"""The collectives of a compiled step of ``fit``, counted: one all-reduce, in which gradients, statistics, seeds, loss and metrics travel."""

import collections
import contextlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

from lockstep.devices.placement import Placement
from lockstep.execution.replica import ReplicaResult, StateMerge, join_halves, run_replicas
from lockstep.tools.plan.hlo import collectives
from tests.execution.test_uneven_batches import DEVICES, compiled_step, language_model, strategy
from tests.support.hlo import host_instructions


def classifier(*hidden):
    def make():
        own = [layer() for layer in hidden]
        model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), *own, layers.Dense(5, "softmax")])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model, lambda rows: (np.zeros((rows, 8), "float32"), np.zeros(rows, "int32"))

    return make


def dropout():
    return layers.Dropout(0.5)


NETS = {
    "dense": classifier(),
    "dropout": classifier(dropout, dropout),
    "normalized": classifier(layers.BatchNormalization, dropout),
    "language model": lambda: language_model(0.1),
}


def names(replicas, net, rows):
    return [found.name for found in collectives(compiled_step(strategy(replicas), NETS[net], rows).as_text())]


@pytest.fixture
def on_accelerators(monkeypatch):
    """Placements say that their CPU devices are GPUs: steps are those of accelerators, compiled for CPUs."""
    monkeypatch.setattr(Placement, "platform", "gpu")


# Nets with less in their step than another one that is tested every day.
LESS = {"dense", "dropout"}


def nets(less, names=NETS):
    return [pytest.param(name, marks=pytest.mark.nightly if name in less else ()) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("net", nets({"dense"}))
def test_step_on_accelerators_has_one_all_reduce(on_accelerators, net):
    assert names(DEVICES, net, 64) == ["all-reduce"]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [pytest.param(DEVICES, marks=pytest.mark.nightly), 2 * DEVICES])
def test_step_on_accelerators_has_one_all_reduce_if_the_last_device_has_fewer_rows(on_accelerators, replicas):
    assert names(replicas, "dropout", 8 * DEVICES - 3) == ["all-reduce"]


@pytest.mark.parametrize("policy", [pytest.param("mixed_bfloat16", marks=pytest.mark.nightly), "mixed_float16"])
def test_gradients_of_mixed_precision_are_added_in_float32(on_accelerators, policy):
    def make():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(64, dtype=policy), layers.Dense(5, dtype=policy)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model, lambda rows: (np.zeros((rows, 8), "float32"), np.zeros(rows, "int32"))

    (found,) = collectives(compiled_step(strategy(DEVICES), make, 64).as_text())
    gradients = 4 * (9 * 64 + 65 * 5)
    assert found.name == "all-reduce"
    assert gradients <= found.bytes <= gradients + 16  # loss and scale


@pytest.mark.slow
def test_small_outputs_are_gathered_once_if_rows_would_move_to_other_devices(on_accelerators):
    rows = 59  # Devices have 16 rows each; XLA would shard 59 rows as 15 each.
    assert sorted(names(2 * DEVICES, "dropout", rows)) == ["all-gather", "all-reduce"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "rows"),
    [pytest.param(DEVICES, 64, marks=pytest.mark.nightly), (DEVICES, 59), (2 * DEVICES, 59), (DEVICES, 3)],
)
def test_outputs_that_stay_on_their_devices_give_the_numbers_of_one_device(on_accelerators, replicas, rows):
    def trained(scope):
        keras.utils.set_random_seed(5)
        with scope:
            model = keras.Sequential([keras.Input((8,)), layers.Dense(6, "relu"), layers.Dense(1, "sigmoid")])
            model.compile(
                "sgd", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC()], weighted_metrics=["mae"]
            )
        draw = np.random.default_rng(0).random
        x, y, weights = draw((2 * rows, 8)), draw((2 * rows, 1)) < 0.4, draw(2 * rows)
        logs = model.fit(x, y, rows, epochs=2, sample_weight=weights, shuffle=False, verbose=0).history
        return [*model.get_weights(), *(np.asarray(logs[name]) for name in sorted(logs))]

    expected = trained(contextlib.nullcontext())
    for one, other in zip(trained(strategy(replicas).scope()), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("net", nets(LESS, ["dense", "dropout", "normalized"]))
def test_step_on_cpus_gathers_small_outputs_and_has_one_all_reduce(net):
    assert sorted(names(DEVICES, net, 64)) == ["all-gather", "all-reduce"]


@pytest.mark.parametrize(
    ("hidden", "gathers"),
    [
        pytest.param([], 3, id="dense", marks=pytest.mark.nightly),
        pytest.param(
            [layers.BatchNormalization, dropout, dropout], 4, id="statistics and seeds", marks=pytest.mark.slow
        ),
    ],
)
def test_deterministic_step_has_two_collectives_for_a_large_gradient_and_one_for_each_other_kind(hidden, gathers):
    with strategy(2 * DEVICES, deterministic=True).scope():
        own = [layer() for layer in hidden]
        model = keras.Sequential([keras.Input((8,)), layers.Dense(520), *own, layers.Dense(5, "softmax")])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    batch = np.zeros((64, 8), "float32"), np.zeros(64, "int32")
    texts = new_programs(lambda: model.train_on_batch(*batch))
    found = collections.Counter(one.name for text in texts for one in collectives(text))
    # A sum of 8 * 520 numbers; small gradients; outputs; statistics together with seeds.
    assert found == {"all-to-all": 1, "all-gather": gathers}
    assert not any(host_instructions(text) for text in texts)


@pytest.mark.slow
def test_deterministic_step_does_not_gather_large_outputs():
    """Of each row of a language model its loss and whether it hits are gathered, in place of a number for each word."""
    words, length = 2_000, 16
    with strategy(DEVICES, deterministic=True).scope():
        model = keras.Sequential(
            [keras.Input((length,), dtype="int32"), layers.Embedding(words, 4), layers.Dense(words)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=["accuracy"])
    tokens = np.zeros((64, length), "int32")
    texts = new_programs(lambda: model.train_on_batch(tokens, tokens))
    gathered = sum(one.bytes for text in texts for one in collectives(text) if one.name == "all-gather")
    weights = 4 * (2 * 4 * words + words)
    assert gathered < 2 * weights < 4 * tokens.size * words / 50


def new_programs(run):
    """Return the texts of the programs that are compiled while a function runs."""
    client = jax.devices("cpu")[0].client
    before = client.live_executables()
    run()
    known = {id(program) for program in before}
    return [
        module.to_string() for one in client.live_executables() if id(one) not in known for module in one.hlo_modules()
    ]


def test_seed_keeps_every_bit_in_a_sum_of_floats():
    state = np.array([0xFFFFFFFF, 0x80000001], "uint32")

    def call(trainable, non_trainable, inputs, **_):
        return ReplicaResult(rows=[], means=[], state=[non_trainable[0] + jnp.array([0, 1], "uint32")])

    shares = [
        run_replicas(
            call, (StateMerge.SEED,), [], [state], jnp.zeros((3, 1)), rows=(2, 1), first_replica=first, global_rows=6
        )
        for first in (0, 2)
    ]
    total = sum(share.state[0] for share in shares)
    assert total.dtype == "float32"
    np.testing.assert_array_equal(join_halves(total), state + np.array([0, 1], "uint32"))
