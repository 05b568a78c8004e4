"""``CentralStorageStrategy``: the same numbers, with all variables on one device."""

import jax
import keras
import numpy as np
import pytest
from jax import lax
from keras import layers

import lockstep
from lockstep.devices.placement import Placement
from lockstep.devices.xla_flags import compiler_options
from lockstep.execution.gradient_extraction import GradientProgram
from lockstep.strategies.central_storage import resolve_with_parameter_device
from tests.laws.cases import case_named
from tests.laws.compare import Central, assert_same, reference, run

QUICK = ["adam", "loss_scale"]
OTHERS = [
    "lamb",
    "muon",
    "schedule",
    "global_clipnorm",
    "gradient_accumulation",
    "ema",
    "ema_overwrite",
    "mixed_float16",
    "float8",
    "batch_normalization_synchronized",
    "variables_of_every_aggregation",
    "subclassed_and_built_by_fit",
    "own_train_step",
    "frozen_and_recompiled",
    "steps_per_execution",
    "not_compiled",
    "validation_split",
    "one_row",
]
SHAPES = {(37, 61), (61, 3)}  # of weights and moments, and of nothing else
X, Y = np.random.default_rng(0).normal(size=(24, 37)).astype("float32"), np.arange(24) % 3


# What these have besides the others is the same for the optimizer on any device: their steps are cut at the same place.
NIGHTLY = (
    "lamb",
    "schedule",
    "ema",
    "float8",
    "subclassed_and_built_by_fit",
    "frozen_and_recompiled",
    "validation_split",
)


def cases_and_homes():
    """Each case with the variables on a device that computes or on one that does not; both are in the nightly set."""
    for number, name in enumerate(QUICK + OTHERS):
        for home, other in (("cpu:1", 0), ("cpu:4", 1)):
            marks = [pytest.mark.slow] if home == "cpu:4" or name not in QUICK else []
            if name in NIGHTLY or (name not in QUICK and number % 2 == other):
                marks = [pytest.mark.nightly]
            yield pytest.param(name, home, marks=[pytest.mark.xdist_group(name), *marks])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "home"), list(cases_and_homes()))
def test_law_1_holds(name, home):
    case, only_fit = case_named(name), name != "adam"
    assert_same(run(case, Central(3, 2, home=home), only_fit), reference(case, only_fit), case.relative)


def made(home="cpu:4", optimizer="adam", kind=keras.Sequential):
    keras.utils.set_random_seed(0)
    strategy = lockstep.CentralStorageStrategy(["cpu:0", "cpu:1"], home, replicas=3)
    with strategy.scope():
        inner = [layers.Dense(61, activation="tanh"), layers.BatchNormalization(), layers.Dense(3)]
        model = kind([keras.Input((37,)), *inner], name="net")
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return strategy, model


def places_of(model):
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return {device.id for variable in variables for device in variable.value.devices()}


def weights_elsewhere(home, others):
    """Arrays of the shape of a weight, but for ``others``, that any other device holds."""
    known = {id(array) for array in others}
    arrays = [array for array in jax.live_arrays() if array.shape in SHAPES and id(array) not in known]
    return [array for array in arrays if {device.id for device in array.devices()} != {home}]


@pytest.mark.slow
@pytest.mark.parametrize("home", [0, 4])
def test_all_variables_are_on_the_parameter_device_and_no_other_keeps_any(home):
    before = jax.live_arrays()
    _, model = made(f"cpu:{home}")
    found = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: found.append(len(weights_elsewhere(home, before)))
    )
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[look], validation_data=(X, Y))
    model.predict(X, verbose=0)
    assert found == [0] * 6
    assert places_of(model) == {home}
    assert model(X).shape == (24, 3)  # It may be called as it is.
    assert not weights_elsewhere(home, before)


@pytest.mark.slow
def test_the_optimizer_makes_its_variables_there():
    _, model = made()
    places = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            places.extend(variable.value.devices() for variable in self.model.optimizer.variables[2:])

    model.fit(X, Y, verbose=0, callbacks=[Look()])
    assert places == [{jax.devices()[4]}] * 12  # two moments of six variables


@pytest.fixture
def programs(monkeypatch):
    """What each call of a gradient program was sent, by parts of the state."""
    sent = []
    original = GradientProgram.__call__

    def noted(self, state, batch):
        sent.append([list(part) for part in state])
        return original(self, state, batch)

    monkeypatch.setattr(GradientProgram, "__call__", noted)
    return sent


@pytest.mark.slow
def test_gradients_and_updates_are_compiled_with_the_options_of_all_steps(monkeypatch):
    found, jit = [], jax.jit

    def noted(function, **options):
        found.extend([options.get("compiler_options")] if "out_shardings" in options else [])
        return jit(function, **options)

    _, model = made("cpu:1")
    monkeypatch.setattr(jax, "jit", noted)
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    assert found == [compiler_options("cpu")] * 2


@pytest.mark.slow
@pytest.mark.parametrize("home", ["cpu:1", "cpu:4"])
def test_the_optimizers_variables_are_sent_nowhere(programs, home):
    _, model = made(home)
    model.fit(X, Y, batch_size=8, verbose=0)
    assert len(programs) == 3
    for trainable, _, optimizer, _ in programs:
        assert optimizer == [None] * len(model.optimizer.variables)
        # The gradients take the memory of the weights, but where a weight is no copy.
        assert {array.is_deleted() for array in trainable} == {home == "cpu:4"}


@pytest.mark.slow
def test_optimizer_variables_that_a_step_reads_are_sent(programs):
    _, model = made(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
    model.fit(X, Y, batch_size=8, verbose=0)
    names = [variable.name for variable in model.optimizer.variables]
    for _, _, optimizer, _ in programs:
        assert [n for n, value in zip(names, optimizer, strict=True) if value is not None] == ["dynamic_scale"]


@pytest.mark.parametrize(("kind", "times"), [("predict", 1), ("evaluate", 1), ("fit", 3)])
def test_weights_are_sent_once_for_all_batches_that_do_not_change_them(monkeypatch, kind, times):
    _, model = made()
    sent = []
    original = Placement.put

    def noted(self, tree, places=None):
        sent.extend(leaf for leaf in jax.tree.leaves(tree) if leaf.shape in SHAPES)
        return original(self, tree, places)

    monkeypatch.setattr(Placement, "put", noted)
    getattr(model, kind)(X, *[] if kind == "predict" else [Y], batch_size=8, verbose=0)
    assert len(sent) == len(SHAPES) * times


@pytest.mark.slow
def test_a_saved_model_loads_anywhere(tmp_path):
    _, model = made()
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(saved(model), saved(again), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def saved(model):
    return [np.asarray(variable.value) for variable in [*model.variables, *model.optimizer.variables]]


@pytest.mark.slow
def test_self_check_passes_and_changes_nothing():
    strategy, model = made()
    model.optimizer.build(model.trainable_variables)
    before = saved(model)
    assert len(strategy.self_check(model, X, Y)) == 64
    for ours, theirs in zip(saved(model), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_a_custom_loop_reads_the_variables_on_the_parameter_device():
    strategy, model = made()
    model.fit(X, Y, verbose=0)
    (batch,) = strategy.experimental_distribute_dataset([X])
    weights = [variable.value for variable in model.trainable_variables]
    found = strategy.run(lambda weights, rows: (rows @ weights[0]).sum(), args=(weights, batch))
    total = strategy.reduce("SUM", found, axis=None)
    np.testing.assert_allclose(total, (X @ np.asarray(weights[0])).sum(), rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(lambda weights, batch: strategy.run(lambda w, rows: rows @ w[0], args=(weights, batch)))(weights, batch)


# --- law 7 -------------------------------------------------------------------------------------------------------------


class Step(keras.Sequential):
    """A train_step as users write it; ``apply`` is what differs."""

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        x, y = data

        def loss_of(trainable, others):
            outputs, others = self.stateless_call(trainable, others, x, training=True)
            return self.compute_loss(x, y, outputs), others

        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable, others)
        logs, trainable, optimizer = self.apply(optimizer, gradients, trainable)
        return {"loss": loss, **logs}, (trainable, others, optimizer, metrics)


class Twice(Step):
    def apply(self, optimizer, gradients, trainable):
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {}, trainable, optimizer


class Never(Step):
    def apply(self, optimizer, gradients, trainable):
        return {}, [value - 0.1 * gradient for value, gradient in zip(trainable, gradients, strict=True)], optimizer


class Noisy(Step):
    def apply(self, optimizer, gradients, trainable):
        return {}, *self.optimizer.stateless_apply(optimizer, gradients, [value + 1 for value in trainable])


class Clipped(Step):
    def apply(self, optimizer, gradients, trainable):
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {}, [value.clip(-1, 1) for value in trainable], optimizer


class Counting(Step):
    def apply(self, optimizer, gradients, trainable):
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"steps": optimizer[0]}, trainable, optimizer


class Sometimes(Step):
    def apply(self, optimizer, gradients, trainable):
        def update():
            return self.optimizer.stateless_apply(optimizer, gradients, trainable)

        return {}, *lax.cond(gradients[0].sum() > 0, update, lambda: (trainable, optimizer))


class Mapped(Step):
    def apply(self, optimizer, gradients, trainable):
        def update(gradients):
            return self.optimizer.stateless_apply(optimizer, gradients, trainable)

        return {}, *jax.tree.map(lambda value: value[0], jax.vmap(update)([gradient[None] for gradient in gradients]))


class Jitted(Step):
    def apply(self, optimizer, gradients, trainable):
        return {}, *jax.jit(self.optimizer.stateless_apply)(optimizer, gradients, trainable)


REFUSED = {
    Twice: "Twice.train_step calls optimizer.stateless_apply 2 times.*MirroredStrategy",
    Never: "Never.train_step calls optimizer.stateless_apply 0 times",
    Noisy: "passes optimizer.stateless_apply other values than those of its state",
    Clipped: "returns other values than those that optimizer.stateless_apply returns",
    Counting: "uses the result of optimizer.stateless_apply",
    Sometimes: "Sometimes.train_step calls the optimizer inside jax.lax.cond",
    Mapped: "A model's train_step calls the optimizer under jax.vmap",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_step_that_cannot_be_cut_before_its_update_is_refused_and_loses_nothing(kind):
    _, model = made(kind=kind)
    before = model.get_weights()
    with pytest.raises(lockstep.ModelError, match=REFUSED[kind]):
        model.fit(X, Y, verbose=0)
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_an_update_inside_jit_is_found():
    (_, ours), (_, theirs) = made(kind=Jitted), made()
    for model in ours, theirs:
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"parameter_device": 3}, lockstep.DeviceError, "parameter_device: 3 is neither a name such as 'cpu:0'"),
        ({"parameter_device": "gpu:0"}, lockstep.DeviceError, "parameter_device: there is no device 'gpu:0' here"),
        ({"parameter_device": "cpu:9"}, lockstep.DeviceError, "10 CPU devices were asked for"),
        ({"compute_devices": []}, lockstep.DeviceError, "the list is empty"),
        ({"replicas": 0}, lockstep.OptionError, "replicas"),
        ({"cross_device_ops": "rings"}, lockstep.OptionError, "expected one of 'auto'"),
    ],
)
def test_a_wrong_argument_is_an_error_that_says_so(arguments, error, says):
    with pytest.raises(error, match=says):
        lockstep.CentralStorageStrategy(**arguments)


def test_central_storage_makes_cpu_devices_for_the_variables_too(python):
    program = 'import lockstep; print(lockstep.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2").parameter_device)'
    done = python(code=program, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "cpu:2\n"


@pytest.mark.filterwarnings("ignore:`build..` was called")
def test_central_storage_trains_a_model_whose_build_has_made_no_layers():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.last = layers.Dense(1)

        def call(self, x):
            return self.last(x)

    with lockstep.CentralStorageStrategy(["cpu:0", "cpu:1"]).scope():
        model = Net()
        model.build((None, 6))
        model.compile("adam", "mse")
    assert len(model.fit(np.ones((8, 6)), np.ones((8, 1)), verbose=0).history["loss"]) == 1


def test_central_storage_refuses_set_deterministic():
    lockstep.config.set_deterministic(cpu_threads=32)
    try:
        with pytest.raises(lockstep.OptionError, match="use MirroredStrategy"):
            lockstep.CentralStorageStrategy(["cpu:0"])
    finally:
        lockstep.config.set_deterministic(False)


def test_the_first_device_holds_the_variables_by_default(caplog):
    with caplog.at_level("INFO", logger="lockstep"):
        strategy = lockstep.experimental.CentralStorageStrategy(["cpu:2", "cpu:1"])
    assert strategy.parameter_device == "cpu:2"
    assert strategy.devices == ("cpu:2", "cpu:1")
    assert "gradients: all-reduce by XLA; variables and updates on cpu:2" in caplog.text


def test_several_accelerators_have_the_cpu_hold_them_and_one_holds_them_itself(monkeypatch):
    monkeypatch.setattr("lockstep.strategies.central_storage.platform_of", lambda device: "gpu")
    assert resolve_with_parameter_device(["cpu:2", "cpu:1"], None)[1] == jax.devices()[0]
    assert resolve_with_parameter_device(["cpu:2"], None)[1] == jax.devices()[2]


@pytest.mark.slow
def test_a_model_that_is_not_compiled_runs_on_the_parameter_device_and_says_so(caplog):
    with caplog.at_level("INFO", logger="lockstep"):
        _, model = made()
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
        model.fit(X, Y, verbose=0)
    assert "Model 'net': it is not compiled, so its replicas run one after the other, on cpu:4." in caplog.text
    assert places_of(model) == {4}
