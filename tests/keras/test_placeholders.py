"""Variables of a plan that take no memory: large ones read as zeros, small ones have their values."""

import jax
import keras
import numpy as np
import pytest

from lockstep._errors import ModelError
from lockstep._keras.placeholders import placeholder_variables


class Late(keras.Model):
    """A model whose layers are built by their first batch."""

    def __init__(self):
        super().__init__()
        self.large, self.small = keras.layers.Dense(1024), keras.layers.Dense(4)

    def call(self, x):
        return self.small(self.large(x))


def takes_memory(variable):
    return not isinstance(variable.value, np.ndarray) or any(variable.value.strides)


def built():
    keras.utils.set_random_seed(1)
    model = Late()
    model.compile("adam", "mse")
    model(keras.Input((1024,)))
    model.optimizer.build(model.trainable_variables)
    return model


def test_large_variables_of_model_and_optimizer_take_no_memory_and_small_ones_have_their_values():
    expected = built()
    with placeholder_variables():
        model = built()
    for variable, real in zip(model.variables, expected.variables, strict=True):
        assert (variable.shape, variable.dtype) == (real.shape, real.dtype)
        assert takes_memory(variable) == (variable.shape != (1024, 1024))
        np.testing.assert_array_equal(variable.numpy(), real.numpy() if takes_memory(variable) else 0)
    assert sum(not takes_memory(one) for one in model.optimizer.variables) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_a_placeholder_has_the_type_of_its_variable(dtype):
    with placeholder_variables():
        variable = keras.Variable(keras.initializers.Zeros(), (1024, 1024), dtype)
    assert variable.value.dtype == variable.dtype == dtype
    assert not takes_memory(variable)


def test_values_that_are_set_are_not_kept_if_they_are_large(tmp_path):
    real = built()
    real.save_weights(tmp_path / "real.weights.h5")
    with placeholder_variables():
        model = built()
        model.load_weights(tmp_path / "real.weights.h5")
        constant = keras.Variable(np.ones((1024, 1024), "float32"))
        constant.assign_add(constant)
    assert not takes_memory(model.large.kernel)
    assert not takes_memory(constant)
    np.testing.assert_array_equal(model.small.kernel.numpy(), real.small.kernel.numpy())


def test_afterwards_variables_have_values_again():
    with placeholder_variables():
        model = built()
    new = keras.Variable(keras.initializers.Ones(), (1024, 1024))
    model.large.kernel.assign(new)
    assert new.numpy().all()
    assert model.large.kernel.numpy().all()


def test_variables_that_were_there_before_keep_their_values_and_can_be_trained():
    model = built()
    data = np.ones((4, 1024), "float32"), np.ones((4, 4), "float32")
    model.fit(*data, verbose=0)
    before = model.large.kernel.numpy()
    with placeholder_variables():
        model.fit(*data, verbose=0)
        new = built()
    after = model.large.kernel.numpy()
    assert after.all()
    assert not np.array_equal(after, before)
    assert not takes_memory(new.large.kernel)


@pytest.mark.parametrize(
    ("owner", "name"), [(keras.Model, "save_weights"), (keras.saving, "save_weights"), (keras.models, "save_model")]
)
def test_zeros_are_not_saved(tmp_path, owner, name):
    with placeholder_variables():
        large, small = built(), keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        with pytest.raises(ModelError, match=r"'late.*' is saved before its first fit.* would have zeros\. Fix: "):
            getattr(owner, name)(large, tmp_path / "large.weights.h5")
        small.save(tmp_path / "small.keras")
    assert [file.name for file in tmp_path.iterdir()] == ["small.keras"]


def test_scripts_can_use_a_placeholder_as_an_array_of_jax():
    with placeholder_variables():
        kernel = built().large.kernel
        kernel.assign(kernel.value.at[0, 0].set(1.0))
        updated = keras.ops.scatter_update(kernel, [[0, 0]], [1.0])
        value = before = kernel.value
        value += 1
        value -= 2
        value *= 2
        value /= 2
        value **= 2
        value @= np.eye(1024, dtype="float32")
        kernel.assign(value)
    assert not takes_memory(kernel)
    assert updated[0, 0] == 1
    assert value.all()
    assert not before.any()
    assert kernel.value.block_until_ready() is kernel.value
    assert kernel.value.sharding.device_set == kernel.value.devices() == jax.numpy.zeros(()).devices()
