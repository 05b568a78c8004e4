"""``ModelParallelStrategy``: the numbers of one device on any mesh, the same bits on the same mesh, and no rule that fails in silence."""

import contextlib
import dataclasses
import functools
import random
import re
import shutil
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep._keras.trainer import variables_of
from lockstep._keras.variable_placement import set_from_host
from lockstep.execution.model_parallel import model_shardings
from lockstep.execution.model_parallel.model_shardings import MeshAxes
from lockstep.strategies.options import override_devices
from lockstep.tools.plan.hlo import collectives
from tests.laws.cases import case_named, logits_loss, with_topologies
from tests.laws.compare import Mesh, assert_same, bytes_by_device, reference, run

SHARDED = {"shard": "variables"}
RECOMPUTED = SHARDED | {"recompute": "blocks"}
CPUS = [f"cpu:{number}" for number in range(4)]
# Each shards, traces or updates variables in another way.
IN_THE_SUITE = (
    "add_loss",
    "adversaries",
    "attention",
    "conv2d",
    "gradient_accumulation",
    "last_batch_of_one",
    "muon",
    "own_train_step",
    "run_eagerly",
    "variables_of_every_aggregation",
)


def mesh_of(number):
    """One mesh for each case, and variables that are also sharded over the rows' axis for every second."""
    sizes = ((1, 2), (2, 2), (2, 1), (1, 3), (2, 2))[number % 5]
    return Mesh(1, sizes[0] * sizes[1], RECOMPUTED if number % 2 else {}, sizes)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU of some slice, as JAX describes it."""

    id: int
    slice_index: int
    platform = "tpu"
    device_kind = "TPU"
    process_index = core_on_chip = 0

    @property
    def coords(self):
        return self.id % 2, self.id % 4 // 2, 0


def test_devices_of_several_machines_or_slices_are_laid_on_a_mesh(monkeypatch):
    monkeypatch.setattr(jax, "make_mesh", None)  # It refuses them.
    strategy = lockstep.ModelParallelStrategy({"data": 1, "model": 2}, {}, devices=["cpu:0", "cpu:1"])
    assert [device.id for device in strategy._placement.devices] == [0, 1]
    chips = [Chip(number, number // 4) for number in range(8)]
    found = MeshAxes({"data": 4, "model": 2})._arranged(chips)
    assert [{chip.slice_index for chip in row} for row in found] == [{0}, {0}, {1}, {1}]
    assert MeshAxes({"data": 2, "model": 2})._arranged(chips[:4]).shape == (2, 2)
    with pytest.raises(lockstep.DeviceError, match="2 slices of TPUs do not divide the axis 'data'"):
        MeshAxes({"data": 1, "model": 8})._arranged(chips)


@pytest.mark.parametrize(("case", "mesh"), list(with_topologies(IN_THE_SUITE, mesh_of)))
def test_law_m1_numbers_are_those_of_one_device(shard_all, case, mesh):
    assert_same(run(case, mesh, only_fit=True), reference(case, only_fit=True), case.relative)


@pytest.mark.slow
def test_law_m1_holds_for_evaluate_predict_and_single_batches(shard_all):
    case = case_named("dicts")
    assert_same(run(case, Mesh(1, 4, SHARDED, (2, 2))), reference(case), case.relative)


def network(width=64, hidden=256):
    inputs = keras.Input((width,))
    x = layers.Dense(hidden, activation="relu", name="up")(inputs)
    x = layers.Dropout(0.25, seed=3)(x)
    x = layers.BatchNormalization()(layers.Dense(width, name="down")(x))
    model = keras.Model(inputs, layers.Dense(3, name="last")(x), name="net")
    model.compile("adam", logits_loss)
    return model


MEGATRON = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}


def batch(rows=18, width=64):
    """By 9 these are two batches that a mesh of two rows divides unevenly, and one program."""
    return np.random.default_rng(0).normal(size=(rows, width)).astype("float32"), np.arange(rows) % 3


def train(mesh=(2, 2), epochs=2, callbacks=(), strategy=None, **options):
    keras.utils.set_random_seed(0)
    data, model = mesh
    strategy = strategy or lockstep.ModelParallelStrategy(
        {"data": data, "model": model}, devices=CPUS[: data * model], **options
    )
    with strategy.scope():
        net = network()
    history = net.fit(*batch(), batch_size=9, epochs=epochs, verbose=0, callbacks=list(callbacks)).history
    return strategy, net, history


@functools.cache
def trained():
    """The run without options, once in each process; nothing may change it, and tests of it have one ``xdist_group``."""
    return train()


@functools.cache
def on_one_device():
    """The history of the same run on one device."""
    return train(strategy=lockstep.MirroredStrategy(CPUS[:1]))[2]


in_one_process = pytest.mark.xdist_group(__name__)


def values(model):
    return [np.asarray(variable.value) for variable in (*model.weights, *model.optimizer.variables)]


def assert_equal_bits(ours, theirs):
    for one, other in zip(values(ours), values(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


class StopAfter(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            raise KeyboardInterrupt


@pytest.mark.optimized
@pytest.mark.parametrize("options", [{}, pytest.param(RECOMPUTED, marks=pytest.mark.slow)], ids=["whole", "recomputed"])
def test_law_m2_a_mesh_gives_the_same_bits_also_after_a_resume(tmp_path, options):
    _, expected, history = train(**options)
    with pytest.raises(KeyboardInterrupt):
        train(**options, callbacks=[lockstep.callbacks.BackupAndRestore(tmp_path), StopAfter()])
    _, resumed, curve = train(**options, callbacks=[lockstep.callbacks.BackupAndRestore(tmp_path)])
    assert curve == history
    assert_equal_bits(resumed, expected)


@pytest.mark.slow
@in_one_process
def test_a_checkpoint_knows_no_mesh(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(callbacks=[lockstep.callbacks.BackupAndRestore(tmp_path / "broken off"), StopAfter()])
    for other in (lockstep.MirroredStrategy(CPUS[:1]), None):
        folder = shutil.copytree(tmp_path / "broken off", tmp_path / f"{other is None}")
        backup = lockstep.callbacks.BackupAndRestore(folder)
        _, resumed, curve = train((1, 4), callbacks=[backup], strategy=other)
        np.testing.assert_allclose(curve["loss"], on_one_device()["loss"], rtol=1e-5)
        assert resumed.optimizer.iterations == 4


@pytest.mark.slow
@in_one_process
def test_a_data_parallel_checkpoint_resumes_on_a_mesh(tmp_path):
    strategy = lockstep.MirroredStrategy(CPUS[:2], replicas=1)
    with pytest.raises(KeyboardInterrupt):
        train(strategy=strategy, callbacks=[lockstep.callbacks.BackupAndRestore(tmp_path), StopAfter()])
    _, _, curve = train(callbacks=[lockstep.callbacks.BackupAndRestore(tmp_path)])
    np.testing.assert_allclose(curve["loss"], on_one_device()["loss"], rtol=1e-5)


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["whole", "sharded"])
@in_one_process
def test_each_device_holds_what_the_layout_says(options):
    strategy, model, _ = train(**options) if options else trained()
    layout = strategy.layout(model)
    assert set(bytes_by_device([*model.weights, *model.optimizer.variables]).values()) == {layout.device_bytes}
    axes = {row.path.rpartition("adam")[2].lstrip("_0123456789"): row.axes for row in layout.variables}
    data = "data" if options else None
    assert axes["up/kernel"] == axes["/up_kernel_momentum"] == (data, "model")
    assert axes["down/kernel"] == axes["/down_kernel_velocity"] == ("model", data)
    assert axes["last/kernel"] == (None, None)
    assert "'down'" in str(layout)  # The reason names where the all-reduce is.


def test_variables_are_sharded_when_they_are_made_and_when_they_are_loaded(tmp_path):
    strategy = lockstep.ModelParallelStrategy({"data": 1, "model": 2}, MEGATRON, devices=CPUS[:2])
    with strategy.scope():
        model = network()
        kernel = model.get_layer("up").kernel
        assert len({str(shard.index) for shard in kernel.value.addressable_shards}) == 2
    model.save_weights(tmp_path / "some.weights.h5")
    before = np.asarray(kernel)
    kernel.assign(np.zeros(kernel.shape))
    model.load_weights(tmp_path / "some.weights.h5")
    assert len({str(shard.index) for shard in kernel.value.addressable_shards}) == 2
    np.testing.assert_array_equal(np.asarray(kernel), before)


@pytest.mark.slow
def test_no_device_has_the_whole_of_a_large_variable_while_it_is_made():
    compiled = []

    class Recording(keras.initializers.RandomUniform):
        def __call__(self, shape, dtype=None):
            value = super().__call__(shape, dtype)
            compiled.append(isinstance(value, jax.core.Tracer))
            return value

    def table():
        layer = layers.Embedding(
            2048, 4096, embeddings_initializer=Recording(seed=1), name="table"
        )  # Large for Keras: 250 MiB on 8 devices.
        layer.build()
        return layer.embeddings

    expected = np.asarray(table())
    with lockstep.ModelParallelStrategy({"data": 1, "model": 8}, devices=[f"cpu:{n}" for n in range(8)]).scope():
        found = table()
    assert compiled == [False, True]
    assert [shard.data.nbytes for shard in found.value.addressable_shards] == [expected.nbytes // 8] * 8
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_set_from_host_puts_a_shard_on_each_device_and_the_whole_on_none(monkeypatch):
    with lockstep.ModelParallelStrategy({"data": 1, "model": 2}, MEGATRON, devices=CPUS[:2]).scope():
        kernel = network().get_layer("up").kernel
    value = np.random.default_rng(0).normal(size=kernel.shape)
    with monkeypatch.context() as without:
        without.setattr(type(kernel), "_convert_to_tensor", lambda *_, **__: pytest.fail("on one device"))
        set_from_host(kernel, value)
    np.testing.assert_array_equal(np.asarray(kernel), value.astype("float32"))
    assert len({str(shard.index) for shard in kernel.value.addressable_shards}) == 2


@pytest.mark.slow
@in_one_process
def test_a_layout_can_be_edited_and_given_back():
    strategy, model, history = trained()
    assert strategy.layout(model).rules() == MEGATRON
    _, _, same = train(layout=strategy.layout(model))
    assert same == history
    rules = strategy.layout(model).rules() | {"last/kernel": ("model", None)}
    edited, other, _ = train(layout=rules, epochs=1)
    assert edited.layout(other).rules() == rules


def test_the_layout_of_a_model_with_named_inputs_is_known_before_its_first_step(caplog):
    """Its inputs are traced in the structure that the model has, here a dictionary in another order than its call's."""
    strategy = lockstep.ModelParallelStrategy({"data": 1, "model": 2}, devices=CPUS[:2])
    with caplog.at_level("INFO", "lockstep"), strategy.scope():
        inputs = {"tokens": keras.Input((8,), dtype="int32", name="tokens"), "mask": keras.Input((8, 1), name="mask")}
        x = layers.Embedding(64, 64, name="table")(inputs["tokens"]) * inputs["mask"]
        x = layers.Dense(64, name="down")(layers.Dense(256, "relu", name="up")(x))
        model = keras.Model(inputs, x)
        model.compile("sgd", "mse")
        assert strategy.layout(model).rules().items() >= MEGATRON.items()
    assert "cannot follow" not in caplog.text


class Stages(keras.Model):
    """A model that states no inputs, and calls its layers one after the other."""

    def __init__(self, *stages):
        super().__init__()
        self.stages = list(stages)

    def call(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


class Masked(Stages):
    def call(self, x):
        return super().call(x["sequence"] * x["mask"])


class Block(layers.Layer):
    """Two products and a residual: columns, then rows, unless the sequence is so long that their all-reduce would move too much."""

    def __init__(self):
        super().__init__()
        self.up, self.down = layers.Dense(256, "relu", name="up"), layers.Dense(64, name="down")

    def call(self, x):
        return x + self.down(self.up(x))


class Positions(layers.Layer):
    """Adds the first rows of a table, and takes no more than it has."""

    def __init__(self, longest):
        super().__init__()
        self.longest = longest

    def build(self, shape):
        self.table = self.add_weight(shape=(self.longest, shape[-1]))

    def call(self, x):
        return x + self.table[: x.shape[1]]

    def compute_output_shape(self, shape):
        return shape


def with_open_length(*stages):
    return keras.Sequential([keras.Input((None, 64)), *stages])


def axes_of_kernels(strategy, model):
    return [row.axes for row in strategy.layout(model).variables if row.path.endswith(("up/kernel", "down/kernel"))]


COLUMNS_THEN_ROWS = [(None, "model"), ("model", None)]


def axes_after_a_step(make, length=None, look=None):
    """Compile a model, look at it, make a training step with this length, and return the axes of its kernels."""
    strategy = lockstep.ModelParallelStrategy({"data": 1, "model": 2}, devices=CPUS[:2])
    with strategy.scope():
        model = make()
        model.compile("sgd", "mse")
    if look:
        look(strategy, model)
    if length:
        x = np.ones((4, length, 64), "float32")
        x = {"sequence": x, "mask": np.ones((4, length, 1), "float32")} if isinstance(model, Masked) else x
        model.train_on_batch(x, np.ones((4, 1, 64), "float32"))
    return axes_of_kernels(strategy, model)


@pytest.mark.parametrize("length", [8, 1024])
@pytest.mark.parametrize(
    "look",
    [
        None,
        lambda strategy, model: strategy.layout(model),
        lambda strategy, model: strategy._runtime_settings().layout(model),
        lambda strategy, model: strategy.layout(model, np.ones((4, 600, 64), "float32")),
    ],
    ids=["nobody", "the user", "the doctor", "the user with a batch"],
)
def test_the_layout_does_not_depend_on_who_looks_first_or_on_the_length_of_a_batch(look, length):
    found = axes_after_a_step(lambda: with_open_length(Block()), length, look=look)
    assert found == COLUMNS_THEN_ROWS


@pytest.mark.parametrize(
    "stages",
    [
        lambda: [layers.DepthwiseConv1D(20), Block()],
        lambda: [layers.AveragePooling1D(600), Block()],
        lambda: [Positions(30), Block()],
    ],
    ids=["more than 8", "more than 512", "at most 30"],
)
def test_a_model_with_an_open_length_is_traced_with_one_that_it_takes(caplog, stages):
    with caplog.at_level("INFO", "lockstep"):
        found = axes_after_a_step(lambda: with_open_length(*stages()), look=lambda *both: both[0].layout(both[1]))
    assert found == COLUMNS_THEN_ROWS
    assert "cannot follow" not in caplog.text


@pytest.mark.parametrize("length", [16, 64, 1024])
@pytest.mark.parametrize(
    "make",
    [lambda: Stages(Block()), lambda: Masked(Block()), lambda: keras.Sequential([Block()])],
    ids=["subclass", "two inputs", "sequential"],
)
def test_the_layout_of_a_model_that_states_no_inputs_does_not_depend_on_its_first_batch(make, length):
    assert axes_after_a_step(make, length) == COLUMNS_THEN_ROWS


@pytest.mark.parametrize("layout", ["auto", {".*/up/kernel": (None, "model"), ".*/down/kernel": ("model", None)}])
def test_the_layout_of_an_unbuilt_model_is_known_from_a_batch(layout):
    """It is that of the first step, and the model starts with the weights that it has without a look."""
    x, starts, found = np.ones((4, 8, 64), "float32"), [], []
    for looks in (True, False):
        keras.utils.set_random_seed(0)
        strategy = lockstep.ModelParallelStrategy({"data": 1, "model": 2}, layout, devices=CPUS[:2])
        with strategy.scope():
            model = Stages(Block())
            model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
        if looks:
            found.append([row.axes for row in strategy.layout(model, x).variables if row.owner == "model"])
        model.train_on_batch(x, x)
        found.append([row.axes for row in strategy.layout(model).variables if row.owner == "model"])
        starts.append([np.asarray(variable) for variable in model.weights])
    assert found[0] == found[1] == found[2]
    assert axes_of_kernels(strategy, model) == COLUMNS_THEN_ROWS
    for one, other in zip(*starts, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_synchronized_normalization_does_not_change_the_layout():
    def make():
        stages = layers.Dense(256, "relu", name="up"), layers.BatchNormalization(synchronized=True)
        return keras.Sequential([keras.Input((64,)), *stages, layers.Dense(64, name="down")])

    assert axes_after_a_step(make) == COLUMNS_THEN_ROWS


class TwoViews(keras.Model):
    """Its train step gives the model one part of x after the other."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((5,)), layers.Dense(6, "relu"), layers.Dense(3)])

    def call(self, x):
        return self.net(x)

    def train_step(self, state, data):
        trainable, non_trainable, *rest = state
        one, other = (self.stateless_call(trainable, non_trainable, view)[0] for view in data[0])
        return {"loss": jnp.mean(jnp.square(one - other))}, (trainable, non_trainable, *rest)


def test_nothing_is_shown_of_what_a_model_warns_of_in_the_trace_for_the_layout(recwarn):
    with lockstep.ModelParallelStrategy({"data": 1, "model": 2}, devices=["cpu:0", "cpu:1"]).scope():
        model = TwoViews()
        model.build((None, 5))
        model.compile("sgd")
    x = np.ones((8, 5), "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        model.fit((x, x), batch_size=8, verbose=0)
    assert [str(one.message) for one in recwarn] == []


@pytest.mark.slow
def test_a_variable_that_a_model_has_no_more_is_forgotten():
    """A new one could get its id, and with it its axes."""
    strategy = lockstep.ModelParallelStrategy({"data": 1, "model": 2}, devices=CPUS[:2])
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), layers.Dense(64, name="one")])
        model.compile("sgd", "mse")
    strategy.layout(model)
    model.get_layer("one").quantize("int8")
    strategy.layout(model)
    assert set(strategy._shardings_of(model)._axes) == {id(variable) for variable in model.variables}


@pytest.mark.slow
def test_variables_of_one_path_keep_the_layouts_of_their_optimizer():
    """Models that are built apart have paths without a prefix."""

    def part(width, out):
        inputs = keras.Input((width,))
        hidden = layers.Dense(128, name="hidden")(inputs)
        return keras.Model(inputs, layers.Dense(out, name="out")(hidden))

    strategy = lockstep.ModelParallelStrategy({"data": 1, "model": 2}, devices=CPUS[:2])
    with strategy.scope():
        inputs = keras.Input((64,))
        model = keras.Model(inputs, part(96, 64)(part(64, 96)(inputs)))
        model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    kernels = [row.axes for row in strategy.layout(model).variables if row.path.endswith("/kernel")]
    momentums = [row.axes for row in strategy.layout(model).variables if row.path.endswith("kernel_momentum")]
    assert momentums == kernels == COLUMNS_THEN_ROWS * 2


@pytest.mark.parametrize("x", [[1.5, None], [], "rows", {"x": 3}], ids=str)
def test_layout_refuses_inputs_that_are_no_arrays(x):
    with lockstep.ModelParallelStrategy({"data": 1, "model": 2}, devices=CPUS[:2]).scope() as strategy:
        model = keras.Sequential([layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(lockstep.OptionError, match=r"layout: x: expected a tree of arrays \(rows, …\), got "):
        strategy.layout(model, x)


@in_one_process
def test_a_layout_map_is_taken_as_it_is(caplog):
    mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), CPUS)
    layout = keras.distribution.LayoutMap(mesh)
    for pattern, axes in MEGATRON.items():
        layout[pattern] = axes
    layout[".*/experts"] = ("model", None, None)  # Another variant of the model would have it.
    strategy = lockstep.ModelParallelStrategy(mesh, layout, devices=CPUS)
    with caplog.at_level("INFO", "lockstep"):
        _, model, history = train(strategy=strategy)
    assert strategy.layout(model).rules() == MEGATRON
    assert "rule '.*/experts' matches none of its variables" in caplog.text
    np.testing.assert_allclose(history["loss"], trained()[2]["loss"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "spec"), [(4, ("device", "model")), (3, (None, "model"))])
def test_a_rule_may_shard_what_a_layer_returns(rows, spec):
    strategy, model, _ = train(layout=MEGATRON | {"up/output": ("data", "model")}, epochs=1)
    shardings = strategy._shardings_of(model)
    assert [layer.name for layer in shardings.layers_with_rules()] == ["up"]
    constrain = functools.partial(shardings.constrain_output, model.get_layer("up"))
    assert tuple(jax.jit(constrain)(jnp.zeros((rows, 8))).sharding.spec) == spec


@pytest.mark.parametrize("name", ["encoder", "whole"])
def test_a_rule_may_shard_what_a_model_returns(caplog, name):
    """Also that of a model within a model, as under ``keras.distribution``."""
    strategy = lockstep.ModelParallelStrategy(
        {"data": 2, "model": 2}, {f"{name}/output": ("data", "model")}, devices=CPUS
    )
    with strategy.scope():
        inputs = keras.Input((8,))
        encoder = keras.Sequential([keras.Input((8,)), layers.Dense(16)], name="encoder")
        model = keras.Model(inputs, layers.Dense(4)(encoder(inputs)), name="whole")
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0)
    (sharded,) = strategy._shardings_of(model).layers_with_rules()
    assert sharded.name == name
    functions = strategy._functions_of(model)
    placed = strategy._placement.place((np.ones((8, 8), "float32"), np.ones((8, 4), "float32")))
    kinds = model.trainable_variables, model.non_trainable_variables, model.metrics_variables
    state = tuple([variable.value for variable in kind] for kind in kinds)
    program = str(jax.make_jaxpr(functions.build_step(functions.executor, "test"))(state, placed))
    width = {"encoder": 16, "whole": 4}[name]
    assert re.search(rf"f32\[8,{width}\] = sharding_constraint\[.*?'device', 'model'", program, re.DOTALL)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (MEGATRON | {"dwon/kernel": ("model", None)}, "rule 'dwon/kernel' matches no variable of model 'net'"),
        ({"kernel": (None, "model")}, "A rule must match the whole path"),
        ({"up/k.*": (None, "model"), ".*kernel": (None, "model")}, "both match 'up/kernel'"),
        ({"up/kernel": ("model",)}, r"has 1 axes, \('model',\), and 'up/kernel' has 2"),
    ],
)
def test_law_m3_a_rule_that_does_not_fit_is_an_error_before_training(rules, says):
    strategy = lockstep.ModelParallelStrategy({"data": 2, "model": 2}, rules, devices=CPUS)
    with strategy.scope():
        model = network()
    before = [np.asarray(variable) for variable in model.weights]
    with pytest.raises(lockstep.ModelError, match=says):
        model.fit(*batch(), verbose=0)
    for ours, expected in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), expected)
    with pytest.raises(lockstep.ModelError, match=says):
        strategy.layout(model)


@pytest.mark.slow
def test_law_m3_a_large_variable_without_a_rule_is_named(caplog):
    with caplog.at_level("INFO", "lockstep"):
        train(layout={"up/kernel": (None, "model"), "up/bias": ("model",)}, epochs=1)
    assert "variable 'down/kernel' (64.0 KiB) is whole on each device: no rule matches it" in caplog.text
    assert "variable 'up/kernel'" not in caplog.text


@pytest.mark.parametrize("layout", ["auto", {"net/odd/kernel": (None, "model")}])
def test_law_m4_an_odd_variable_stays_whole_and_is_named(caplog, layout):
    strategy = lockstep.ModelParallelStrategy({"data": 1, "model": 2}, layout, devices=CPUS[:2])
    with caplog.at_level("INFO", "lockstep"):
        with strategy.scope():
            model = keras.Sequential([keras.Input((65,)), layers.Dense(67, name="odd")], name="net")
            model.compile("sgd", "mse")
        model.fit(np.ones((3, 65)), np.ones((3, 67)), verbose=0)
    assert "odd/kernel' (17.0 KiB) is whole on each device" in caplog.text
    assert strategy.layout(model).device_bytes == strategy.layout(model).bytes


@pytest.mark.slow
def test_law_m5_self_check_compares_a_step_with_one_device(monkeypatch):
    strategy, model, _ = train(epochs=0, **SHARDED)
    x, y = batch(8)
    before = values(model)
    assert len(strategy.self_check(model, x, y)) == 64
    for ours, expected in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(ours, expected)
    gather = model_shardings._gather
    monkeypatch.setattr(model_shardings, "_gather", lambda value, *places: 1.01 * gather(value, *places))
    with pytest.raises(lockstep.DeterminismError, match=r"gradient of '.*kernel' differs from that of whole variables"):
        strategy.self_check(model, x, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ({"data": 2, "model": 2}, "auto"),
        ({"data": 2, "model": 2}, {"up/kernel": (None, "model")}),
        ({"data": 2, "model": 2}, {".*/kernel": (None, "model")}),
        ({"data": 1, "model": 2, "more": 2}, {}),
        ({"data": 4}, {}),
    ],
    ids=str,
)
def test_self_check_has_a_model_and_a_layout_of_its_own(monkeypatch, mesh, layout):
    made, specs = model_shardings.NamedSharding, []
    monkeypatch.setattr(model_shardings, "NamedSharding", lambda *args: specs.append(args[1]) or made(*args))
    strategy = lockstep.ModelParallelStrategy(mesh, layout, devices=CPUS)
    assert len(strategy.self_check()) == 64
    assert any(any(spec) for spec in specs)  # A check of whole variables would compare nothing.
    if ".*/kernel" in layout:  # The user's models still have these rules.
        with strategy.scope():
            model = network()
        assert set(axes_of_kernels(strategy, model)) == {(None, "model")}


def test_a_mesh_is_one_replica_with_the_statistics_of_the_global_batch():
    strategy = lockstep.ModelParallelStrategy({"data": 4}, {".*": (None,)}, devices=CPUS)
    assert strategy.num_replicas_in_sync == 1
    assert strategy.mesh == {"data": 4}


@pytest.mark.slow
def test_a_nonfinite_step_is_diagnosed_and_skipped():
    x, y = batch(14)
    x[3, 5] = np.nan
    strategy = lockstep.ModelParallelStrategy({"data": 2, "model": 2}, devices=CPUS)
    with strategy.scope():
        model = network()
    guard = lockstep.callbacks.NanGuard("skip")
    model.fit(x, y, batch_size=7, epochs=1, shuffle=False, verbose=0, callbacks=[guard])
    assert all(np.isfinite(value).all() for value in values(model))
    assert model.optimizer.iterations == 1  # One of two steps.


@pytest.mark.slow
@in_one_process
def test_the_doctor_measures_steps_on_a_mesh():
    strategy, model, _ = trained()
    report = strategy.doctor(model, *batch(64), batch_size=16)
    assert "training steps" in str(report)
    assert not report.left_out


def compiled_text(strategy, model, rows):
    functions = strategy._functions_of(model)
    executor = functions.executor
    state = tuple([variable.value for variable in kind] for kind in variables_of(model))
    placed = strategy._placement.abstract_batch(batch(rows))
    return executor.train_step(functions.build_step(executor, "train")).compile_for(state, placed).as_text()


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [((2, 1), "auto"), ((1, 1), "auto"), ((1, 2), {}), ((1, 2), {"down/kernel": ("model", None)})],
    ids=str,
)
def test_blocks_that_the_layout_leaves_whole_are_recomputed_too(mesh, layout):
    data, model_axis = mesh
    strategy = lockstep.ModelParallelStrategy(
        {"data": data, "model": model_axis}, layout, devices=CPUS[: data * model_axis], recompute="blocks"
    )
    with strategy.scope():
        model = network()
    model.optimizer.build(model.trainable_variables)
    strategy.layout(model)
    functions = strategy._functions_of(model)
    state = tuple([variable.value for variable in kind] for kind in variables_of(model))
    step = functions.build_step(functions.executor, "train")
    program = str(jax.make_jaxpr(step)(state, strategy._placement.place(batch(8))))
    assert program.count("remat2[") == 2  # The two layers with large variables.


@pytest.mark.slow
def test_variables_sharded_over_rows_are_gathered_once_a_step():
    strategy, model, _ = train((4, 1), epochs=1, **SHARDED)
    found = collectives(compiled_text(strategy, model, 8))
    sharded = [row for row in strategy.layout(model).variables if row.owner == "model" and any(row.axes)]
    gathered = sum(one.bytes for one in found if one.name == "all-gather")
    assert sum(row.bytes for row in sharded) <= gathered <= 2 * sum(row.bytes for row in sharded) + 64 * 1024


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"mesh": {"data": 2, "model": 4}}, lockstep.DeviceError, "needs 8 devices, and there are 4"),
        ({"mesh": {}}, lockstep.OptionError, "expected sizes of axes"),
        ({"mesh": {"data": 2, "model": 0}}, lockstep.OptionError, "mesh: model"),
        ({"mesh": {"data": 4}}, lockstep.OptionError, "needs a mesh of two axes"),
        ({"layout": "megatron"}, lockstep.OptionError, 'expected "auto"'),
        ({"layout": {"(": ("model",)}}, lockstep.OptionError, "is no regular expression"),
        ({"layout": {"up/.*": "model"}}, lockstep.OptionError, "expected names of axes"),
        ({"layout": {"up/.*": ([],)}}, lockstep.OptionError, "names the axis"),
        ({"layout": {"up/.*": ("modle",)}}, lockstep.OptionError, "the mesh has 'data', 'model'"),
        ({"layout": {"up/.*": ("model", "model")}}, lockstep.OptionError, "an axis of the mesh twice"),
        ({"shard": "optimizer"}, lockstep.OptionError, 'expected "variables" or None'),
        ({"recompute": "all"}, lockstep.OptionError, 'expected "blocks"'),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        lockstep.ModelParallelStrategy(**{"mesh": {"data": 2, "model": 2}, "devices": CPUS} | options)


@in_one_process
def test_run_computes_with_shards_as_one_replica():
    strategy, model, _ = trained()
    rows = batch(7)[0]
    (placed,) = strategy.experimental_distribute_dataset([rows])
    found = strategy.run(lambda x: model(x, training=False), args=(placed,))
    np.testing.assert_allclose(strategy.gather(found, axis=0), model(rows, training=False), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2])
def test_uneven_rows_of_an_embedding_have_the_gradient_of_one_device(width):
    """XLA adds the padding of the last shard to entry 0, if it is given rows that a mesh of two axes does not divide."""
    x, y = np.random.default_rng(0).integers(1, 20, (7, 6)), np.arange(42).reshape(7, 6) % 3

    def fit(scope):
        keras.utils.set_random_seed(0)
        with scope:
            hidden = [layers.Embedding(20, 8), layers.LSTM(8, return_sequences=True)][:width]
            model = keras.Sequential([keras.Input((6,), dtype="int32"), *hidden, layers.Dense(3)])
            model.compile(keras.optimizers.SGD(0.1), logits_loss)
            model.fit(x, y, batch_size=7, epochs=2, verbose=0)
        return model.get_weights()

    mesh = lockstep.ModelParallelStrategy({"data": 2, "model": 2}, devices=CPUS)
    for ours, expected in zip(fit(mesh.scope()), fit(contextlib.nullcontext()), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, pytest.param(9, id="uneven")])
def test_convolutions_of_grouped_channels_have_the_gradients_of_one_device(rows):
    """XLA multiplies them by the size of the model axis (jaxlib 0.10.2)."""

    def trained(scope):
        keras.utils.set_random_seed(0)
        with scope:
            inputs = keras.Input((6, 6, 4))
            x = layers.DepthwiseConv2D(3, padding="same", activation="tanh")(inputs)
            x = layers.Conv2D(8, 3, groups=2, activation="tanh")(x)
            x = layers.SeparableConv1D(6, 3)(layers.Reshape((16, 8))(x))
            model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))
            model.compile(keras.optimizers.SGD(0.1), "mse")
        x, y = np.random.default_rng(0).normal(size=(2 * rows, 6, 6, 4)), np.ones((2 * rows, 2))
        losses = model.fit(x, y, batch_size=rows, epochs=2, verbose=0, shuffle=False).history["loss"]
        return [*model.get_weights(), losses]

    strategy = lockstep.ModelParallelStrategy({"data": 2, "model": 2}, devices=CPUS)
    for found, expected in zip(trained(strategy.scope()), trained(contextlib.nullcontext()), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_scanned_steps_have_the_numbers_of_single_steps(monkeypatch):
    def fit(steps):
        strategy = lockstep.ModelParallelStrategy({"data": 2, "model": 2}, devices=CPUS)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = network()
            model.compile("sgd", logits_loss, steps_per_execution=steps)
        model.fit(*batch(16), batch_size=4, epochs=1, shuffle=False, verbose=0)
        return strategy.layout(model).rules(), model.get_weights()

    rules, weights = fit(1)
    monkeypatch.setattr("lockstep.execution.executors.SpmdExecutor.scans_steps", True)
    same, scanned = fit(2)
    assert rules == same == MEGATRON
    for ours, expected in zip(scanned, weights, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("is_alone", [False, True])
def test_tools_that_replace_the_devices_of_a_script_get_a_mesh_of_rows(is_alone):
    with override_devices(3, is_alone=is_alone):
        strategy = lockstep.ModelParallelStrategy({"data": 2, "model": 2}, MEGATRON)
    assert strategy.mesh == {"data": 3, "model": 1}


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, number):
        return tuple(part[7 * number : 7 * number + 7] for part in batch(21))


@pytest.mark.slow
def test_every_kind_of_input_gives_the_numbers_of_arrays():
    def fit(data, cache=None, **options):
        keras.utils.set_random_seed(0)
        inputs = lockstep.InputOptions(cache=cache)
        with lockstep.ModelParallelStrategy({"data": 2, "model": 2}, devices=CPUS, input_options=inputs).scope():
            model = network()
        model.fit(*data, epochs=2, shuffle=False, verbose=0, **options)
        return model.get_weights()

    expected = fit(batch(21), batch_size=7)
    ways = {
        "PyDataset": ((Batches(),), None, {}),
        "generator": (((Batches()[n % 3] for n in range(6)),), None, {"steps_per_epoch": 3}),
        "cached on the devices": (batch(21), "device", {"batch_size": 7}),
    }
    for kind, (data, cache, options) in ways.items():
        for ours, theirs in zip(fit(data, cache, **options), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=kind)


@pytest.mark.slow
def test_variables_that_a_model_gets_later_are_laid_out_before_its_next_step():
    strategy, model, _ = train(epochs=1)
    with strategy.scope():
        model.get_layer("up").enable_lora(4)
        model.compile("sgd", logits_loss)
    before = np.asarray(model.get_layer("up").lora_kernel_b)
    model.fit(*batch(), batch_size=9, verbose=0)
    axes = {row.path: row.axes for row in strategy.layout(model).variables}
    assert axes["up/lora_kernel_b"] == axes["up/kernel"] == (None, "model")
    assert not np.array_equal(np.asarray(model.get_layer("up").lora_kernel_b), before)


@pytest.mark.slow
def test_choosing_a_layout_draws_no_numbers_and_changes_no_attributes():
    class Noisy(layers.Layer):
        def __init__(self):
            super().__init__()
            self.calls, self.last = 0, None

        def call(self, x):
            self.calls, self.last = self.calls + 1, jnp.mean(x)
            return x * random.random() * np.random.random()

    strategy = lockstep.ModelParallelStrategy({"data": 2, "model": 2}, devices=CPUS)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Noisy(), layers.Dense(4)])
        model.compile("sgd", "mse")
    noisy = model.layers[0]
    before = noisy.calls, noisy.last, random.getstate(), np.random.get_state()[2]
    strategy.layout(model)
    assert (noisy.calls, noisy.last, random.getstate(), np.random.get_state()[2]) == before


@pytest.mark.slow
@pytest.mark.parametrize("rows", [7, 8])
def test_a_rule_for_an_output_shards_no_rows_unevenly(rows):
    x, y = np.random.default_rng(0).integers(1, 20, (rows, 6)), np.arange(6 * rows).reshape(rows, 6) % 3

    def fit(scope):
        keras.utils.set_random_seed(0)
        with scope:
            hidden = [layers.Embedding(20, 8, name="words"), layers.BatchNormalization(), layers.Dense(3)]
            model = keras.Sequential([keras.Input((6,), dtype="int32"), *hidden], name="net")
            model.compile(keras.optimizers.SGD(0.1), logits_loss)
            model.fit(x, y, batch_size=rows, epochs=2, verbose=0)
        return model.get_weights()

    rules = {"net/words/output": ("data", None, "model")}
    mesh = lockstep.ModelParallelStrategy({"data": 2, "model": 2}, rules, devices=CPUS)
    for ours, expected in zip(fit(mesh.scope()), fit(contextlib.nullcontext()), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


class Encoder(layers.Layer):
    """A layer that says nothing of masks, so that its output has the one of the layer in it."""

    def build(self, shape):
        self.words = layers.Embedding(20, 8, mask_zero=True)
        self.words.build(shape)

    def call(self, words):
        return self.words(words)


def test_a_rule_for_an_output_keeps_its_mask():
    words = np.array([[1, 2, 0, 0], [3, 4, 5, 0]] * 2)
    model_layers = [Encoder(name="encoder"), layers.GlobalAveragePooling1D(), layers.Dense(1)]
    plain = keras.Sequential([keras.Input((4,), dtype="int32"), *model_layers], name="net")
    rules = {"net/encoder/output": ("data", None, "model")}
    with lockstep.ModelParallelStrategy({"data": 2, "model": 2}, rules, devices=CPUS).scope():
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *model_layers], name="net")
        model.compile("sgd", "mse")
    np.testing.assert_allclose(model.predict(words, verbose=0), plain.predict(words, verbose=0), rtol=1e-5)


class Distribution(layers.Layer):
    """Returns named outputs in another order than that of their names; a row depends on the others, so none runs on padding."""

    def build(self, shape):
        self.normalize, self.mean, self.deviation = layers.BatchNormalization(), layers.Dense(2), layers.Dense(2)
        for layer in (self.normalize, self.mean, self.deviation):
            layer.build(shape)

    def call(self, x, training=False):
        hidden = self.normalize(x, training=training)
        return {"mean": self.mean(hidden), "deviation": self.deviation(hidden)}


class TwoOutputs(keras.Model):
    """A model whose call and whose loss rely on the order of named outputs, as Python keeps it."""

    def __init__(self):
        super().__init__(name="net")
        self.encoder = Distribution(name="encoder")

    def call(self, x, training=False):
        mean, deviation = self.encoder(x, training=training).values()
        return {"mean": mean, "deviation": deviation}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mean, deviation = y_pred.values()
        return keras.ops.mean(keras.ops.square(mean - 1) + keras.ops.exp(deviation))


@pytest.mark.parametrize(("rows", "rules"), [(3, {}), (4, {"net/encoder/output": ("data", "model")})])
def test_named_outputs_keep_their_order_on_uneven_rows_and_under_a_rule(rows, rules):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")

    def weights_after_fit(scope):
        keras.utils.set_random_seed(0)
        with scope:
            model = TwoOutputs()
            model.compile("sgd")
            model.fit(x, batch_size=rows, verbose=0)
        return model.get_weights()

    mesh = lockstep.ModelParallelStrategy({"data": 2, "model": 2}, rules, devices=CPUS)
    expected = weights_after_fit(contextlib.nullcontext())
    for ours, theirs in zip(weights_after_fit(mesh.scope()), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_rule_for_an_output_with_another_number_of_axes_is_refused():
    with pytest.raises(lockstep.ModelError, match=r"rule 'up/output' has 1 axes, \('data',\), and 'up/output' has 2"):
        train(layout=MEGATRON | {"up/output": ("data",)}, epochs=1)
