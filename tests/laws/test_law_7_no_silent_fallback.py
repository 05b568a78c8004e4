"""Law 7: an impossible request raises one clear error that changes nothing and loses nothing."""

import jax
import keras
import numpy as np
import pytest

import lockstep

from .compare import Topology, state_of


def failing(python, code: str) -> str:
    done = python(code=code, timeout=120)
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu:0", "/device:CPU:0"], "are the same device. Fix: for several replicas on one device write"),
        (["cpu:1", jax.local_devices()[1]], "are the same device"),
        (["gpu:0"], "devices: there is no device 'gpu:0' here; there are: cpu:0, cpu:1, .*, cpu:7"),
        (["/gpu:0", "/gpu:1"], "devices: there is no device '/gpu:0' here"),
        (["cuda0"], "devices: unknown device name 'cuda0'"),
        (["cpu:x"], "devices: unknown device name"),
        ([], "the list is empty"),
        ("cpu:0", r"expected a list of names such as \['gpu:0'\], got 'cpu:0'"),
        ({"cpu:0", "cpu:1"}, "expected a list of names"),
        (2, r"expected a list of names such as \['gpu:0'\], got 2"),
        ([0, 1], "0 is neither a name such as 'gpu:0' nor a JAX device"),
        (["cpu:9"], "10 CPU devices were asked for, but JAX has already started with 8"),
    ],
)
def test_a_wrong_device_is_an_error_that_says_what_there_is(devices, message):
    with pytest.raises(lockstep.DeviceError, match=message):
        lockstep.MirroredStrategy(devices)


def test_cpu_devices_asked_for_too_late_are_an_error_that_says_what_to_set(python):
    text = failing(
        python,
        "import keras; keras.optimizers.Adam(); import lockstep; lockstep.MirroredStrategy(['cpu:0', 'cpu:1'])",
    )
    assert "Fix: make the strategy before the first array, model or optimizer" in text
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=2" in text
    assert "PJRT_NPROC=8" in text


def test_a_thread_pool_that_would_dead_lock_is_refused(python):
    start = "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'; "
    start += "os.environ['PJRT_NPROC'] = '2'; import jax; jax.devices(); import lockstep; "
    for use in ("lockstep.MirroredStrategy()", "lockstep.MirroredStrategy(['cpu:0', 'cpu:1'])"):
        assert "2 CPU devices need a pool of 8 threads" in failing(python, start + use)
    done = python(code=start + "lockstep.MirroredStrategy(['cpu:1'])", timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("before", ["", "import keras; keras.utils.set_random_seed(0); keras.backend.clear_session()"])
def test_two_cpu_devices_are_made_whatever_was_imported_before(before, python):
    program = f"""
{before}
import jax, keras, lockstep, numpy as np
with lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
model.fit(np.ones((33, 3)), np.ones((33, 1)), batch_size=8, epochs=20, verbose=0)
assert len(model.trainable_variables[0].value.sharding.device_set) == 2
"""
    done = python(code=program, timeout=120)
    assert done.returncode == 0, done.stderr


def test_workers_of_lockstep_run_that_train_by_themselves_are_logged(monkeypatch, caplog):
    monkeypatch.setenv("WORLD_SIZE", "2")  # of torchrun, say, which may start one process for each node
    with caplog.at_level("INFO", logger="lockstep"):
        lockstep.MirroredStrategy(["cpu:0"])
    assert "by itself" not in caplog.text
    monkeypatch.setenv("LOCKSTEP_GENERATION", "0")
    with caplog.at_level("INFO", logger="lockstep"):
        lockstep.MirroredStrategy(["cpu:0"])
    assert (
        "lockstep run has started 2 workers, and with this strategy each of them trains by itself. Fix: " in caplog.text
    )


@pytest.mark.parametrize("replicas", [0, -1, 1.5, "2", True])
def test_a_wrong_number_of_replicas_is_an_error(replicas):
    with pytest.raises(lockstep.OptionError, match="replicas: expected a whole number of at least 1, got"):
        lockstep.MirroredStrategy(replicas=replicas)


@pytest.mark.parametrize("ops", ["rings", 3, keras.layers.Dense])
def test_unknown_cross_device_ops_are_an_error(ops):
    with pytest.raises(lockstep.OptionError, match=r"expected one of 'auto', .* \(array, axis\) -> array, got "):
        lockstep.MirroredStrategy(cross_device_ops=ops)


def test_a_wrong_count_of_logical_cpu_devices_is_an_error():
    for count in (0, "3", 2.0, True):
        with pytest.raises(lockstep.OptionError, match=f"count: expected a whole number of at least 1, got {count!r}"):
            lockstep.config.set_logical_cpu_devices(count)
    with pytest.raises(lockstep.DeviceError, match="already started with 8"):
        lockstep.config.set_logical_cpu_devices(2)
    lockstep.config.set_logical_cpu_devices(8)  # what there is may be asked for again


def test_keras_of_another_shape_is_refused(monkeypatch):
    owner = next(cls for cls in keras.Model.__mro__ if "jax_state_sync" in vars(cls))
    monkeypatch.delattr(owner, "jax_state_sync")
    with pytest.raises(
        lockstep.BackendError, match=r"has no Model.jax_state_sync; this version of Lockstep knows Keras 3\.15"
    ):
        lockstep.MirroredStrategy()


def test_keras_on_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(lockstep.BackendError, match="Keras runs on torch"):
        lockstep.MirroredStrategy()


# --- bad input changes nothing and loses nothing -------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
Y = X[:, :1]


def network():
    keras.utils.set_random_seed(0)
    with Topology(3, 2).strategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    model.fit(X, Y, batch_size=5, verbose=0)
    return model


def assert_unharmed(model, before):
    """Assert that the variables are unchanged, and that the model still trains and predicts."""
    after = state_of(model)
    for name, value in before.items():
        if "metric" not in name and "mean/" not in name and "loss/" not in name:
            np.testing.assert_array_equal(value, after[name], err_msg=name)
    assert np.isfinite(model.fit(X, Y, batch_size=5, verbose=0).history["loss"]).all()
    assert model.predict(X, verbose=0).shape == (12, 1)


BAD = {
    "fit": lambda model: model.fit(np.ones((12, 5), "float32"), Y, verbose=0),
    "evaluate": lambda model: model.evaluate(np.ones((12, 5), "float32"), Y, verbose=0),
    "predict": lambda model: model.predict(np.ones((12, 5), "float32"), verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(np.ones((6, 5), "float32"), Y[:6]),
    "test_on_batch": lambda model: model.test_on_batch(np.ones((6, 5), "float32"), Y[:6]),
    "predict_on_batch": lambda model: model.predict_on_batch(np.ones((6, 5), "float32")),
    "lengths": lambda model: model.train_on_batch(X[:6], Y[:5]),
    "scalar": lambda model: model.train_on_batch(np.float32(1), Y[:5]),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", BAD)
def test_a_batch_of_the_wrong_shape_loses_nothing(call, caplog):
    model = network()
    before = state_of(model)
    with caplog.at_level("INFO", logger="lockstep"), pytest.raises(ValueError, match=r"shape|dimension|axis|expected"):
        BAD[call](model)
    assert "global batch" not in caplog.text  # Nothing runs there.
    assert_unharmed(model, before)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ((6, 5), r"their shapes are \(6, 4\), \(5, 1\)\. Fix: give all arrays the same number of rows"),
        ((0, 0), r"their shapes are \(0, 4\), \(0, 1\)\. Fix: leave out batches without rows"),
    ],
    ids=["unequal", "empty"],
)
def test_the_lengths_of_a_batch_are_named(rows, says):
    with pytest.raises(lockstep.InputError, match=rf"one common length .* {says}"):
        network().train_on_batch(X[: rows[0]], Y[: rows[1]])


@pytest.mark.slow
@pytest.mark.parametrize("failure", [ValueError("no more"), KeyboardInterrupt()])
def test_an_input_that_fails_in_the_middle_loses_nothing(failure):
    def batches():
        yield X[:5], Y[:5]
        yield X[5:10], Y[5:10]
        yield X[5:10], Y[5:10]
        yield X[5:10], Y[5:10]
        raise failure

    model = network()
    steps = int(model.optimizer.iterations)
    with pytest.raises(type(failure)):
        model.fit(batches(), shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == steps + 4
    assert np.isfinite(model.fit(X, Y, batch_size=5, verbose=0).history["loss"]).all()


def test_averages_survive_evaluate():
    """Plain Keras deletes the averages of an optimizer with use_ema in the first evaluate after fit."""
    with Topology(2, 2).strategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(0.1, use_ema=True), loss="mse")
    for _ in range(2):
        model.fit(X, Y, verbose=0)
        model.evaluate(X, Y, verbose=0)
    assert all(np.isfinite(value).all() for value in state_of(model).values())


def test_a_class_that_makes_its_own_function_is_refused():
    class Own(keras.Model):
        def make_train_function(self, force=False):
            return super().make_train_function(force)

    with (
        Topology(2, 2).strategy().scope(),
        pytest.raises(lockstep.ModelError, match="Own makes its own train function"),
    ):
        Own()


@pytest.mark.slow
def test_a_sparse_batch_is_named_as_what_it_is():
    sparse = jax.experimental.sparse.BCOO.fromdense(X)
    with pytest.raises(lockstep.InputError, match="A sparse array cannot be split into replicas yet"):
        network().predict_on_batch(sparse)


@pytest.mark.slow
def test_a_model_that_is_not_compiled_runs_on_the_first_device_and_says_so(caplog):
    with caplog.at_level("INFO", logger="lockstep"), lockstep.MirroredStrategy(["cpu:2", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="net")
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(X, Y, verbose=0)
    assert "Model 'net': it is not compiled, so its replicas run one after the other, on cpu:2." in caplog.text
    assert {device.id for device in model.trainable_variables[0].value.devices()} == {2}


def test_a_sum_over_the_rows_in_a_variable_without_aggregation_is_logged(caplog):
    class Total(keras.layers.Layer):
        def build(self, shape):
            self.total = self.add_weight(shape=(), initializer="zeros", trainable=False, name="total")

        def call(self, x):
            self.total.assign(self.total + keras.ops.sum(x))
            return x

    with Topology(2, 2).strategy().scope():  # A program with handlers and no level sees it, too.
        model = keras.Sequential([keras.Input((4,)), Total(), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
    messages = [record.getMessage() for record in caplog.records if "global batch" in record.getMessage()]
    assert len(messages) == 1
    assert "/total' has no aggregation, and add works on a sum over the rows, layer 'total', test_law_7" in messages[0]
