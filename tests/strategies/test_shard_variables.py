"""``shard="variables"``: the numbers of one device, and the bits of the unsharded deterministic run; each device keeps its shards."""

import contextlib
import copy
import functools

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep._keras.trainer import variables_of
from lockstep._padded_array import PaddedArray
from lockstep.execution import variable_shards
from lockstep.tools.plan.hlo import collectives
from tests.laws.cases import case_named, logits_loss, with_topologies
from tests.laws.compare import Topology, assert_same, bytes_by_device, reference, run, stored_arrays

SHARDED = {"shard": "variables"}
RECOMPUTED = SHARDED | {"recompute": "blocks"}
# Each shards or recomputes in another way: states of layers, losses, masks, several models, an update that looks at whole tensors.
IN_THE_SUITE = (
    "add_loss",
    "adversaries",
    "attention",
    "batch_normalization_synchronized",
    "conv2d",
    "last_batch_of_one",
    "loss_of_what_the_call_has_kept",
    "muon",
    "own_train_step",
    "towers_over_the_batch",
    "variables_of_every_aggregation",
)


def topology_of(number):
    """One number of devices for each case, and recomputed layers for every second."""
    return Topology(3, (2, 4, 3)[number % 3], RECOMPUTED if number % 2 else SHARDED)


@pytest.mark.parametrize(("case", "topology"), list(with_topologies(IN_THE_SUITE, topology_of)))
def test_law_1_holds(shard_all, case, topology):
    assert_same(run(case, topology, only_fit=True), reference(case, only_fit=True), case.relative)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(SHARDED, id="sharded", marks=pytest.mark.nightly),
        pytest.param(RECOMPUTED, id="recomputed", marks=pytest.mark.slow),
    ],
)
def test_law_1_holds_for_evaluate_predict_and_single_batches(shard_all, options):
    case = case_named("dicts")
    assert_same(run(case, Topology(3, 2, options)), reference(case), case.relative)


@pytest.mark.slow
@pytest.mark.parametrize("options", [SHARDED, RECOMPUTED], ids=["sharded", "recomputed"])
def test_a_layer_that_is_called_twice_keeps_the_state_of_both_calls(shard_all, options):
    def moving_mean(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            inputs, twice = keras.Input((4,)), layers.BatchNormalization(momentum=0.5)
            model = keras.Model(inputs, layers.Dense(1)(twice(twice(inputs) * 2.0 + 3.0)))
            model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(1, 1, (4, 4)).astype("float32")
        model.train_on_batch(x, x[:, :1])
        return twice.moving_mean.numpy()

    found = moving_mean(lockstep.MirroredStrategy(["cpu:0", "cpu:1"], **options))
    np.testing.assert_allclose(found, moving_mean(lockstep.MirroredStrategy(["cpu:0", "cpu:1"])), rtol=1e-5)


class Counts(layers.Layer):
    """Counts rows of each class, and reads the kernel of another layer without tracking it."""

    def __init__(self, other):
        super().__init__()
        self.read = lambda: other.kernel

    def build(self, shape):
        self.seen = self.add_weight(shape=(2, 5), initializer="zeros", trainable=False, aggregation="sum", name="seen")

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(ops.sum(ops.one_hot(ops.argmax(x, -1), 5), 0) * ops.convert_to_tensor([[1.0], [3.0]]))
        return ops.matmul(x, ops.transpose(ops.convert_to_tensor(self.read())))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [SHARDED, RECOMPUTED, SHARDED | {"recompute": lambda layer: True}],
    ids=["sharded", "blocks", "all layers"],
)
def test_a_sum_and_a_variable_of_another_layer_have_the_values_of_one_device(shard_all, options):
    def trained(scope):
        keras.utils.set_random_seed(0)
        with scope:
            inputs, first = keras.Input((4,)), layers.Dense(5, use_bias=False)
            counts = Counts(first)
            model = keras.Model(inputs, layers.Dense(2)(counts(first(inputs))))
            model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
        losses = model.fit(x, x[:, :2], batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
        return [*model.get_weights(), np.asarray(counts.seen), losses]

    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], **options)
    for found, expected in zip(trained(strategy.scope()), trained(contextlib.nullcontext()), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def recomputed_calls(strategy, model):
    state, batch = state_and_batch(strategy, model)
    functions = strategy._functions_of(model)
    return str(jax.make_jaxpr(functions.build_step(functions.executor, "train"))(state, batch)).count("remat2[")


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("synchronized", [False, True], ids=["by replicas", "global batch"])
def test_blocks_are_recomputed_on_one_device_and_on_the_global_batch(devices, synchronized):
    strategy = lockstep.MirroredStrategy([f"cpu:{n}" for n in range(devices)], replicas=2, **RECOMPUTED)
    with strategy.scope():
        hidden = [layers.Dense(64, activation="gelu") for _ in range(3)]
        model = keras.Sequential(
            [keras.Input((64,)), *hidden, layers.BatchNormalization(synchronized=synchronized), layers.Dense(3)]
        )
        model.compile("sgd", logits_loss)
        model.optimizer.build(model.trainable_variables)
    assert recomputed_calls(strategy, model) >= 2


class Block(layers.Layer):
    """A residual block with a state, a random draw, a mask, a loss and a stored array: all that a recomputed layer must keep."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(width, activation="relu", name="inner")
        self.outer = layers.Dense(width, name="outer")
        self.drop = layers.Dropout(0.25, seed=3)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")

    def build(self, shape):
        self.inner.build(shape)
        self.outer.build(shape)

    def call(self, x, training=False):
        hidden = self.drop(self.inner(x), training=training)
        self.add_loss(0.01 * ops.mean(ops.square(hidden)))
        self.count.assign_add(1.0)
        self.last = hidden
        return x + self.outer(hidden)


ROWS = 18  # Two batches of 9, which four replicas share as 3, 3, 3 and 0: one program for both.
TWO_SHAPES = 14  # batches of 9 and 5


def train(devices, replicas=4, epochs=2, rows=ROWS, callbacks=(), optimizer="adam", blocks=1, **options):
    keras.utils.set_random_seed(0)
    strategy = lockstep.MirroredStrategy([f"cpu:{device}" for device in range(devices)], replicas=replicas, **options)
    with strategy.scope():
        inputs = keras.Input((64,))
        x = layers.Dense(128, name="first")(inputs)
        for number in range(blocks):
            x = Block(128, name=f"block_{number}")(x)
        x = layers.BatchNormalization()(x)
        model = keras.Model(inputs, layers.Dense(3, name="last")(x))
        model.compile(optimizer, logits_loss)
    x, y = np.random.default_rng(0).normal(size=(rows, 64)).astype("float32"), np.arange(rows) % 3
    history = model.fit(x, y, batch_size=9, epochs=epochs, verbose=0, callbacks=list(callbacks)).history
    return strategy, model, history


def values(model):
    return [np.asarray(variable.value) for variable in (*model.weights, *model.optimizer.variables)]


@functools.cache
def without_shards(rows):
    """The deterministic run on one device, once in each process; tests of it have one ``xdist_group``."""
    return train(1, rows=rows, deterministic=True)


compared_with_one_device = pytest.mark.xdist_group("deterministic without shards")


def assert_equal_bits(found, expected):
    assert found[2] == expected[2]
    for ours, theirs in zip(values(found[1]), values(expected[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_recomputing_changes_no_number(devices):
    (_, model, history), (_, plain, expected) = (
        train(devices, optimizer="sgd", **RECOMPUTED),
        train(devices, optimizer="sgd"),
    )
    for name, curve in expected.items():
        np.testing.assert_allclose(history[name], curve, rtol=1e-5, err_msg=name)
    for ours, theirs in zip(values(model), values(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("devices", "shard"),
    [
        *((devices, "variables") for devices in (2, 1, 3)),
        *(pytest.param(devices, "variables", marks=pytest.mark.nightly) for devices in (4, 5, 8)),
        (2, "optimizer"),
    ],
)
@compared_with_one_device
def test_law_2_holds_deterministic_bits_are_those_without_shards(devices, shard):
    rows = TWO_SHAPES if (devices, shard) == (2, "variables") else ROWS
    assert_equal_bits(train(devices, rows=rows, deterministic=True, shard=shard), without_shards(rows))


@pytest.mark.parametrize("shard", ["variables", "optimizer"])
def test_variables_of_an_optimizer_are_sharded_before_the_first_step(shard):
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], shard=shard)
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), layers.Dense(128)])
        model.compile("adam", "mse")
    found = []

    def note(logs=None):
        arrays = [variable.value for variable in model.optimizer.variables if "kernel" in variable.path]
        found.extend(array.addressable_shards[0].data.size / array.size for array in arrays)

    callback = keras.callbacks.LambdaCallback(on_train_begin=note)  # The scope is closed.
    model.fit(np.ones((4, 64)), np.ones((4, 128)), verbose=0, callbacks=[callback])
    assert found == [0.5, 0.5]


@pytest.mark.slow
def test_self_check_compares_gradients_with_those_of_whole_variables(monkeypatch):
    strategy, model, _ = train(2, epochs=0, **RECOMPUTED)
    x, y = np.random.default_rng(1).normal(size=(8, 64)).astype("float32"), np.arange(8) % 3
    before = values(model)
    assert len(strategy.self_check(model, x, y)) == 64
    for ours, expected in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(ours, expected)
    gather = variable_shards._gather
    monkeypatch.setattr(variable_shards, "_gather", lambda shard, axis: 1.01 * gather(shard, axis))
    with pytest.raises(lockstep.DeterminismError, match=r"gradient of '.*kernel' differs from that of whole variables"):
        strategy.self_check(model, x, y)


@pytest.mark.slow
def test_self_check_allows_the_rounding_of_mixed_precision():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        strategy, model, _ = train(2, epochs=0, **SHARDED)
    finally:
        keras.config.set_dtype_policy(before)
    x, y = np.random.default_rng(1).normal(size=(8, 64)).astype("float32"), np.arange(8) % 3
    assert len(strategy.self_check(model, x, y)) == 64


class StopAfter(keras.callbacks.Callback):
    def __init__(self, epochs):
        super().__init__()
        self.epochs = epochs

    def on_epoch_end(self, epoch, logs=None):
        if epoch + 1 == self.epochs:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("variables", None),
        (None, "variables"),
        ("optimizer", "variables"),
    ],
)
@compared_with_one_device
def test_law_3_holds_a_checkpoint_resumes_with_other_shards_on_other_devices(tmp_path, before, after):
    backup = lockstep.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(3, callbacks=[backup, StopAfter(1)], deterministic=True, shard=before)
    found = train(5, callbacks=[lockstep.callbacks.BackupAndRestore(tmp_path)], deterministic=True, shard=after)
    for ours, theirs in zip(values(found[1]), values(without_shards(ROWS)[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("devices", "deterministic"),
    [
        pytest.param(4, False, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.nightly),
        pytest.param(3, True, marks=pytest.mark.nightly),
    ],
)
def test_each_device_holds_what_the_layout_says(devices, deterministic):
    strategy, model, _ = train(devices, deterministic=deterministic, **SHARDED)
    layout = strategy.layout(model)
    assert set(bytes_by_device([*model.weights, *model.optimizer.variables]).values()) == {layout.device_bytes}
    whole = sum(row.bytes for row in layout.variables if row.axis is None)
    shard = -(-128 // devices) / 128  # of an axis of 128, the longest
    assert layout.device_bytes == (layout.bytes - whole) * shard + whole
    assert whole < layout.bytes / 10
    axes = {row.path: row.axis for row in layout.variables if row.path.endswith("kernel") and "last" not in row.path}
    assert axes.pop("first/kernel") == (0 if devices == 4 else 1)  # whole tiles of a TPU, or the longest
    assert set(axes.values()) == {0}
    assert "block_0/inner/kernel" in str(layout)


def parts_of(variable):
    (array,) = stored_arrays([variable])
    return len({str(shard.index) for shard in array.addressable_shards})


@pytest.mark.parametrize("devices", [2, 3])
def test_variables_are_sharded_when_they_are_made_and_when_they_are_loaded(tmp_path, devices):
    with lockstep.MirroredStrategy([f"cpu:{number}" for number in range(devices)], **SHARDED).scope():
        model = keras.Sequential([keras.Input((64,)), layers.Dense(128, name="hidden")])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    large = [one for one in (*model.weights, *model.optimizer.variables) if one.shape == (64, 128)]
    assert [parts_of(one) for one in large] == [devices] * 3
    weights = [np.full(one.shape, 3, "float32") for one in model.weights]
    model.set_weights(weights)
    model.save_weights(tmp_path / "some.weights.h5")
    kernel = model.layers[0].kernel
    kernel.assign(np.zeros((64, 128)))
    model.load_weights(tmp_path / "some.weights.h5")
    assert parts_of(kernel) == devices
    np.testing.assert_array_equal(np.asarray(kernel.value), weights[0])


@pytest.mark.slow
def test_a_step_shards_variables_that_are_older_than_the_scope_and_leaves_metrics_whole():
    model = keras.Sequential([keras.Input((64,)), layers.Dense(128, name="hidden"), layers.Dense(64, name="last")])
    with lockstep.MirroredStrategy(["cpu:0", "cpu:1"], **SHARDED).scope():
        model.compile(
            "adam", "sparse_categorical_crossentropy", metrics=[keras.metrics.MeanIoU(64, sparse_y_pred=False)]
        )
    model.fit(np.ones((4, 64), "float32"), np.arange(4), verbose=0)
    model.set_weights(model.get_weights())
    model.reset_metrics()
    large = [one for one in (*model.weights, *model.optimizer.variables) if one.shape == (64, 128)]
    assert [parts_of(one) for one in large] == [2, 2, 2]
    (seen,) = [one for one in model.metrics_variables if one.shape == (64, 64)]
    assert parts_of(seen) == 1


def test_variables_of_an_optimizer_alone_are_sharded_when_they_are_made_and_when_they_are_loaded(tmp_path):
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], shard="optimizer")
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), layers.Dense(128, name="hidden")])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        model.save(tmp_path / "some.keras")
        loaded = keras.models.load_model(tmp_path / "some.keras")
    for one in (model, loaded):
        assert [parts_of(slot) for slot in one.optimizer.variables if slot.shape == (64, 128)] == [2, 2]
        assert parts_of(one.layers[0].kernel) == 1


def state_and_batch(strategy, model, rows=8):
    """Return what a training step gets, and its batch as it is on the devices."""
    state = tuple([variable.value for variable in kind] for kind in variables_of(model))
    batch = np.zeros((rows, 64), "float32"), np.zeros(rows, "int32")
    return state, strategy._placement.abstract_batch(batch)


def compiled_step(strategy, model, rows=8):
    functions = strategy._functions_of(model)
    step = functions.executor.train_step(functions.build_step(functions.executor, "train"))
    return step.compile_for(*state_and_batch(strategy, model, rows))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [4, 3])
@pytest.mark.parametrize(("options", "times"), [(SHARDED, 1), (RECOMPUTED, 2)], ids=["sharded", "recomputed"])
def test_a_step_gathers_each_sharded_variable_where_it_is_used_and_scatters_each_of_their_gradients(
    options, times, devices
):
    strategy, model, _ = train(devices, replicas=devices, epochs=0, **options)
    sharded = [row for row in strategy.layout(model).variables if row.owner == "model" and row.axis is not None]
    found = collectives(compiled_step(strategy, model, 2 * devices).as_text())
    gathered = sum(one.bytes for one in found if one.name == "all-gather")
    scattered = sum(one.bytes for one in found if one.name == "reduce-scatter")
    # Nobody asks for the gradient of the input, so the backward pass does without the first kernel.
    first = next(row for row in sharded if row.path.startswith("first"))
    expected = devices * (times * sum(row.device_bytes for row in sharded) - (times - 1) * first.device_bytes)
    assert 0 <= gathered - expected <= 4 * 1024
    assert scattered == sum(row.device_bytes for row in sharded)


@pytest.mark.slow
def test_recomputed_layers_keep_neither_variable_shards_nor_inner_results_also_on_cpus():
    kept, recomputed = (
        compiled_step(*train(4, epochs=0, blocks=6, **options)[:2]).memory_analysis().temp_size_in_bytes
        for options in (SHARDED, RECOMPUTED)
    )
    assert recomputed < kept / 3


@pytest.mark.slow
def test_recomputed_layers_are_those_that_were_named():
    counts = {}
    for name, recompute in {
        "none": None,
        "blocks": "blocks",
        "one": lambda layer: layer.name == "block_1",
    }.items():
        strategy, model, _ = train(2, epochs=0, blocks=2, shard="variables", recompute=recompute)
        functions = strategy._functions_of(model)
        step = functions.build_step(functions.executor, "train")
        counts[name] = str(jax.make_jaxpr(step)(*state_and_batch(strategy, model))).count("remat2[")
    assert counts["none"] == 0 < counts["one"] < counts["blocks"]


class Short(layers.Layer):
    """Has a large weight of short axes."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(7,) * 5, name="short")

    def call(self, x):
        return x * ops.mean(self.weight)


def test_one_line_names_the_large_variables_that_stay_whole(caplog):
    with caplog.at_level("INFO", "lockstep"):
        with lockstep.MirroredStrategy([f"cpu:{number}" for number in range(8)], **SHARDED).scope():
            model = keras.Sequential([keras.Input((3,)), Short(), Short()])
            model.compile("sgd", "mse")
        model.fit(np.ones((8, 3)), np.ones((8, 3)), verbose=0)
    (note,) = [record.message for record in caplog.records if "stay whole" in record.message]
    size = f"{4 * 2 * 7**5 / 2**10:.1f} KiB"
    assert f"{size} of large variables stay whole on each device, as each of their axes is shorter than 8: " in note
    assert note.count("/short' (7, 7, 7, 7, 7)") == 2


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["variables", "optimizer"])
def test_sizes_that_the_devices_do_not_divide_are_sharded_with_padding(shard, tmp_path):
    with lockstep.MirroredStrategy([f"cpu:{number}" for number in range(3)], shard=shard).scope():
        model = keras.Sequential([keras.Input((65,)), layers.Dense(67, name="odd")])
        model.compile("adam", "mse")
    model.fit(np.ones((4, 65)), np.ones((4, 67)), verbose=0)
    slots = [variable for variable in model.optimizer.variables if variable.shape == (65, 67)]
    sharded = [*slots, *([model.layers[0].kernel] if shard == "variables" else [])]
    assert [array.shape for array in stored_arrays(sharded)] == [(65, 69)] * len(sharded)
    assert set(bytes_by_device(sharded).values()) == {len(sharded) * 65 * 23 * 4}
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_custom_loop_gathers_a_variable_with_padding_once_a_call(monkeypatch):
    strategy = lockstep.MirroredStrategy([f"cpu:{number}" for number in range(3)], **SHARDED)
    with strategy.scope():
        variable = keras.Variable(np.ones((65, 67)), name="odd")

    def on_replica():
        return ops.sum(variable)

    strategy.run(on_replica)  # Finds the variable while it is traced.
    gather, gathered = PaddedArray.without_padding, []
    monkeypatch.setattr(PaddedArray, "without_padding", lambda self: gathered.append(self) or gather(self))
    found = strategy.reduce("mean", strategy.run(on_replica), axis=None)
    assert (len(gathered), float(found)) == (1, 65 * 67)


@pytest.mark.slow
def test_what_is_not_finite_is_found_with_shards_with_padding():
    def message(shard):
        keras.backend.clear_session()  # The message names layers.
        with lockstep.MirroredStrategy([f"cpu:{number}" for number in range(3)], shard=shard).scope():
            model = keras.Sequential([keras.Input((65,)), layers.Dense(67, name="odd"), layers.Dense(1, name="last")])
            model.compile("sgd", "mse")
        x = np.ones((9, 65), "float32")
        x[4] = 3e38  # whose products are infinite
        with pytest.raises(lockstep.NonFiniteError) as error:
            model.fit(x, x[:, :1], batch_size=9, shuffle=False, verbose=0, callbacks=[lockstep.callbacks.NanGuard()])
        return str(error.value)

    found = message("variables")
    assert found == message(None)
    assert "row 4" in found


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_loss_reads_variables_with_padding_of_another_model(deterministic):
    def trained(scope):
        keras.utils.set_random_seed(0)
        with scope:
            teacher = keras.Sequential([keras.Input((65,)), layers.Dense(67)])
            model = keras.Sequential([keras.Input((65,)), layers.Dense(65)])
            model.compile("sgd", lambda y, outputs: ops.mean((teacher(y) - teacher(outputs)) ** 2, -1))
        x = np.random.default_rng(0).normal(size=(9, 65)).astype("float32")
        return model.fit(x, x, batch_size=9, epochs=2, verbose=0).history["loss"]

    strategy = lockstep.MirroredStrategy(
        [f"cpu:{number}" for number in range(3)], deterministic=deterministic, **SHARDED
    )
    np.testing.assert_allclose(trained(strategy.scope()), trained(contextlib.nullcontext()), rtol=1e-5)


def test_a_variable_with_padding_is_used_as_any_other():
    with lockstep.MirroredStrategy([f"cpu:{number}" for number in range(3)], **SHARDED).scope():
        variable = keras.Variable(np.arange(65.0 * 67).reshape(65, 67), name="odd")
    expected = np.arange(65.0 * 67, dtype="float32").reshape(65, 67)
    for new, value in ((None, expected), (2 * variable, 2 * expected), (expected - 1, expected - 1)):
        if new is not None:
            variable.assign(new)
        assert [array.shape for array in stored_arrays([variable])] == [(65, 69)]
        found = variable.value, variable.numpy(), variable[:], ops.convert_to_numpy(variable), np.asarray(variable)
        for one in found:
            np.testing.assert_array_equal(one, value)
        assert variable.value.shape == jax.jit(lambda: variable + 0)().shape == (65, 67)
    variable.assign_add(np.ones((65, 67)))
    np.testing.assert_array_equal(variable, expected)
    assert "shape=(65, 67)" in repr(variable)
    np.testing.assert_array_equal(copy.deepcopy(variable), expected)
    with pytest.raises(ValueError, match=r"\(65, 69\)"):
        variable.assign(np.zeros((65, 69)))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_an_optimizer_that_needs_whole_tensors_is_named(caplog, optimizer):
    with caplog.at_level("INFO", "lockstep"):
        train(2, epochs=0, optimizer=optimizer, **SHARDED)
    assert ("Muon multiplies whole matrices" in caplog.text) == (optimizer == "muon")


def test_variables_that_no_recomputed_layer_holds_are_named(caplog):
    with caplog.at_level("INFO", "lockstep"):
        train(2, epochs=0, blocks=3, shard="variables", recompute=lambda layer: layer.name == "block_1")
    assert (
        "no recomputed layer holds 'first/kernel' (64, 128), 'block_0/inner/kernel' (128, 128), 'block_0/outer/kernel' (128, 128), "
        "'block_2/inner/kernel' (128, 128) and 1 more, which strategy.layout(model) lists: 288.0 KiB" in caplog.text
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_a_model_that_is_not_compiled_predicts(caplog, devices):
    with lockstep.MirroredStrategy([f"cpu:{number}" for number in range(devices)], **SHARDED).scope():
        model = keras.Sequential([keras.Input((64,)), layers.Dense(128)])
    with caplog.at_level("INFO", "lockstep"):
        assert model.predict(np.ones((5, 64)), verbose=0).shape == (5, 128)
    assert "stay whole" not in caplog.text
    assert "kept for the backward pass" not in caplog.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shard": "weights"}, 'expected "optimizer", "variables" or None'),
        ({"shard": "variables", "cross_device_ops": "ring"}, "not by RingAllReduce"),
        ({"recompute": "blocks"}, 'recompute belongs to shard="variables"'),
        ({"shard": "variables", "recompute": "all"}, 'expected "blocks", a function of a layer or None'),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, says):
    with pytest.raises(lockstep.OptionError, match=says):
        lockstep.MirroredStrategy(["cpu:0", "cpu:1"], **options)


@pytest.mark.slow
def test_callbacks_work_as_without_shards(tmp_path):
    def fit(name, **options):
        callbacks = [
            keras.callbacks.EarlyStopping("loss", patience=0, restore_best_weights=True, start_from_epoch=1),
            keras.callbacks.ModelCheckpoint(
                tmp_path / f"{name}.weights.h5", save_weights_only=True, save_best_only=True, monitor="loss"
            ),
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            lockstep.callbacks.NanGuard(),
            lockstep.callbacks.TensorBoard(tmp_path / name, histogram_freq=1),
        ]
        optimizer = keras.optimizers.Adam(0.05, use_ema=True, global_clipnorm=1.0, gradient_accumulation_steps=2)
        return train(2, epochs=4, callbacks=callbacks, optimizer=optimizer, deterministic=True, **options)

    found, expected = fit("sharded", **SHARDED), fit("whole")
    assert_equal_bits(found, expected)
    assert (tmp_path / "sharded.weights.h5").stat().st_size == (tmp_path / "whole.weights.h5").stat().st_size


@pytest.mark.slow
def test_a_program_that_is_not_compiled_and_custom_loops_have_the_numbers_without_shards():
    x, y = np.random.default_rng(0).normal(size=(8, 64)).astype("float32"), np.arange(8) % 3
    each, results = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None), {}
    for name, options in {"sharded": SHARDED, "whole": {}}.items():
        strategy, model, _ = train(2, epochs=1, rows=9, optimizer="sgd", **options)

        @jax.jit
        def step(weights, others, batch, strategy=strategy, model=model):
            def replica(weights, others, x, y):
                def loss(weights):
                    outputs, _ = model.stateless_call(weights, others, x)
                    return lockstep.compute_average_loss(each(y, outputs), global_batch_size=8)

                return lockstep.get_replica_context().all_reduce("SUM", jax.grad(loss)(weights))

            return strategy.run(replica, args=(weights, others, *batch))

        weights, others = (
            [one.value for one in kind] for kind in (model.trainable_variables, model.non_trainable_variables)
        )
        data = next(iter(strategy.experimental_distribute_dataset([(x, y)])))
        gradients = [np.asarray(one) for one in step(weights, others, data)]
        model.compile("sgd", logits_loss, run_eagerly=True)
        results[name] = [*gradients, model.train_on_batch(x, y), *map(np.asarray, model.get_weights())]
    for ours, theirs in zip(results["sharded"], results["whole"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
