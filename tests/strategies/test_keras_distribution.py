"""Behaviours of keras.distribution's ModelParallel, on it and on ModelParallelStrategy; where they differ, both are shown.

The table in docs/migrating.md says the same in words.
"""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from tests.laws.cases import logits_loss

CPUS = [f"cpu:{number}" for number in range(4)]
RULES = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}
OURS, KERAS = "ours", "keras"
BOTH = pytest.mark.parametrize("who", [OURS, KERAS])


@pytest.fixture(autouse=True, scope="module")
def _four_devices():
    lockstep.MirroredStrategy(CPUS)


def layout_map(mesh, rules):
    layout = keras.distribution.LayoutMap(mesh)
    for pattern, axes in rules.items():
        layout[pattern] = axes
    return layout


@contextlib.contextmanager
def scope_of(who, rules=RULES, shape=(2, 2)):
    """Open the scope of one of the two; gives the strategy, or the distribution."""
    mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"), CPUS[: shape[0] * shape[1]])
    layout = layout_map(mesh, rules)
    if who == KERAS:
        distribution = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
        with distribution.scope():
            yield distribution
    else:
        strategy = lockstep.ModelParallelStrategy(mesh, layout, devices=CPUS[: shape[0] * shape[1]])
        with strategy.scope():
            yield strategy


def network(hidden=256, width=64):
    keras.utils.set_random_seed(0)
    up, down = layers.Dense(hidden, activation="relu", name="up"), layers.Dense(width, name="down")
    inputs = keras.Input((width,))
    model = keras.Model(inputs, layers.Dense(3, name="last")(down(up(inputs))), name="net")
    model.compile(keras.optimizers.SGD(0.1), logits_loss)
    return model


def data(rows=16, width=64):
    return np.random.default_rng(0).normal(size=(rows, width)).astype("float32"), np.arange(rows) % 3


def fit(model, rows=16, batch_size=8, width=64):
    return model.fit(*data(rows, width), batch_size=batch_size, epochs=2, shuffle=False, verbose=0).history["loss"]


def parts(variable):
    return {str(shard.index) for shard in variable.value.addressable_shards}


@BOTH
def test_variables_are_sharded_by_the_rules_when_they_are_made(who):
    with scope_of(who):
        model = network()
    assert [len(parts(one)) for one in model.get_layer("up").weights] == [2, 2]
    assert [len(parts(one)) for one in model.get_layer("down").weights] == [2, 1]


@pytest.mark.slow
@BOTH
def test_variables_of_the_optimizer_are_sharded_like_those_of_the_model(who):
    with scope_of(who):
        model = network()
        model.compile("adam", logits_loss)
        fit(model)
        found = {one.path.partition("/")[2]: len(parts(one)) for one in model.optimizer.variables}
    assert (found["up_kernel_momentum"], found["down_kernel_velocity"], found["last_kernel_momentum"]) == (2, 2, 1)


@pytest.mark.slow
@BOTH
def test_numbers_are_those_of_one_device(who):
    with scope_of(who):
        found = fit(network())
    np.testing.assert_allclose(found, fit(network()), rtol=1e-5)


@pytest.mark.slow
@BOTH
def test_a_rule_that_equals_the_path_comes_before_patterns(who):
    with scope_of(who, {"up/kernel": (None, "model"), ".*kernel": (None, None)}):
        model = network()
        fit(model)
    assert len(parts(model.get_layer("up").kernel)) == 2
    assert len(parts(model.get_layer("down").kernel)) == 1


@BOTH
def test_two_patterns_for_one_variable_are_refused(who):
    with pytest.raises(ValueError, match="match"), scope_of(who, {"up/k.*": (None, "model"), ".*kernel": (None, None)}):
        fit(network())


@BOTH
def test_a_rule_for_the_output_of_a_layer_is_obeyed(who):
    with scope_of(who, RULES | {"up/output": ("batch", "model")}):
        found = fit(network())
    np.testing.assert_allclose(found, fit(network()), rtol=1e-5)


@BOTH
def test_saved_weights_are_whole(who, tmp_path):
    with scope_of(who):
        model = network()
        model.save_weights(tmp_path / "some.weights.h5")
        expected = model.get_weights()
    plain = network()
    plain.load_weights(tmp_path / "some.weights.h5")
    for ours, theirs in zip(plain.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# --- where they differ ---------------------------------------------------------------------------------------------------


def test_a_rule_without_a_match_is_silent_in_keras_and_named_here(caplog):
    rules = {"upp/kernel": (None, "model")}
    with scope_of(KERAS, rules):
        assert len(parts(network().get_layer("up").kernel)) == 1
    with caplog.at_level("INFO", "lockstep"), scope_of(OURS, rules):
        fit(network())
    assert "rule 'upp/kernel' matches none of its variables" in caplog.text
    assert "variable 'up/kernel' (64.0 KiB) is whole on each device: no rule matches it" in caplog.text


@pytest.mark.slow
def test_an_axis_that_the_mesh_does_not_divide_is_an_error_in_keras_and_whole_here(caplog):
    with pytest.raises(ValueError, match="evenly divide"), scope_of(KERAS):
        network(hidden=255)
    with caplog.at_level("INFO", "lockstep"), scope_of(OURS):
        found = fit(network(hidden=255))
    assert "variable 'up/kernel' is not sharded along axis 1" in caplog.text
    np.testing.assert_allclose(found, fit(network(hidden=255)), rtol=1e-5)


def test_an_axis_that_the_mesh_lacks_is_refused_in_a_layout_map_and_in_rules():
    rules = {"up/kernel": (None, "modle")}
    with pytest.raises(ValueError, match="Invalid axis names"), scope_of(KERAS, rules):
        pytest.fail("the layout was made")
    with pytest.raises(lockstep.OptionError, match="the mesh has 'batch', 'model'"):
        lockstep.ModelParallelStrategy({"batch": 2, "model": 2}, rules, devices=CPUS)


@pytest.mark.slow
def test_a_batch_that_the_mesh_does_not_divide_is_an_error_in_keras_and_exact_here():
    with scope_of(KERAS), pytest.raises(ValueError, match="evenly divide"):
        fit(network(), rows=15, batch_size=7)
    with scope_of(OURS):
        found = fit(network(), rows=15, batch_size=7)
    np.testing.assert_allclose(found, fit(network(), rows=15, batch_size=7), rtol=1e-5)
