"""``shard="optimizer"``: the same numbers, with the optimizer's variables cut over the devices."""

import jax
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.devices import placement
from tests.laws.cases import case_named, logits_loss
from tests.laws.compare import Topology, assert_same, bytes_by_device, reference, run


@pytest.fixture(autouse=True)
def _shard_all(monkeypatch):
    """The variables of these small models are sharded, too."""
    monkeypatch.setattr("lockstep.devices.placement.SHARD_FROM", 1)


ELEMENTWISE = ["adam", "sgd_nesterov", "adamw", "nadam", "rmsprop", "adagrad", "lion", "ftrl"]
OTHERS = [
    "lamb",
    "muon",
    "clipnorm",
    "global_clipnorm",
    "gradient_accumulation",
    "ema",
    "loss_scale",
    "mixed_float16",
    "schedule",
]


def optimizers_and_devices():
    """Adam on two and on three devices, the others on one of both numbers; the other pairs are in the nightly set.

    Of the optimizers that treat each number by itself two are enough every day.
    """
    for number, name in enumerate(ELEMENTWISE + OTHERS):
        for devices in (2, 3):
            marks = [] if (name, devices) == ("adam", 2) else [pytest.mark.slow]
            if name != "adam" and ((number + devices) % 2 or name in ELEMENTWISE[2:]):
                marks = [pytest.mark.nightly]
            yield pytest.param(name, devices, marks=[pytest.mark.xdist_group(name), *marks])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), list(optimizers_and_devices()))
def test_law_1_holds(name, devices):
    case, topology = case_named(name), Topology(3, devices, {"shard": "optimizer"})
    assert_same(run(case, topology, only_fit=True), reference(case, only_fit=True), case.relative)


def train(**options):
    keras.utils.set_random_seed(0)
    with lockstep.MirroredStrategy([f"cpu:{device}" for device in range(4)], **options).scope():
        model = keras.Sequential([keras.Input((64,)), layers.Dense(32, activation="tanh"), layers.Dense(3)])
        model.compile("adam", logits_loss)
    x, y = np.random.default_rng(0).normal(size=(24, 64)).astype("float32"), np.arange(24) % 3
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y))
    return model


@pytest.mark.slow
def test_each_device_holds_its_part_of_the_optimizer_and_all_of_the_weights():
    plain, sliced = train(), train(shard="optimizer")
    whole = sum(variable.value.nbytes for variable in plain.optimizer.variables)
    assert set(bytes_by_device(plain.optimizer.variables).values()) == {whole}
    # Two moments of weights (64, 32), (32, 3) and bias (32,) are cut in four; of bias (3,) and the two numbers nothing is.
    uncut = 2 * 3 * 4 + 8
    assert set(bytes_by_device(sliced.optimizer.variables).values()) == {(whole - uncut) // 4 + uncut}
    assert bytes_by_device(sliced.trainable_variables) == bytes_by_device(plain.trainable_variables)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((64, 32), 0),
        ((64, 512), 1),  # 512 / 4 is a whole tile of 128 columns
        ((64, 96), 0),  # 64 / 4 are two tiles of 8 rows, 96 / 4 is a part of one
        ((64, 1000), 0),
        ((4, 100), 1),  # no slice is a whole tile: the longest
        ((3, 3, 64, 128), 2),
        ((12, 3, 5, 7), 0),
        ((96,), 0),
        ((512,), 0),
        ((3, 5), 1),  # no axis is divided: the longest
        ((3, 3), None),
        ((), None),
        ((0, 8), None),
    ],
)
def test_slices_are_whole_tiles_of_a_tpu_if_an_axis_allows_it(shape, axis):
    assert lockstep.MirroredStrategy([f"cpu:{device}" for device in range(4)])._placement.slice_axis(shape) == axis


@pytest.mark.slow
def test_axis_of_the_slices_does_not_change_a_bit(monkeypatch):
    def trained():
        keras.utils.set_random_seed(0)
        with lockstep.MirroredStrategy([f"cpu:{device}" for device in range(4)], shard="optimizer").scope():
            model = keras.Sequential([keras.Input((64,)), layers.Dense(96, activation="tanh"), layers.Dense(8)])
            model.compile("adam", logits_loss)
        x, y = np.random.default_rng(0).normal(size=(24, 64)).astype("float32"), np.arange(24) % 3
        model.fit(x, y, batch_size=8, verbose=0)
        moment = model.optimizer.variables[2].value
        return moment.sharding.shard_shape(moment.shape), model.get_weights()

    shape, weights = trained()
    monkeypatch.setattr(placement, "TPU_TILE", (1, 1))
    other_shape, other_weights = trained()
    assert (shape, other_shape) == ((16, 96), (64, 24))
    for one, other in zip(weights, other_weights, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_saved_model_has_the_whole_optimizer(tmp_path):
    model = train(shard="optimizer")
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(model.optimizer.variables, again.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(ours.value), np.asarray(theirs.value))


def test_gradients_are_scattered_and_not_summed_everywhere(monkeypatch):
    scattered = []
    original = jax.lax.psum_scatter

    def noted(value, *args, **kwargs):
        scattered.append(value.shape)
        return original(value, *args, **kwargs)

    monkeypatch.setattr("lockstep.execution.spmd.lax.psum_scatter", noted)
    train(shard="optimizer")
    assert sorted(set(scattered)) == [(32,), (32, 3), (64, 32)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cross_device_ops": "ring"}, "not by RingAllReduce"),
        ({"communication_options": lockstep.CommunicationOptions(implementation="NCCL")}, "not by NcclAllReduce"),
    ],
)
def test_shard_optimizer_refuses_operations(options, says):
    with pytest.raises(lockstep.OptionError, match=says):
        lockstep.MirroredStrategy(["cpu:0", "cpu:1"], shard="optimizer", **options)
