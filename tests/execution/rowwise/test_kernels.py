"""The proof reads kernels of accelerators: cuDNN's attention, which Keras takes on GPUs, and Pallas kernels that are mapped over the rows."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import pallas
from jax.experimental.pallas.ops.tpu.splash_attention import CausalMask, MultiHeadMask, make_splash_mha_single_device
from keras import layers

import lockstep
from lockstep.execution.rowwise.row_axes import Mixed

from .following import dependences_of_function, dependences_of_model, is_by_rows

X = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")


@pytest.fixture
def gpu(monkeypatch):
    """Have JAX and Keras trace attention as on a GPU."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)


ATTENTION = {
    "self": lambda x: layers.MultiHeadAttention(2, 64, dtype="bfloat16")(x, x),
    "causal": lambda x: layers.MultiHeadAttention(2, 64, dtype="bfloat16")(x, x, use_causal_mask=True),
    "masked": lambda x: layers.MultiHeadAttention(2, 64, dtype="bfloat16")(
        x, x, attention_mask=keras.ops.greater(keras.ops.einsum("btc,bsc->bts", x, x), 0)
    ),
    "grouped": lambda x: layers.GroupQueryAttention(64, 4, 2, dtype="bfloat16")(x, x),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_cudnn_treats_each_row_by_itself(name, gpu):
    inputs = keras.Input((16, 8))
    model = keras.Model(inputs, ATTENTION[name](inputs))
    batch = jnp.ones((6, 16, 8))
    assert "dot_product_attention_fwd_wrapper" in str(jax.make_jaxpr(model)(batch))
    (outputs,) = dependences_of_model(model, batch, training=True)
    assert is_by_rows(outputs), outputs


def attention(x, **options):
    """Return cuDNN's attention of one head over axis 1."""
    heads = jnp.repeat(x[..., None, None], 64, axis=-1).astype("bfloat16")
    return cudnn.dot_product_attention(heads, heads, heads, **options)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: attention(x, dropout_rate=0.5),
        lambda x: attention(x.T),
        lambda x: attention(x + x.mean(0)),
        keras.ops.custom_gradient(lambda x: (attention(x), lambda upstream: 1 + upstream[..., 0, 0])),
    ],
    ids=["dropped by a seed", "over the rows", "of mixed rows", "own derivative"],
)
def test_attention_of_cudnn_that_mixes_rows_is_rejected(function, gpu):
    (place,) = dependences_of_function(function, X)
    assert isinstance(place, Mixed), place


def summed(*arrays):
    """Return the cumulative sum of the first array plus the sums of the others, by a kernel."""

    def kernel(first, *refs):
        *others, result = refs
        result[...] = jnp.cumsum(first[...], 0) + sum(each[...].sum() for each in others)

    shape = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    return pallas.pallas_call(kernel, out_shape=shape, interpret=True)(*arrays)


def splash(x):
    """Return TPUs' attention of two heads over axis 1, which Keras takes there."""
    heads = jnp.broadcast_to(x[:, None, :1, None], (len(x), 2, 128, 128))
    return jax.vmap(make_splash_mha_single_device(MultiHeadMask([CausalMask((128, 128))] * 2)))(heads, heads, heads)


def logged(x):
    """Return the rows by a kernel that calls the host."""

    def kernel(values, result):
        jax.experimental.io_callback(print, None, values[0])
        result[...] = values[...]

    return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


@jax.custom_vjp
def with_own_derivative(x):
    """Return sums by a kernel, with a derivative of a kernel that is not JAX's."""
    return jax.vmap(summed)(x)


with_own_derivative.defvjp(lambda x: (jax.vmap(summed)(x), None), lambda _, gradient: (jax.vmap(summed)(gradient),))

BY_ROWS = {
    "one array": lambda x: jax.vmap(summed)(x),
    "two arrays": lambda x: jax.vmap(summed)(x, 2 * x),
    "a weight": lambda x: jax.vmap(summed, (0, None))(x, jnp.ones(3)),
    "rows along the second axis": lambda x: jax.vmap(summed, 1, 1)(x.T).T,
    "two mapped axes": lambda x: jax.vmap(jax.vmap(summed))(x[..., None])[..., 0],
    "attention of TPUs": splash,
}
MIXING = {
    "not mapped": summed,
    "mapped over columns": lambda x: jax.vmap(summed, 1)(x).T,
    "all rows for each": lambda x: jax.vmap(summed, (0, None))(x, x),
    "a table of the batch": lambda x: jax.vmap(summed)(x, jnp.arange(float(len(x)))[:, None]),
    "a call of the host": jax.vmap(logged),
    "own derivative": with_own_derivative,
    "another kernel for more rows": lambda x: jax.vmap(lambda row: summed(row, row * 0 + (len(x) > 5)))(x),
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_kernels_that_are_mapped_over_the_rows_treat_each_by_itself(name):
    (place,) = dependences_of_function(BY_ROWS[name], X)
    assert is_by_rows(place), place


@pytest.mark.parametrize("name", MIXING)
def test_kernels_that_mix_rows_are_rejected(name):
    (place,) = dependences_of_function(MIXING[name], X)
    assert isinstance(place, Mixed), place


def test_a_model_with_a_kernel_is_split_and_predicts_as_plain_keras(caplog):
    def model():
        inputs = keras.Input((4,))
        made = keras.Model(inputs, keras.ops.tanh(layers.Lambda(jax.vmap(summed), output_shape=(4,))(inputs)))
        made.compile(loss="mse")
        return made

    with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
        own = model()
    np.testing.assert_array_equal(own.predict(X, 4, verbose=0), model().predict(X, 4, verbose=0))
    assert "global batch" not in caplog.text
