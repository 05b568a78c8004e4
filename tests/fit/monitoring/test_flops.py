"""Operations of a step are those of its matrices, also in loops, and known devices have peaks."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.extend.core import Primitive

import lockstep
from lockstep._keras import trainer
from lockstep.callbacks import ThroughputMonitor
from lockstep.fit.monitoring.flops import PEAKS, flops_of_step, peak_of
from lockstep.tools.plan.hardware import known_accelerators


@pytest.mark.slow
def test_the_operations_of_a_step_are_those_of_its_matrices():
    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            self.flop_counter, self.rate = monitor.attachment.flop_counter, logs["throughput/device/samples_per_sec"]

    seen, monitor = Seen(), ThroughputMonitor(peak_flops=1e9)
    with lockstep.MirroredStrategy(["cpu:0", "cpu:1"], replicas=4).scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128), keras.layers.Dense(32)])
        model.compile("sgd", "mse")
    x = np.ones((64, 64), "float32")
    logs = model.fit(x, x[:, :32], batch_size=16, verbose=0, callbacks=[seen, monitor]).history
    matrices = 2 * (2 * 64 * 128 + 3 * 128 * 32)  # forwards, and backwards to weights and, in the second, to inputs
    assert matrices < seen.flop_counter.per_row < 1.5 * matrices
    assert logs["mfu"] == [seen.flop_counter.per_row * seen.rate / 1e9]


def test_a_step_is_counted_as_plain_keras_has_it(monkeypatch):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    x, y = np.ones((8, 3), "float32"), np.ones((8, 4), "float32")
    state = [[v.value for v in part] for part in _parts(model)]
    plain = jax.jit(model.train_step).lower(tuple(state), (x, y)).cost_analysis()["flops"]
    local, asked = jax.local_devices, []
    monkeypatch.setattr(jax, "local_devices", lambda *_, **options: asked.append(options) or local(**options))
    assert flops_of_step(model, state, (x, y)) == plain
    assert asked == [{"backend": "cpu"}]  # The plugins of accelerators do not count.


@pytest.mark.slow
@pytest.mark.parametrize("kind", [keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN])
def test_a_loop_counts_as_often_as_it_runs(kind):
    """The same layer without a loop is the reference; of the other rounds of the loop only matrix products are counted."""
    loop, unrolled = (flops_of(kind(64, unroll=unroll), (9, 32), (8, 9, 32)) for unroll in (False, True))
    assert loop == pytest.approx(unrolled, rel=0.05)


def flops_of(layer, shape, batch):
    model = keras.Sequential([keras.Input(shape), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones(batch, "float32"), np.ones((batch[0], 1), "float32")
    return flops_of_step(model, trainer.training_state(model, (x, y)), (x, y))


class Products(keras.layers.Layer):
    """Matrix products in a loop of 12, in one of 3 within one of 4, in one that is joined by fives, or until a condition holds."""

    def __init__(self, loop):
        super().__init__()
        self.loop = loop

    def call(self, x):
        def times(value, count, unroll=1):
            return jax.lax.scan(lambda h, _: (jnp.tanh(h @ h.T @ h), None), value, length=count, unroll=unroll)[0]

        x = jax.lax.stop_gradient(x)
        if self.loop == "nested":
            return jax.lax.scan(lambda h, _: (times(h, 3), None), x, length=4)[0]
        if self.loop == "until":
            return jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h @ h.T @ h, x)
        if self.loop == "until, no product":
            return jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h + 1, x)
        return times(x, 12, {"joined": 5, "none": 12}.get(self.loop, 1))


def test_loops_within_loops_and_joined_rounds_are_counted():
    whole = flops_of(Products("none"), (64,), (32, 64))
    for loop in ("one", "nested", "joined"):
        assert flops_of(Products(loop), (64,), (32, 64)) == pytest.approx(whole, rel=0.05)


def test_operations_are_unknown_if_nobody_knows_how_often_a_product_runs():
    assert flops_of(Products("until"), (64,), (32, 64)) is None
    assert flops_of(Products("until, no product"), (64,), (32, 64)) > 0


fused = Primitive("attention_of_gpus")
fused.def_abstract_eval(lambda x: x)


class Fused(keras.layers.Layer):
    def call(self, x):
        return x + 0 * fused.bind(jax.lax.stop_gradient(x))


def test_operations_are_unknown_if_only_an_accelerator_has_them():
    assert flops_of(Fused(), (64,), (32, 64)) is None


@pytest.mark.slow
def test_convolutions_in_a_loop_are_counted():
    layer, shape = keras.layers.ConvLSTM2D(8, 3, padding="same", recurrent_activation="linear"), (16, 16, 4)
    once, often = (
        flops_of(layer.__class__.from_config(layer.get_config()), (n, *shape), (4, n, *shape)) for n in (1, 9)
    )
    assert often == pytest.approx(9 * once, rel=0.25)  # A convolution of XLA does not count the padding.


def _parts(model):
    model.optimizer.build(model.trainable_variables)
    model.train_on_batch(np.ones((8, 3)), np.ones((8, 4)))
    return model.trainable_variables, model.non_trainable_variables, model.optimizer.variables, model.metrics_variables


def test_peaks_are_found_by_the_names_that_jax_gives():
    kinds = {
        "NVIDIA A100-SXM4-80GB": "A100",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA L4": "L4",
        "Tesla V100-SXM2-16GB": "V100",
        "Tesla T4": "T4",
        "TPU v5 lite": "TPU v5 lite",
        "TPU v5p": "TPU v5p",
        "TPU v6 lite": "TPU v6",
    }
    assert {kind: peak_of(kind) for kind in kinds} == {kind: PEAKS[name] for kind, name in kinds.items()}
    planned = {
        kind: one.peak.get("bfloat16", one.peak.get("float16"))
        for one in known_accelerators().values()
        for kind in one.kinds
    }
    assert {kind: peak_of(kind) for kind in planned} == planned
    assert peak_of("NVIDIA L40") is None
    assert peak_of("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None
    assert peak_of("cpu") is None
