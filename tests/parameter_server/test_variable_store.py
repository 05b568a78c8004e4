"""What servers do to variables is what Keras's optimizer does to the whole model."""

import keras
import numpy as np
import pytest

from lockstep import OptionError
from lockstep._array_encoding import ArraySpec
from lockstep.parameter_server.gradient_step import rules_of, specs_of
from lockstep.parameter_server.optimizer_sharding import check_optimizer
from lockstep.parameter_server.sharding import FixedShardsPartitioner, plan_shards
from lockstep.parameter_server.sparse_rows import SparseGradient, gradient_of_shard
from lockstep.parameter_server.variable_store import Push, VariableStore
from tests.parameter_server.threaded_servers import SPECS, values_of
from tests.support.marks import quick_first

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipvalue=0.5),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "schedule-free": lambda: keras.optimizers.ScheduleFreeAdamW(0.01, warmup_steps=2),
    "schedule": lambda: keras.optimizers.RMSprop(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "average": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}


def by_keras(optimizer, gradients):
    """Values after each gradient has been applied by Keras, in one process, to whole variables."""
    variables = {name: keras.Variable(value) for name, value in values_of().items()}
    for each in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(each[name]) for name in variables], list(variables.values()))
    return {name: np.array(variable.value) for name, variable in variables.items()}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-7, err_msg=name)  # float32, a few updates


@pytest.mark.parametrize("name", quick_first(OPTIMIZERS))
@pytest.mark.parametrize(("servers", "partitioner"), [(1, None), (2, None), (2, FixedShardsPartitioner(3))])
def test_updates_are_those_of_keras_wherever_the_shards_are(name, servers, partitioner):
    made = plan_shards(SPECS, servers, partitioner)
    stores = [VariableStore(made.specs_at(number), OPTIMIZERS[name]()) for number in range(servers)]
    for store, part in zip(stores, made.split(values_of()), strict=True):
        store.load(*store.prepare(part))
    gradients = [values_of(seed=seed) for seed in (1, 2, 3, 4)]
    for each in gradients:
        for store, part in zip(stores, made.split(each), strict=True):
            store.apply([Push(part)])
    parts = [store.snapshot.values for store in stores]
    found = {
        name: np.concatenate([np.atleast_1d(parts[s.server][s.spec.name]) for s in shards]).reshape(
            values_of()[name].shape
        )
        for name, shards in made.shards.items()
    }
    assert_close(found, by_keras(OPTIMIZERS[name](), gradients))


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_sparse_gradient_equals_a_dense_one_with_zero_rows(name):
    store = VariableStore(SPECS, OPTIMIZERS[name]())
    store.load(*store.prepare(values_of()))
    gradients = []
    for seed, indices in enumerate([[5, 1, 5], [0], [], [6, 5, 4, 3, 2]]):
        whole = values_of(seed=seed + 1)
        rows = np.random.default_rng(seed).normal(size=(len(indices), 2)).astype("float32")
        store.apply([Push(whole | {"table": SparseGradient(np.array(indices, np.int32), rows)})])
        dense = np.zeros((7, 2), "float32")
        np.add.at(dense, np.array(indices, int), rows)
        gradients.append(whole | {"table": dense})
    assert_close(dict(store.snapshot.values), by_keras(OPTIMIZERS[name](), gradients))


def test_parts_of_an_update_are_averaged_by_their_weight():
    store = VariableStore(SPECS, OPTIMIZERS["Adam"]())
    store.load(*store.prepare(values_of()))
    parts = [values_of(seed=seed) for seed in (1, 2, 3)]
    pushes = [Push(part, weight) for part, weight in zip(parts, (3, 1, 4), strict=True)]
    assert store.apply(pushes) == 1
    mean = {name: np.average([part[name] for part in parts], axis=0, weights=(3, 1, 4)) for name in parts[0]}
    mean = {name: value.astype("float32") for name, value in mean.items()}
    assert_close(dict(store.snapshot.values), by_keras(OPTIMIZERS["Adam"](), [mean]))


def test_a_snapshot_does_not_change():
    store = VariableStore(SPECS, OPTIMIZERS["Adam"]())
    given = values_of()
    store.load(*store.prepare(given))
    before = store.snapshot
    given["scale"][...] = 100
    store.apply([Push(values_of(seed=1))])
    assert (before.version, store.snapshot.version) == (0, 1)
    for name, value in values_of().items():
        assert (np.array(before.values[name]) == value).all()


def test_a_store_continues_from_the_state_of_another_bit_for_bit():
    one, other = VariableStore(SPECS, OPTIMIZERS["Adam"]()), VariableStore(SPECS, OPTIMIZERS["Adam"]())
    one.load(*one.prepare(values_of()))
    one.apply([Push(values_of(seed=1))])
    other.load(*other.prepare(one.state(), one.snapshot.version))
    for store in (one, other):
        store.apply([Push(values_of(seed=2))])
    assert one.snapshot.version == other.snapshot.version == 2
    assert all(a.tobytes() == b.tobytes() for a, b in zip(one.state().values(), other.state().values(), strict=True))


def test_an_optimizer_sees_paths_and_names_of_the_model_also_of_shards():
    specs = (ArraySpec("net/dense/kernel[2:5]", (3, 2), "float32"), ArraySpec("net/dense/bias", (2,), "float32"))
    optimizer = keras.optimizers.SGD(0.5, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["^kernel$"])
    store = VariableStore(specs, optimizer)
    store.load(*store.prepare(values_of(specs)))
    store.apply([Push({spec.name: np.zeros(spec.shape, spec.dtype) for spec in specs})])
    for spec, decay in zip(specs, (1, 0.95), strict=True):
        np.testing.assert_allclose(store.snapshot.values[spec.name], decay * values_of(specs)[spec.name], rtol=1e-6)


def test_what_the_optimizer_asks_of_variables_is_that_of_the_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, kernel_constraint="max_norm", name="one")])
    optimizer = keras.optimizers.SGD(0.5, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=[model.layers[0].bias])
    model.compile(optimizer)
    rules, specs = rules_of(model), specs_of(model)
    assert rules.without_decay == {specs[1].name}
    store = VariableStore(specs, keras.optimizers.SGD(0.5, weight_decay=0.1), rules)
    store.load(
        *store.prepare(
            {spec.name: np.asarray(v.value) for spec, v in zip(specs, model.trainable_variables, strict=True)}
        )
    )
    gradients = [np.full(spec.shape, -3, "float32") for spec in specs]
    store.apply([Push({spec.name: each for spec, each in zip(specs, gradients, strict=True)})])
    optimizer.apply(gradients, model.trainable_variables)
    for spec, variable in zip(specs, model.trainable_variables, strict=True):
        np.testing.assert_allclose(store.snapshot.values[spec.name], variable.numpy(), rtol=1e-6)
    cut = plan_shards(specs, 2, FixedShardsPartitioner(2))
    with pytest.raises(OptionError, match=r"MaxNorm needs each variable as a whole, and .* cuts '.*one/kernel' into 2"):
        check_optimizer(optimizer, cut, rules)
    model.layers[0].bias.overwrite_with_gradient = True
    with pytest.raises(OptionError, match=r"one/bias' gets a new value in place of a gradient"):
        rules_of(model)


def test_an_optimizer_of_other_variables_is_refused():
    optimizer = OPTIMIZERS["SGD"]()
    VariableStore(SPECS, optimizer)
    with pytest.raises(
        OptionError, match=r"is already built for other variables\. Fix: give each server an optimizer of its own"
    ):
        VariableStore(SPECS, optimizer)


def test_rows_fall_to_their_shards():
    rows = SparseGradient(np.int32([0, 2, 6]), np.float32([[4, 4], [2, 2], [4, 4]]))
    shards = plan_shards(SPECS, 2, FixedShardsPartitioner(2)).shards["table"]
    parts = [gradient_of_shard(rows, shard) for shard in shards]
    assert [part.indices.tolist() for part in parts] == [[0, 2], [2]]
    assert [part.values.tolist() for part in parts] == [[[4, 4], [2, 2]], [[4, 4]]]
