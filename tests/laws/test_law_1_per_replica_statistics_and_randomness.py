"""Law 1, second half: BatchNorm on each replica's rows and one random stream a replica, independent of the devices."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

import lockstep

from .compare import DEVICES, REPLICAS, Topology, assert_close, state_of
from .naive import naive_fit

PICTURE = (8, 8, 2)


def network(*inner, shape=(6,), optimizer=None, **options):
    model = keras.Sequential([keras.Input(shape), *inner, layers.Flatten(), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer or keras.optimizers.SGD(0.1, momentum=0.9), loss=loss, **options)
    return model


def dense_with_batch_normalization(**options):
    return network(
        layers.Dense(8, kernel_regularizer="l2"),
        layers.BatchNormalization(momentum=0.8),
        layers.Activation("tanh"),
        **options,
    )


def dense_with_dropout(**options):
    return network(
        layers.Dense(16), layers.Dropout(0.4), layers.GaussianNoise(0.1), layers.AlphaDropout(0.2), **options
    )


def convolution(*augment, **options):
    augment = layers.RandomFlip(seed=1), *augment
    inner = [
        layers.Conv2D(4, 3, use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.SpatialDropout2D(0.3),
    ]
    return network(*augment, *inner, shape=PICTURE, **options)


def convolution_with_all_of_it(**options):
    """Also turns and shifts the pictures: most of the time of these tests would be compiling that."""
    return convolution(layers.RandomRotation(0.2, seed=2), layers.RandomTranslation(0.2, 0.2, seed=3), **options)


def recurrent_with_dropout(**options):
    return network(layers.Reshape((3, 2)), layers.LSTM(4, dropout=0.3, recurrent_dropout=0.2), **options)


NETWORKS = [dense_with_batch_normalization, dense_with_dropout, convolution_with_all_of_it, recurrent_with_dropout]
NETWORKS += [convolution]
NIGHTLY = [convolution_with_all_of_it]


def rows(build, count=None):
    """Two batches of 7, uneven for two and for three replicas; for the first network a batch of 5 follows."""
    count = count or (19 if build is NETWORKS[0] else 14)
    rng = np.random.default_rng(0)
    shape = PICTURE if build in (convolution, convolution_with_all_of_it) else (6,)
    return rng.normal(size=(count, *shape)).astype("float32"), rng.integers(0, 3, count)


def seeded(build, **options):
    keras.utils.set_random_seed(3)
    return build(**options)


def trained(build, topology, count=None, epochs=2, **options):
    with topology.strategy().scope():
        model = seeded(build, **options)
    model.fit(*rows(build, count), batch_size=7, epochs=epochs, shuffle=False, verbose=0)
    return model


def builds_replicas_and_devices():
    """Yield each network with three replicas on two devices; the first also on other devices, and with seven replicas.

    In the nightly set are the two small ones with every number of replicas and devices. That devices do not matter
    is also checked by the masks below.
    """
    for build in NETWORKS:
        for replicas in (3, 7, 1, 2) if build in NETWORKS[:2] else (3,):
            for devices in DEVICES if build in NETWORKS[:2] else (2,):
                every_day = (replicas, devices) in ([(3, 1), (3, 2), (7, 3)] if build is NETWORKS[0] else [(3, 2)])
                mark = pytest.mark.slow if every_day and build not in NIGHTLY else pytest.mark.nightly
                yield pytest.param(build, replicas, devices, marks=[mark, pytest.mark.xdist_group(build.__name__)])


@functools.cache
def written_out(build, replicas, count):
    """Return what the written-out loop leaves, once in each process; tests of a network have one ``xdist_group``."""
    expected = seeded(build)
    naive_fit(expected, *rows(build, count), batch_size=7, replicas=replicas, epochs=2)
    return state_of(expected)


@pytest.mark.parametrize(("build", "replicas", "devices"), list(builds_replicas_and_devices()))
def test_replicas_do_what_the_written_out_loop_does(build, replicas, devices, caplog):
    caplog.set_level("INFO", logger="lockstep")
    count = 19 if replicas == 7 else None  # In the batch of 5 two of seven replicas have no rows.
    expected = written_out(build, replicas, count)
    found = trained(build, Topology(replicas, devices), count)
    messages = [record.getMessage() for record in caplog.records]
    assert not [line for line in messages if "global batch" in line]
    for (name, value), theirs in zip(state_of(found).items(), expected.values(), strict=True):
        if "loss/" not in name:  # The loop keeps no mean of the losses.
            assert_close(value, theirs, 1e-5, name)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(build, marks=pytest.mark.slow if build in NETWORKS[:2] else pytest.mark.nightly)
        for build in NETWORKS
    ],
)
def test_run_eagerly_gives_the_same_numbers(build):
    compiled, eager = (trained(build, Topology(3, 2), epochs=1, run_eagerly=eager) for eager in (False, True))
    for (name, value), theirs in zip(state_of(eager).items(), state_of(compiled).values(), strict=True):
        assert_close(value, theirs, 1e-5, name)


@pytest.mark.slow
@pytest.mark.parametrize("build", NETWORKS[1::2])
def test_one_replica_draws_what_plain_keras_draws(build):
    plain = seeded(build)
    plain.fit(*rows(build), batch_size=7, epochs=2, shuffle=False, verbose=0)
    ours = state_of(trained(build, Topology(1, 2)))
    for (name, value), theirs in zip(ours.items(), state_of(plain).values(), strict=True):
        assert_close(value, theirs, 1e-5, name)


def dropout_mask(replicas, devices, step, batch=8):
    """Return which entries of a batch of ones a Dropout layer keeps at a step, read through an optimizer that does nothing."""

    class Kept(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="kept")
            self.seen = self.add_variable((batch, 16), "zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.seen.assign(y_pred)

        def result(self):
            return keras.ops.sum(self.seen)

    keras.utils.set_random_seed(0)
    kept = Kept()
    with Topology(replicas, devices).strategy().scope():
        model = keras.Sequential([keras.Input((16,)), layers.Dropout(0.5, seed=11)])
        model.compile(optimizer="sgd", loss="mse", metrics=[kept])
    for _ in range(step):
        model.train_on_batch(np.ones((batch, 16), "float32"), np.ones((batch, 16), "float32"))
    return np.asarray(kept.seen.value) > 0


@pytest.mark.slow
def test_replicas_and_steps_draw_different_masks_and_devices_do_not_matter():
    first = dropout_mask(4, 1, step=1)
    pieces = [first[start : start + 2].tobytes() for start in range(0, 8, 2)]
    assert len(set(pieces)) == 4, "two replicas drew the same mask"
    np.testing.assert_array_equal(first, dropout_mask(4, 2, step=1))
    np.testing.assert_array_equal(first, dropout_mask(4, 3, step=1))
    assert (first != dropout_mask(4, 1, step=2)).any(), "two steps drew the same mask"


def replicas_and_counts():
    """Seven replicas with each number of rows, others with one of them; the nightly set has all pairs."""
    counts = (1, 2, 8)
    for number, replicas in enumerate(REPLICAS):
        for count in counts:
            every_day = replicas == 7 or count == counts[number % 3]
            mark = pytest.mark.nightly if not every_day else pytest.mark.slow if replicas < 7 else ()
            yield pytest.param(replicas, count, marks=mark)


@pytest.mark.parametrize(("replicas", "count"), list(replicas_and_counts()))
def test_a_replica_without_rows_never_makes_a_nan(replicas, count):
    model = trained(dense_with_batch_normalization, Topology(replicas, 3), count=count)
    for name, value in state_of(model).items():
        assert np.isfinite(value).all(), name


def test_saved_statistics_are_the_used_ones(tmp_path):
    model = trained(dense_with_batch_normalization, Topology(4, 3))
    x, _ = rows(dense_with_batch_normalization)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(model.predict(x, verbose=0), loaded.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


def test_synchronized_and_separate_normalization_cannot_be_mixed():
    with lockstep.MirroredStrategy(replicas=2).scope():
        model = network(layers.BatchNormalization(synchronized=True), layers.BatchNormalization(name="alone"))
    with pytest.raises(lockstep.ModelError, match="'alone' normalizes each replica's rows on its own"):
        model.fit(*rows(dense_with_dropout), verbose=0)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: lockstep.MirroredStrategy(["cpu:0"]),
        lambda: lockstep.ModelParallelStrategy({"data": 1, "model": 2}, devices=["cpu:0", "cpu:1"]),
    ],
    ids=["mirrored", "mesh"],
)
def test_one_replica_may_normalize_beside_a_layer_that_needs_the_global_batch(strategy):
    def build():
        keras.utils.set_random_seed(3)
        stateful = layers.SimpleRNN(3, stateful=True)
        model = keras.Sequential([keras.Input(batch_shape=(6, 2, 2)), stateful, layers.BatchNormalization()])
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        return model

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 2, 2)).astype("float32"), rng.normal(size=(12, 3)).astype("float32")
    with strategy().scope():
        ours = build()
    plain = build()
    for model in (plain, ours):
        model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
    for (name, value), theirs in zip(state_of(ours).items(), state_of(plain).values(), strict=True):
        assert_close(value, theirs, 1e-5, name)


def test_synchronized_is_refused_by_keras_outside_of_a_scope():
    with pytest.raises(ValueError, match="synchronized"):
        layers.BatchNormalization(synchronized=True)


@pytest.mark.slow
def test_a_stateful_recurrent_layer_keeps_its_rows():
    def build():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input(batch_shape=(6, 4, 2)), layers.LSTM(3, stateful=True), layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        return model

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(18, 4, 2)).astype("float32"), rng.normal(size=(18, 1)).astype("float32")
    plain = build()
    with Topology(4, 3).strategy().scope():
        ours = build()
    for model in (plain, ours):
        model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    for (name, value), theirs in zip(state_of(ours).items(), state_of(plain).values(), strict=True):
        assert_close(value, theirs, 1e-5, name)
