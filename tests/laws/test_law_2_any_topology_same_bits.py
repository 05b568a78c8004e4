"""Law 2: the same replicas give the same bits on any number of devices."""

import contextlib
import functools
import hashlib
import os
import random

import jax
import keras
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from keras import layers, ops, optimizers

import lockstep
from lockstep.execution import deterministic_replicas, deterministic_rows
from tests.support.processes import NOT_INHERITED

from .cases import Towers, case_named, logits_loss
from .compare import Topology as AnyTopology
from .compare import assert_same, reference, run

pytestmark = pytest.mark.optimized

REPLICAS = 8
DEVICES = (1, 2, 3, 4, 5, 8)
# Five steps an epoch, which are one program. Eight replicas share a batch as 3, 3, 3, 3, 3, 3, 1 and 0 rows;
# 3, 5, 6 and 13 replicas have unequal shares, too.
ROWS, BATCH = 95, 19


def Topology(replicas, devices, **options):
    return AnyTopology(replicas, devices, {"deterministic": True} | options)


# --- models ------------------------------------------------------------------------------------------------------------


def numbers(rng, *shape):
    return rng.normal(size=(ROWS, *shape)).astype("float32")


def tokens(rng, *shape):
    return rng.integers(0, 50, (ROWS, *shape))


def mlp():
    return keras.Sequential([keras.Input((20,)), layers.Dense(32, activation="relu"), layers.Dense(3)])


def cnn():
    def block(filters):
        return [layers.Conv2D(filters, 3), layers.BatchNormalization(), layers.Activation("relu")]

    inner = [*block(8), layers.MaxPooling2D(), *block(16), layers.Flatten(), layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((12, 12, 3)), *inner, layers.Dense(3)])


def lstm():
    inner = [layers.Embedding(50, 8), layers.LSTM(16)]
    return keras.Sequential([keras.Input((9,), dtype="int32"), *inner, layers.Dense(3)])


def transformer():
    x = keras.Input((9,), dtype="int32")
    h = layers.Embedding(50, 16)(x)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 8, dropout=0.1)(h, h, use_causal_mask=True))
    h = layers.LayerNormalization()(h + layers.Dense(16)(layers.Dense(32, activation="gelu")(h)))
    return keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))


MODELS = {"mlp": (mlp, numbers, 20), "cnn": (cnn, numbers, 12, 12, 3), "lstm": (lstm, tokens, 9)}
MODELS["transformer"] = (transformer, tokens, 9)
OPTIMIZERS = {"adam": lambda: optimizers.Adam(0.01), "sgd": lambda: optimizers.SGD(0.05, momentum=0.9)}


# --- result of a run -----------------------------------------------------------------------------------------------------


def outcome(name, optimizer, topology, epochs):
    """Return the SHA-256 of all results of a run of 5 * ``epochs`` steps, by kind."""
    build, data, *shape = MODELS[name]
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    with topology.strategy().scope():
        model = build()
        model.compile(OPTIMIZERS[optimizer](), logits_loss, metrics=["accuracy"])
    rng = np.random.default_rng(0)
    x, y = data(rng, *shape), rng.integers(0, 3, ROWS)
    # Each batch size is compiled separately; validation and prediction are tested with the smallest net, and in the cases below.
    validation = {"validation_data": (x[:13], y[:13])} if name == "mlp" else {}
    history = model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, **validation).history
    kinds = {
        "weights": model.trainable_variables,
        "other variables": model.non_trainable_variables,
        "optimizer": model.optimizer.variables,
        "metrics": model.metrics_variables,
    }
    found = {kind: [np.asarray(variable.value) for variable in variables] for kind, variables in kinds.items()}
    found["predictions"] = [model.predict(x[:13], verbose=0)] if name == "mlp" else []
    digests = {kind: digest(*(value.tobytes() for value in values)) for kind, values in found.items()}
    return digests | {"history": digest(repr(history).encode())}


def digest(*parts):
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


@functools.cache
def on_one_device(name, optimizer, epochs):
    return outcome(name, optimizer, Topology(REPLICAS, 1), epochs)


# Each device compiles each program once more, and no code depends on both the net and the number of devices.
ON_DEVICES = {("mlp", "adam"): (3, 8), ("cnn", "adam"): (2,), ("lstm", "sgd"): (3,), ("transformer", "adam"): (2,)}


def runs():
    """Yield ten steps of each net and optimizer on some numbers of devices, and in the nightly set a hundred steps on all.

    Two epochs show what a hundred steps show: bits that differ once stay different, and without the tree they differ after two.
    """
    for name in MODELS:
        for optimizer in OPTIMIZERS:
            group = pytest.mark.xdist_group(f"{name}-{optimizer}")
            for devices in ON_DEVICES.get((name, optimizer), ()):
                quick = (name, optimizer, devices) == ("mlp", "adam", 3)
                yield pytest.param(name, optimizer, devices, 2, marks=[group] if quick else [group, pytest.mark.slow])
            for devices in DEVICES[1:] if optimizer == "adam" else (2, 3, 8):
                yield pytest.param(name, optimizer, devices, 20, marks=[group, pytest.mark.nightly])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimizer", "devices", "epochs"), list(runs()))
def test_deterministic_fit_leaves_the_same_bits_on_any_number_of_devices(name, optimizer, devices, epochs):
    assert outcome(name, optimizer, Topology(REPLICAS, devices), epochs) == on_one_device(name, optimizer, epochs)


# --- controls: violations fail ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_programs_of_other_tests():
    deterministic_replicas._over_devices.cache_clear()
    yield
    deterministic_replicas._over_devices.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("no_programs_of_other_tests")
@pytest.mark.parametrize("name", ["mlp", pytest.param("cnn", marks=pytest.mark.nightly)])
def test_with_a_plain_sum_over_the_devices_the_bits_differ(name, monkeypatch):
    """The tree is necessary: with the rest of the executor unchanged, partial sums are added in the platform's order."""

    def plain(values, where, axis):
        return [lax.psum(value.sum(axis=0), axis) for value in values]

    monkeypatch.setattr(deterministic_replicas, "tree_sum", plain)
    found = [outcome(name, "adam", Topology(REPLICAS, devices), epochs=2)["weights"] for devices in (1, 8)]
    assert len(set(found)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", pytest.param("cnn", marks=pytest.mark.nightly)])
def test_spmd_executor_has_other_bits_on_other_devices_but_repeats_its_own(name):
    found = [outcome(name, "adam", AnyTopology(REPLICAS, devices), epochs=2) for devices in (1, 2, 2)]
    assert found[0]["weights"] != found[1]["weights"]
    assert found[1] == found[2]


PROGRAM = """
import sys
import lockstep
sys.path.insert(0, sys.argv[1])
lockstep.config.set_logical_cpu_devices(2)
from tests.laws.test_law_2_any_topology_same_bits import AnyTopology, Topology, outcome
print(sorted(outcome("cnn", "adam", (Topology if sys.argv[2] == "True" else AnyTopology)(8, 2), epochs=2).items()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_another_process_gives_the_same_bits(deterministic, python):
    """A new process with the same thread pool and two devices; the deterministic executor is compared with one device here."""
    done = python(code=PROGRAM, arguments=[os.getcwd(), deterministic], timeout=120)
    assert done.returncode == 0, done.stderr
    here = Topology(8, 1) if deterministic else AnyTopology(8, 2)
    assert done.stdout.strip() == str(sorted(outcome("cnn", "adam", here, epochs=2).items()))


# --- other numbers of replicas, other ways to train ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "numbers_of_devices"),
    [
        pytest.param(13, (1, 4), marks=pytest.mark.slow, id="13"),
        *(pytest.param(count, (1, 2, 3, 4), marks=pytest.mark.nightly, id=str(count)) for count in (1, 3, 5, 6)),
    ],
)
def test_any_number_of_replicas(replicas, numbers_of_devices):
    found = [outcome("mlp", "adam", Topology(replicas, devices), epochs=1) for devices in numbers_of_devices]
    assert all(one == found[0] for one in found)


# Cases in which more than loss, metric and optimizer determine a step: these run the same code with every executor.
OTHER = [
    *("add_loss", "l2_and_l1", "activity_regularizer", "ema", "loss_scale", "mixed_float16", "gradient_accumulation"),
    *(
        "variables_of_every_aggregation",
        "outputs_with_and_without_rows",
        "batch_normalization_synchronized",
        "batch_of_fixed_size",
        "float8",
    ),
    *("dicts", "tuples", "subclassed_and_built_by_fit", "own_train_step", "own_compute_loss", "frozen_and_recompiled"),
    *("loss_of_what_the_call_has_kept", "weight_of_the_loss"),
    *("steps_per_execution", "run_eagerly", "one_row", "last_batch_of_one", "lstm_masked", "class_weight"),
]


WHOLE = ("variables_of_every_aggregation", "mixed_float16", "lstm_masked")  # These also evaluate and predict.
QUICK = ("own_train_step",)
# The rest of their steps is Keras's code on the global batch, which law 1 tests in all cases.
NIGHTLY = ("l2_and_l1", "activity_regularizer", "batch_of_fixed_size", "dicts", "tuples", "subclassed_and_built_by_fit")
NIGHTLY += ("own_compute_loss", "frozen_and_recompiled", "one_row", "last_batch_of_one", "class_weight")
NIGHTLY += ("ema", "gradient_accumulation", "float8")


def others():
    """Yield each case that only trains, and three that also evaluate and predict, of which one is in the suite."""
    for name in OTHER:
        for whole in (False, True) if name in WHOLE else (False,):
            every_day = whole == (name == WHOLE[0]) and name not in NIGHTLY
            marks = [pytest.mark.slow] if name not in QUICK else []
            marks = [pytest.mark.xdist_group(name), *(marks if every_day else [pytest.mark.nightly])]
            yield pytest.param(name, not whole, id=f"{name}-whole" if whole else name, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "short"), list(others()))
def test_law_1_holds_too_and_the_bits_are_those_of_one_device(name, short):
    """Assert equality with plain Keras up to rounding, and with one device bit for bit."""
    check_laws_1_and_2(name, short)


@pytest.fixture
def rows_stay_with_replicas(monkeypatch):
    """As for large outputs, which would take long to compute here."""
    monkeypatch.setattr(deterministic_rows, "KEEP_FROM", 0)


ALONG_ROWS = ("lstm_masked", "outputs_with_and_without_rows", "loss_scale")


@pytest.mark.slow
@pytest.mark.usefixtures("rows_stay_with_replicas")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALONG_ROWS else pytest.mark.nightly) for name in OTHER]
)
def test_both_laws_hold_if_rows_stay_with_their_replicas(name):
    check_laws_1_and_2(name, short=name not in WHOLE)


def check_laws_1_and_2(name, short):
    case = case_named(name)
    found = run(case, Topology(3, 2), short)
    assert_same(found, reference(case, short), case.relative)
    alone = run(case, Topology(3, 1), short)
    assert found.history == alone.history
    assert found.evaluation == alone.evaluation
    for variable, value in found.variables.items():
        np.testing.assert_array_equal(value, alone.variables[variable], err_msg=variable)
    for ours, theirs in zip(found.predictions, alone.predictions, strict=True):
        np.testing.assert_array_equal(ours, theirs)


class TwoCalls(keras.Model):
    """Calls itself twice in a step, on rows that the step computes, inside a separately compiled function."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8, activation="tanh"), layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metric_values = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def loss(trainable, x):
            logits, _ = self.stateless_call(trainable, non_trainable, x)
            return ops.mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))

        towards = jax.grad(loss, argnums=1)(trainable, x)  # adversarial rows: a gradient of the inputs
        before = jax.jit(loss)(trainable, x)
        value, gradients = jax.value_and_grad(loss)(trainable, x + 0.1 * towards)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": value, "before": before}, (trainable, non_trainable, optimizer, metric_values)


def trained(model_class, strategy, **options):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    with strategy.scope():
        model = model_class(**options)
        model.compile(optimizers.SGD(0.1))
    x, y = rng.normal(size=(23, 6)).astype("float32"), rng.integers(0, 3, 23)
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return history, [np.asarray(variable.value) for variable in model.variables]


def check_three_topologies(model_class):
    """Check the bits of one device, and the numbers of the default executor; return both histories."""
    history, weights = trained(model_class, Topology(3, 2).strategy())
    one_device, same = trained(model_class, Topology(3, 1).strategy())
    fast, close = trained(model_class, AnyTopology(3, 2).strategy())
    assert history == one_device
    for ours, alone, nearly in zip(weights, same, close, strict=True):
        np.testing.assert_array_equal(ours, alone)
        np.testing.assert_allclose(ours, nearly, rtol=1e-5, atol=1e-6)
    return history, fast


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True])
def test_a_step_that_calls_the_model_three_times_and_differentiates_its_inputs(kept, request):
    if kept:
        request.getfixturevalue("rows_stay_with_replicas")
    history, fast = check_three_topologies(TwoCalls)
    np.testing.assert_allclose(history["before"], fast["before"], rtol=1e-5)


def loss_of_worst_row(y, outputs):
    return ops.max(ops.mean(ops.square(y - outputs) * 1.3 + y * outputs, axis=-1))


@pytest.mark.slow
@pytest.mark.usefixtures("rows_stay_with_replicas")
def test_a_row_is_found_by_what_the_rest_has_read_of_it():
    """Its gradient is that of the row whose loss is the largest: computed again, with another rounding, it would be that of no row."""
    rng = np.random.default_rng(5)
    x, y = (rng.normal(size=(56, width)).astype("float32") for width in (5, 37))

    def weights(scope):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(7)
        with scope:
            model = keras.Sequential([keras.Input((5,)), layers.Dense(6, activation="tanh"), layers.Dense(37)])
            model.compile(optimizers.SGD(0.1), loss_of_worst_row)
        model.fit(x, y, batch_size=7, shuffle=False, verbose=0)
        return model.get_weights()

    found, alone = (weights(Topology(3, devices).strategy().scope()) for devices in (2, 1))
    for ours, one, keras_own in zip(found, alone, weights(contextlib.nullcontext()), strict=True):
        np.testing.assert_array_equal(ours, one)
        np.testing.assert_allclose(ours, keras_own, rtol=1e-4, atol=1e-5)


class Tells(TwoCalls):
    """Calls the host in an order that it has asked for."""

    def __init__(self):
        super().__init__()
        self.told = []

    def tell(self, name, value):
        return io_callback(lambda x: (self.told.append(name), x)[1], value, value, ordered=True)

    def train_step(self, state, data):
        trainable, non_trainable, *_ = state
        outputs, _ = self.stateless_call(trainable, non_trainable, data[0])
        total = ops.mean(outputs)
        self.tell("a", total)
        outputs = outputs * self.tell("b", ops.sum(data[0]))
        self.tell("c", ops.sum(data[0]))
        return {"loss": ops.mean(outputs)}, state


@pytest.mark.usefixtures("rows_stay_with_replicas")
def test_side_effects_that_are_ordered_keep_their_order():
    with Topology(3, 1).strategy().scope():
        model = Tells()
        model.compile(optimizers.SGD(0.1))
    model.fit(np.ones((16, 6), "float32"), np.ones(16, "int32"), batch_size=8, verbose=0)
    jax.effects_barrier()
    assert [*model.told] == [*"abcabc"]


class Alignment(TwoCalls):
    """Compares each row of its outputs with all others, and with another call's: a loss that mixes rows."""

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metric_values = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def loss(trainable):
            one, _ = self.stateless_call(trainable, non_trainable, x)
            other, _ = self.stateless_call(trainable, non_trainable, ops.concatenate([x[1:], x[:1]]))
            similarities = ops.matmul(ops.normalize(one), ops.transpose(ops.normalize(other)))
            contrast = keras.losses.sparse_categorical_crossentropy(ops.arange(len(x)), similarities, from_logits=True)
            own = keras.losses.sparse_categorical_crossentropy(y, one, from_logits=True)
            return ops.mean(contrast) + ops.mean(own * ops.max(ops.abs(one), axis=0)[0])

        value, gradients = jax.value_and_grad(loss)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": value}, (trainable, non_trainable, optimizer, metric_values)


@pytest.mark.slow
@pytest.mark.usefixtures("rows_stay_with_replicas")
def test_a_loss_that_mixes_rows_reads_joined_ones():
    check_three_topologies(Alignment)


class Unsupported(TwoCalls):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def train_step(self, state, data):
        trainable, non_trainable, *_ = state
        x = data[0]

        def total(x):
            return ops.sum(self.stateless_call(trainable, non_trainable, x)[0])

        if self.how == "scan":
            lax.scan(lambda carry, _: (total(x), None), 0.0, None, length=2)
        elif self.how == "vmap":
            jax.vmap(total)(ops.stack([x, x]))
        else:
            jax.grad(lambda x: ops.sum(jax.grad(total)(x)))(x)
        return {}, state


@pytest.mark.parametrize(("how", "says"), [("scan", "jax.lax.scan"), ("vmap", "jax.vmap"), ("grad", "twice")])
def test_what_cannot_run_by_replicas_alone_is_an_error_that_says_so(how, says):
    with pytest.raises(lockstep.ModelError, match=rf"deterministic=True.*{says}"):
        trained(Unsupported, Topology(3, 2).strategy(), how=how)


# --- regressions: each of these once had other bits on one device than on two, or crashed the process ------------------------


SENSITIVE = {
    "nadam": (lambda: optimizers.Nadam(0.01), "mse", None),
    "lamb": (lambda: optimizers.Lamb(0.01), "mse", None),
    "focal": (lambda: optimizers.SGD(0.1), keras.losses.CategoricalFocalCrossentropy(), "softmax"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SENSITIVE)
def test_what_the_compiler_treats_in_another_way_for_several_devices(name):
    make, loss, activation = SENSITIVE[name]
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    y = np.eye(2, dtype="float32")[np.arange(8) % 2]

    def weights(devices):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        with Topology(2, devices).strategy().scope():
            inner = [layers.Dense(5, activation="gelu"), layers.Dense(2, activation=activation)]
            model = keras.Sequential([keras.Input((4,)), *inner])
            model.compile(make(), loss)
        model.fit(x, y, batch_size=8, epochs=5, shuffle=False, verbose=0)
        return digest(
            *(np.asarray(variable.value).tobytes() for variable in (*model.variables, *model.optimizer.variables))
        )

    assert len({weights(devices) for devices in (1, 2, 3)}) == 1


class ReturnsOneValueTwice(keras.Model):
    """A step whose new state holds one array twice, and a constant."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(2)
        self.kept = [self.add_weight(shape=(3,), trainable=False, initializer="zeros") for _ in range(3)]

    def call(self, x):
        return self.out(x)

    def train_step(self, state, data):
        logs, (trainable, (a, b, _), optimizer, metric_values) = super().train_step(state, data)
        total = a + b + 1.0
        constant = jax.numpy.asarray(np.arange(3, dtype="float32"))
        return logs, (trainable, [total, total, constant], optimizer, metric_values)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_state_may_hold_one_array_twice_and_constants(devices):
    with Topology(2, devices).strategy().scope():
        model = ReturnsOneValueTwice()
        model.compile("sgd", "mse")
    model.fit(np.ones((16, 4), "float32"), np.ones((16, 2), "float32"), batch_size=4, verbose=0)
    a, b, constant = (np.asarray(variable.value).tolist() for variable in model.kept)
    assert a == b == [15.0] * 3  # doubled and one more, four times
    assert constant == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("replicas", [1, 4])
def test_an_input_may_be_an_output(replicas):
    x = keras.Input((4,))
    with Topology(replicas, 2).strategy().scope():
        model = keras.Model(x, [x, layers.Dense(2)(x)])
        model.compile("sgd", ["mse", "mse"])
    rows = np.arange(36.0, dtype="float32").reshape(9, 4)
    same, _ = model.predict(rows, batch_size=4, verbose=0)
    np.testing.assert_array_equal(same, rows)


class Annealed(ReturnsOneValueTwice):
    alpha = 1.0

    def call(self, x):
        return self.out(x) * self.alpha

    def train_step(self, state, data):
        self.alpha = 1.0 + 0.01 * ops.cast(state[2][0], "float32")
        try:
            return keras.Model.train_step(self, state, data)
        finally:
            self.alpha = 1.0


def test_a_value_that_reaches_the_call_behind_our_back_is_an_error_that_says_so():
    with Topology(2, 1).strategy().scope():
        model = Annealed()
        model.compile("sgd", "mse")
    with pytest.raises(lockstep.ModelError, match="Fix: hand it over as an argument of the call"):
        model.fit(np.ones((16, 4), "float32"), np.ones((16, 2), "float32"), batch_size=8, verbose=0)


# --- public interface -------------------------------------------------------------------------------------------------------


def test_a_model_that_needs_the_whole_batch_runs_on_every_device_alike(caplog):
    with caplog.at_level("INFO", logger="lockstep"):
        keras.utils.set_random_seed(0)
        with Topology(3, 2).strategy().scope():
            model = Towers()
            model.compile("sgd")
        model.fit(np.ones((6, 4), "float32"), np.ones(6), batch_size=6, verbose=0)
    assert "it runs on the global batch, on every device alike" in caplog.text
    assert "deterministic, on a pool of" in caplog.text


def test_an_order_of_its_own_and_a_fixed_order_are_a_contradiction():
    with pytest.raises(lockstep.OptionError, match="leave cross_device_ops and communication_options out"):
        lockstep.MirroredStrategy(["cpu:0"], lockstep.ReductionToOneDevice, deterministic=True)
    strategy = lockstep.MirroredStrategy(["cpu:0"], lockstep.TreeAllReduce, deterministic=True)
    assert strategy.deterministic


def test_the_setting_of_the_process_is_the_default_and_can_be_overruled():
    assert not lockstep.MirroredStrategy(["cpu:0"]).deterministic
    lockstep.config.set_deterministic(cpu_threads=32)  # That of the tests: they have eight devices.
    try:
        assert lockstep.MirroredStrategy(["cpu:0"]).deterministic
        assert not lockstep.MirroredStrategy(["cpu:0"], deterministic=False).deterministic
    finally:
        lockstep.config.set_deterministic(False)
    assert not lockstep.MirroredStrategy(["cpu:0"]).deterministic


def test_another_thread_pool_is_refused_by_the_setting_and_named_by_the_strategy(monkeypatch, caplog):
    monkeypatch.setenv("PJRT_NPROC", "64")
    with pytest.raises(lockstep.DeviceError, match=r"a pool of 64 CPU threads, not 16.*cpu_threads=64"):
        lockstep.config.set_deterministic()
    with caplog.at_level("INFO", logger="lockstep"):
        lockstep.MirroredStrategy(["cpu:0"], deterministic=True)
    assert "on a pool of 64 CPU threads instead of 16" in caplog.text


START = """
import os, lockstep
{first}
strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=True)
print("--xla_gpu_deterministic_ops=true" in os.environ["XLA_FLAGS"], strategy.deterministic)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["", "lockstep.config.set_deterministic()", "lockstep.config.set_deterministic(cpu_threads=32)"]
)
def test_another_process_starts_with_the_fixed_pool(first, python):
    done = python(code=START.format(first=first), environ=dict.fromkeys(NOT_INHERITED), timeout=60)
    assert done.returncode == 0, done.stderr
    threads = "32" if "32" in first else "16"
    assert done.stdout.split() == ["True", "True"]
    assert f"deterministic, on a pool of {threads} CPU threads" in done.stderr
    assert "instead of" not in done.stderr


# --- self_check -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_self_check_gives_one_digest_for_any_devices_and_changes_nothing():
    keras.utils.set_random_seed(0)
    before = np.random.get_state()[1].copy()
    found = {Topology(4, devices).strategy().self_check() for devices in (1, 2)}
    assert len(found) == 1
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    with Topology(3, 2).strategy().scope() as strategy:
        model = mlp()
        model.compile("adam", logits_loss)
    weights = [np.asarray(variable.value) for variable in model.variables]
    assert strategy.self_check(model, np.ones((5, 20), "float32"), np.ones(5)) != found.pop()
    for variable, value in zip(model.variables, weights, strict=True):
        np.testing.assert_array_equal(np.asarray(variable.value), value)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"shard": "variables"}])
def test_self_check_repeats_what_a_call_draws_from_global_generators_and_counts(options):
    class Noisy(layers.Layer):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def call(self, x):
            self.calls += 1
            return x * random.random() * np.random.random() * self.calls

    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], **options)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Noisy(), layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    model.train_on_batch(x, y)
    before = model.layers[0].calls, random.getstate(), np.random.get_state()[2]
    assert len(strategy.self_check(model, x, y)) == 64
    assert (model.layers[0].calls, random.getstate(), np.random.get_state()[2]) == before


def test_self_check_names_what_differs():
    class Unsteady(keras.Model):
        count = 0

        def __init__(self):
            super().__init__()
            self.out = layers.Dense(1)

        def call(self, x):
            Unsteady.count += 1  # Each trace is another program.
            return self.out(x) * (1 + 1e-3 * Unsteady.count)

    with Topology(2, 2).strategy().scope() as strategy:
        model = Unsteady()
        model.compile("sgd", "mse")
    with pytest.raises(lockstep.DeterminismError, match=r"gave a different log .*loss.* bytes differ"):
        strategy.self_check(model, np.ones((4, 3), "float32"), np.ones((4, 1), "float32"))


def test_self_check_refuses_a_model_of_another_strategy():
    model = mlp()
    model.compile("sgd", "mse")
    with pytest.raises(lockstep.ModelError, match="is not a compiled model of MirroredStrategy"):
        lockstep.MirroredStrategy(["cpu:0"]).self_check(model, np.ones((2, 20)), np.ones((2, 3)))
