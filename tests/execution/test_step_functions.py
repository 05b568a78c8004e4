"""The functions that Keras's ``fit`` calls."""

import contextlib
import functools

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.devices.placement import Placement, placement_on
from lockstep.execution import spmd
from lockstep.execution.compiled_step import CompiledTrainStep, dispatch_lock
from lockstep.execution.executors import SpmdExecutor


class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        return 2 * x


class Probe(layers.Layer):
    """Notes, when it is called, how many losses the layers after it know."""

    known, seen = (), []  # of the class: Keras would track those of a layer

    def call(self, x):
        self.seen.append(sum(len(layer._loss_ids) for layer in self.known))
        return x


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["split", "global batch"])
def test_layers_do_not_know_losses_of_earlier_calls(deterministic, kind):
    """Keras keeps the ids of such losses, and a new loss of another layer may have the same id: it would be lost or counted twice."""
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2, deterministic=deterministic).scope():
        inputs = keras.Input((4,))
        x = Probe()(inputs)
        for _ in range(3):
            x = Penalty()(x)
        if kind == "global batch":
            x = x - ops.mean(x, axis=0)
        model = keras.Model(inputs, 0 * x)
        model.compile("sgd", "mse")
    Probe.seen, Probe.known = [], [layer for layer in model.layers if isinstance(layer, Penalty)]
    loss = model.evaluate(np.ones((7, 4)), np.zeros((7, 4)), batch_size=4, verbose=0)
    assert loss == pytest.approx(1 + 4 + 16)
    assert len(Probe.seen) > 2
    assert set(Probe.seen) == {0}


@pytest.mark.parametrize("options", [{}, {"shard": "variables"}])
def test_train_on_batch_puts_only_what_is_not_on_the_devices(options, monkeypatch):
    """The metrics, which Keras sets to zero: with many variables, JAX needs longer to find that they are there than the step takes."""
    with lockstep.MirroredStrategy(["cpu:0", "cpu:1"], **options).scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
        model.compile("adam", "mse")
    puts, original = [], Placement.put

    def put(self, tree, *shardings):
        puts.append([leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)])
        return original(self, tree, *shardings)

    monkeypatch.setattr(Placement, "put", put)
    for _ in range(2):
        puts.clear()
        model.train_on_batch(np.ones((4, 4), "float32"), np.ones((4, 2), "float32"))
    assert sum(map(len, puts)) == len(model.metrics_variables)


@pytest.fixture
def scanning(monkeypatch):
    """Steps of CPU devices are scanned as well; gives the numbers of batches of all programs that were started."""
    started, run = [], CompiledTrainStep.__call__

    def counted(self, state, batch):
        started.append(len(batch) if isinstance(batch[0], tuple) else 1)
        return run(self, state, batch)

    monkeypatch.setattr(SpmdExecutor, "scans_steps", True)
    monkeypatch.setattr(CompiledTrainStep, "__call__", counted)
    return started


ROWS = 45  # 11 batches of 4 rows and one of 1
X, Y = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32"), np.arange(ROWS) % 3


def compiled(steps, scope, accumulate=None, has_noise=True):
    keras.utils.set_random_seed(1)
    with scope:
        noise = [layers.BatchNormalization(synchronized=True), layers.Dropout(0.3, seed=2)] if has_noise else []
        # A bias before BatchNorm has no gradient but rounding, of which Adam makes steps.
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8, use_bias=not noise), *noise, layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulate)
        model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=steps)
    return model


def trained(model, *callbacks):
    losses = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    data = {"x": X, "y": Y, "batch_size": 4, "shuffle": False}
    history = model.fit(**data, epochs=2, verbose=0, callbacks=[note, *callbacks]).history
    return [losses, *history.values(), *model.get_weights(), *(x.numpy() for x in model.optimizer.variables)]


def mirrored(devices=2, **options):
    return lockstep.MirroredStrategy([f"cpu:{number}" for number in range(devices)], replicas=2, **options).scope()


@functools.cache
def three_steps_by_plain_keras():
    return trained(compiled(3, contextlib.nullcontext(), has_noise=False))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.xdist_group("steps by plain Keras")
def test_scanned_steps_have_the_numbers_of_plain_keras(scanning, devices):
    found = trained(compiled(3, mirrored(devices), has_noise=False))
    assert scanning == 2 * [3, 3, 3, 1, 1, 1]  # The last batch has another shape.
    for ours, expected in zip(found, three_steps_by_plain_keras(), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"shard": "variables"}], ids=["replicated", "sharded"])
def test_scanned_steps_keep_noise_statistics_and_accumulation(scanning, monkeypatch, options):
    monkeypatch.setattr("lockstep.devices.placement.SHARD_FROM", 3)
    found = trained(compiled(3, mirrored(**options), accumulate=2))
    assert max(scanning) == 3
    monkeypatch.setattr(SpmdExecutor, "scans_steps", False)
    for ours, expected in zip(found, trained(compiled(3, mirrored(**options), accumulate=2)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_steps_are_not_scanned_if_a_hook_needs_each(scanning):
    trained(compiled(3, mirrored()), lockstep.callbacks.NanGuard())
    trained(compiled(1, mirrored()))
    assert set(scanning) == {1}


@pytest.mark.slow
def test_an_error_in_the_input_comes_after_the_steps_before_it(scanning):
    def broken():
        for start in range(0, 20, 4):
            if start == 16:
                raise OSError("the disk is gone")
            yield X[start : start + 4], Y[start : start + 4]

    model = compiled(3, mirrored())
    with pytest.raises(OSError, match="the disk is gone"):
        model.fit(broken(), epochs=1, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 4
    assert scanning == [3, 1]


@pytest.mark.parametrize("strategy", [{}, {"deterministic": True}])
def test_an_error_for_lack_of_memory_says_what_to_do(strategy):
    class Large(keras.Sequential):
        def train_step(self, state, data):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6.13GiB.")

    with lockstep.MirroredStrategy(["cpu:0"], replicas=2, **strategy).scope():
        model = Large([keras.Input((2,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    before = model.get_weights()
    with pytest.raises(jax.errors.JaxRuntimeError, match="6\\.13GiB") as caught:
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert any("Fix: a smaller batch_size" in note for note in caught.value.__notes__)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


class FailsLater(keras.layers.Layer):
    """Fails when the step runs, after it was started: the step waits for the kernel before it."""

    def call(self, x):
        def host(x):
            if is_failing:
                raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6.13GiB.")
            return np.asarray(x)

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x + 0 * jax.pure_callback(host, shape, jax.lax.stop_gradient(x), vmap_method="sequential")


is_failing = False


@jax.jit
def slowly(kernel, turns):
    matrix = jax.lax.fori_loop(
        0, turns, lambda _, matrix: matrix @ matrix / 500, jax.numpy.ones((500, 500)) + kernel[0, 0]
    )
    return kernel + 0 * matrix[0, 0]


X_ONES, Y_ONES = np.ones((4, 2)), np.ones((4, 1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras, of each generator
@pytest.mark.parametrize(
    ("call", "is_lost"),
    [
        (lambda model: model.fit(X_ONES, Y_ONES, verbose=0), True),
        (lambda model: model.fit((batch for batch in [(X_ONES, Y_ONES)]), verbose=0), True),
        (lambda model: model.evaluate(X_ONES, Y_ONES, verbose=0), False),
        (lambda model: model.train_on_batch(X_ONES, Y_ONES), True),
    ],
    ids=["fit", "fit of a generator", "evaluate", "train_on_batch"],
)
def test_a_step_that_fails_on_its_device_after_it_was_started_is_heard_of(call, is_lost, monkeypatch):
    """Keras alone makes numbers of the logs, and drops the error of those that it can't make."""
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
        model = keras.Sequential([keras.Input((2,)), layers.Dense(2), FailsLater(), layers.Dense(1)])
        model.compile("sgd", "mse")
    call(model)
    slowly(model.layers[0].kernel.value, 0)  # It is compiled.
    monkeypatch.setitem(globals(), "is_failing", True)
    model.layers[0].kernel.assign(slowly(model.layers[0].kernel.value, 200))
    with pytest.raises(jax.errors.JaxRuntimeError, match="6\\.13GiB") as caught:
        call(model)
    notes = " ".join(caught.value.__notes__)
    assert "Fix: a smaller batch_size" in notes
    assert ("values of the model's variables are lost" in notes) == is_lost


def test_outputs_of_several_steps_are_joined_while_no_other_thread_starts_a_program(monkeypatch):
    """Devices that got programs with collectives in different orders would wait for each other forever."""
    model = compiled(2, mirrored())
    concatenate, is_held = jax.numpy.concatenate, []

    def noted(parts, *arguments, **options):
        if not isinstance(parts[0], jax.core.Tracer):
            is_held.append(dispatch_lock._is_owned())
        return concatenate(parts, *arguments, **options)

    monkeypatch.setattr(jax.numpy, "concatenate", noted)
    joined = model.predict(X[:8], batch_size=4, verbose=0)
    assert is_held == [True]
    np.testing.assert_allclose(joined, model.predict_on_batch(X[:8]), rtol=1e-5, atol=1e-6)


class Interrupts(keras.callbacks.Callback):
    async_safe = True  # Keras does not wait for the step.

    def on_train_batch_end(self, batch, logs=None):
        raise KeyError("of the user")


@pytest.mark.slow
def test_after_another_error_no_later_call_hears_of_a_failed_step(monkeypatch):
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
        model = keras.Sequential([keras.Input((2,)), layers.Dense(2), FailsLater(), layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(X_ONES, Y_ONES, verbose=0)
    good = model.evaluate(X_ONES, Y_ONES, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    state = [variable.numpy() for variable in variables]
    slowly(model.layers[0].kernel.value, 0)  # It is compiled.
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "is_failing", True)
        model.layers[0].kernel.assign(slowly(model.layers[0].kernel.value, 200))
        with pytest.raises(KeyError, match="of the user"):
            model.fit(X_ONES, Y_ONES, verbose=0, callbacks=[Interrupts()])
        with pytest.raises(jax.errors.JaxRuntimeError, match="6\\.13GiB"):
            model.get_weights()
    for variable, value in zip(variables, state, strict=True):
        variable.assign(value)
    assert model.evaluate(X_ONES, Y_ONES, verbose=0) == good


@pytest.mark.parametrize("strategy", [{}, {"deterministic": True}])
def test_a_later_step_that_fails_says_that_the_values_are_lost(strategy, monkeypatch):
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2, **strategy).scope():
        model = keras.Sequential([keras.Input((2,)), layers.Dense(2), FailsLater(), layers.Dense(1)])
        model.compile("sgd", "mse")
    fail = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: monkeypatch.setitem(globals(), "is_failing", True)
    )
    with pytest.raises(Exception, match="6\\.13GiB") as caught:
        model.fit(np.ones((12, 2)), np.ones((12, 1)), batch_size=4, callbacks=[fail], verbose=0)
    assert "values of the model's variables are lost" in " ".join(caught.value.__notes__)
    with pytest.raises(RuntimeError, match="deleted") as caught:
        model.evaluate(np.ones((12, 2)), np.ones((12, 1)), verbose=0)
    assert "values of the model's variables are lost" in " ".join(caught.value.__notes__)


def two_devices():
    return lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).scope()


INPUTS = np.random.default_rng(0).normal(size=(100, 6)).astype("float32")
TARGETS = INPUTS[:, :1] + 1


@pytest.mark.slow
def test_a_deterministic_step_leaves_its_state_in_copies_until_it_is_read(monkeypatch):
    read, whole = [], spmd.replicated_arrays
    monkeypatch.setattr(spmd, "replicated_arrays", lambda *given: read.append(1) or whole(*given))
    with lockstep.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=True).scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3), layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(INPUTS, TARGETS, batch_size=20, verbose=0)
    assert len(read) == 4  # parts of the state, after five steps
    model.fit(INPUTS, TARGETS, batch_size=20, verbose=0, callbacks=[ReadsWeights()])
    assert len(read) == 4 * (1 + 5)


def test_a_program_of_each_device_is_traced_and_compiled_once_with_the_settings_of_its_caller():
    placement = placement_on(jax.devices()[:2], 2)
    numbers, found = spmd.to_per_device(np.ones(3, "float32"), placement), []
    program = spmd.PerDeviceProgram(lambda x: [x + jax.numpy.arange(3.0)], placement)

    def note(event, seconds, **_):
        found.append(event) if "backend_compile" in event else None

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        with jax.enable_x64(True):
            first, second = (program(numbers)[0] for _ in range(2))
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert {copy.dtype for copy in (*first, *second)} == {np.dtype("float64")}
    assert len(found) == 2


class ReadsWeights(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.jax_state_sync()


class ReturnsVariable(keras.Model):
    """A model whose second output is a variable, which its loss reads."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x), self.scale

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        out, scale = y_pred
        return ops.mean(ops.square(ops.exp(scale) * out - y))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return self.get_metrics_result()


@pytest.mark.slow
def test_a_variable_that_a_model_returns_is_trained():
    def left(scope):
        keras.utils.set_random_seed(0)
        with scope():
            model = ReturnsVariable()
            model.build((None, 6))
            model.compile(keras.optimizers.SGD(0.05))
        losses = [model.train_on_batch(INPUTS[:8], TARGETS[:8]) for _ in range(3)]
        losses.append(model.test_on_batch(INPUTS[:8], TARGETS[:8]))
        model.scale.assign(0.5)
        losses.append(model.test_on_batch(INPUTS[:8], TARGETS[:8]))
        model.fit(INPUTS, TARGETS, batch_size=8, shuffle=False, verbose=0)
        return [float(model.scale.numpy()), *map(float, losses)]

    plain, ours = left(contextlib.nullcontext), left(two_devices)
    assert plain[0] != 0.5
    np.testing.assert_allclose(ours, plain, rtol=1e-5)
