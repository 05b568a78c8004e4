"""Rewrites of slow operations on CPUs: values and derivatives equal XLA's, and other operations are unchanged."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import lockstep
from lockstep.execution import cpu_rewrites
from lockstep.execution.cpu_rewrites import rewrite_for_cpu
from tests.support.marks import every_pair

pytestmark = pytest.mark.optimized

SLOW = {"conv_general_dilated", "reduce_window_max"}
LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
LENGTHS = (9, 7, 5)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def convolution(rank, stride=1, padding="SAME", dilation=1, groups=1, **options):
    chosen = {"dimension_numbers": LAYOUTS[rank], "rhs_dilation": (dilation,) * rank, **options}

    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, (stride,) * rank, padding, feature_group_count=groups, **chosen)

    return convolve


def pooling(window, strides=None, padding="VALID"):
    """Return max pooling over all axes between rows and channels."""

    def pool(x):
        return lax.reduce_window(x, -np.inf, lax.max, (1, *window, 1), (1, *(strides or window), 1), padding)

    return pool


def operations(function, *arguments):
    """Return the names of the slow operations in a trace, also inside calls."""

    def names(jaxpr):
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            for inner in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
                if hasattr(inner, "eqns"):
                    yield from names(inner)

    return SLOW & set(names(jax.make_jaxpr(function)(*arguments).jaxpr))


def with_gradients(function, arguments):
    """Return values and, for random cotangents, the gradients of all arguments."""
    shape = jax.eval_shape(function, *arguments).shape
    return jax.jit(lambda arguments, along: _vjp(function, arguments, along))(arguments, numbers(*shape, seed=1))


def _vjp(function, arguments, along):
    values, back = jax.vjp(function, *arguments)
    return values, back(along)


def equals_the_original(function, *arguments, tolerance=1e-4):
    """Compare with the tolerance of float32 sums of some hundred terms near 1 in another order."""
    expected, got = (with_gradients(each, arguments) for each in (function, rewrite_for_cpu(function)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=tolerance), expected, got)


def is_left_alone(function, *arguments):
    assert str(jax.make_jaxpr(rewrite_for_cpu(function))(*arguments)) == str(jax.make_jaxpr(function)(*arguments))


# --- convolutions ---------------------------------------------------------------------------------------------------------

KERNELS = {  # window, channels in, channels a group reads, channels out
    "depthwise": (3, 6, 1, 6),
    "depthwise, two outputs each": (3, 4, 1, 8),
    "few channels": (3, 2, 2, 5),
    "one channel": (3, 1, 1, 4),
    "1x1": (1, 6, 6, 5),
    "1x1 depthwise": (1, 6, 1, 6),
}


def operands(rank, kernel):
    window, channels, read, made = KERNELS[kernel]
    return numbers(2, *LENGTHS[:rank], channels), numbers(*(window,) * rank, read, made), channels // read


STEPS = [(1, 1, "SAME"), (1, 1, "VALID"), (2, 1, "SAME"), (2, 1, "VALID"), (1, 2, "SAME"), (2, 2, "VALID")]


@pytest.mark.parametrize(("rank", "kernel", "steps"), every_pair(LAYOUTS, KERNELS, STEPS))
def test_a_convolution_in_other_words_gives_its_values_and_gradients(rank, kernel, steps):
    stride, dilation, padding = steps
    x, weights, groups = operands(rank, kernel)
    convolve = convolution(rank, stride, padding, dilation, groups)
    assert operations(convolve, x, weights)
    assert not operations(rewrite_for_cpu(convolve), x, weights)
    equals_the_original(convolve, x, weights)


@pytest.mark.parametrize("padding", [[(2, 0), (0, 3)], [(-1, 0), (2, -2)], [(4, 4), (4, 4)]])
@pytest.mark.parametrize("kernel", ["depthwise", "few channels"])
def test_a_convolution_with_padding_of_its_own(kernel, padding):
    x, weights, groups = operands(2, kernel)
    equals_the_original(convolution(2, 2, padding, 1, groups), x, weights)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    window=st.lists(st.integers(1, 4), min_size=2, max_size=2),
    steps=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    dilation=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    padding=st.sampled_from(["SAME", "VALID"]),
    channels=st.integers(1, 4),
    outputs=st.integers(1, 3),
    is_depthwise=st.booleans(),
)
def test_any_shape_of_a_convolution(lengths, window, steps, dilation, padding, channels, outputs, is_depthwise):
    rank = len(lengths)
    x = numbers(2, *lengths, channels)
    weights = numbers(*window[:rank], *((1, channels * outputs) if is_depthwise else (channels, outputs)))

    def convolve(x, weights):
        groups = {"feature_group_count": channels if is_depthwise else 1, "dimension_numbers": LAYOUTS[rank]}
        return lax.conv_general_dilated(x, weights, steps[:rank], padding, rhs_dilation=dilation[:rank], **groups)

    equals_the_original(convolve, x, weights)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of two or three rows of the arrays here."""
    monkeypatch.setattr(cpu_rewrites, "CHUNK_BYTES", 1 << 14)


@pytest.mark.parametrize(("rank", "stride", "dilation"), [(2, 1, 1), (1, 2, 1), (3, 1, 2)])
def test_the_gradient_of_a_kernel_in_chunks_is_that_of_all_rows(small_chunks, rank, stride, dilation):
    rows = {1: 90, 2: 11, 3: 3}[rank]
    x, weights = numbers(rows, *LENGTHS[:rank], 24), numbers(*(3,) * rank, 24, 5)
    convolve = convolution(rank, stride, dilation=dilation)
    equals_the_original(convolve, x, weights, tolerance=1e-3)
    by_kernel = jax.grad(lambda weights: rewrite_for_cpu(convolve)(x, weights).sum())
    count = str(jax.make_jaxpr(by_kernel)(weights)).count("conv_general_dilated[")
    assert count > 3  # The forward pass, and a chunk each: nothing for the rows, whose gradient is not asked for.
    along = numbers(*x.shape, seed=2), numbers(*weights.shape, seed=3)
    expected, got = (jax.jvp(each, (x, weights), along) for each in (convolve, rewrite_for_cpu(convolve)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), expected, got)


@pytest.mark.parametrize("twice", [jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))], ids=["forward", "backward"])
def test_second_derivatives_of_a_convolution_in_chunks(small_chunks, twice):
    x, weights = numbers(9, 6, 40), numbers(3, 40, 2)

    def squares(convolve):
        return twice(lambda w: (convolve(x, w) ** 2).sum())(weights)

    convolve = convolution(1)
    np.testing.assert_allclose(squares(rewrite_for_cpu(convolve)), squares(convolve), rtol=1e-4, atol=1e-2)


LEFT_ALONE = {
    "many channels": (convolution(2), (2, 9, 7, 16), (3, 3, 16, 4)),
    "channels first": (convolution(2, dimension_numbers=("NCHW", "HWIO", "NCHW")), (2, 3, 9, 7), (3, 3, 3, 4)),
    "depthwise, channels first": (
        convolution(2, groups=3, dimension_numbers=("NCHW", "HWIO", "NCHW")),
        (2, 3, 9, 7),
        (3, 3, 1, 3),
    ),
    "grouped, not depthwise": (convolution(2, groups=3), (2, 9, 7, 6), (3, 3, 2, 6)),
    "transposed": (convolution(2, padding=[(1, 1), (1, 1)], lhs_dilation=(2, 2)), (2, 9, 7, 3), (3, 3, 3, 4)),
    "groups of rows": (convolution(2, batch_group_count=2), (2, 9, 7, 3), (3, 3, 3, 4)),
    "depthwise with a great window": (convolution(1, groups=3), (2, 200, 3), (65, 1, 3)),
    "no rows": (convolution(2), (0, 9, 7, 3), (3, 3, 3, 4)),
    "nothing fits": (convolution(2, padding="VALID"), (2, 1, 7, 3), (3, 3, 3, 4)),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_other_convolutions_are_left_alone(case):
    convolve, rows, weights = LEFT_ALONE[case]
    is_left_alone(convolve, numbers(*rows), numbers(*weights))


@pytest.mark.parametrize("made", [None, jnp.float32])
@pytest.mark.parametrize("kernel", ["depthwise", "few channels", "1x1"])
def test_bfloat16_is_left_alone_also_where_its_sums_are_float32(kernel, made):
    x, weights, groups = operands(2, kernel)
    convolve = convolution(2, groups=groups, preferred_element_type=made)
    is_left_alone(convolve, x.astype(jnp.bfloat16), weights.astype(jnp.bfloat16))


# --- max pooling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize(
    ("window", "lengths"),
    [((2,), (9,)), ((3,), (9,)), ((2, 2), (8, 6)), ((2, 3), (9, 7)), ((4, 4), (8, 11)), ((2, 1, 2), (4, 3, 5))],
)
def test_max_pooling_in_other_words_gives_the_bits_of_xla(window, lengths, has_ties):
    x = numbers(3, *lengths, 4)
    x = np.maximum(np.round(x), 0) if has_ties else x
    pool = pooling(window)
    assert not operations(rewrite_for_cpu(pool), x)
    expected, got = (with_gradients(each, (x,)) for each in (pool, rewrite_for_cpu(pool)))
    jax.tree.map(np.testing.assert_array_equal, expected, got)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    window=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    rows=st.integers(1, 3),
    levels=st.integers(1, 3),
)
def test_any_shape_of_max_pooling(lengths, window, rows, levels):
    x = np.random.default_rng(0).integers(0, levels, (rows, *lengths, 2)).astype("float32")
    pool = pooling(tuple(window[: len(lengths)]))
    expected, got = (with_gradients(each, (x,)) for each in (pool, rewrite_for_cpu(pool)))
    jax.tree.map(np.testing.assert_array_equal, expected, got)


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (pooling((2, 2), (1, 1)), (2, 9, 7, 3)),
        (pooling((3, 3), (2, 2)), (2, 9, 7, 3)),
        (pooling((2, 2), padding="SAME"), (2, 9, 7, 3)),
        (pooling((1, 1)), (2, 9, 7, 3)),
        (pooling((5, 5)), (2, 10, 10, 3)),
        (pooling((2, 2)), (2, 1, 7, 3)),
        (pooling((2, 2)), (0, 8, 8, 3)),
    ],
    ids=["overlap", "overlap with strides", "padding", "nothing to do", "a great window", "nothing fits", "no rows"],
)
def test_other_pooling_is_left_alone(pool, shape):
    is_left_alone(pool, numbers(*shape))


def test_pooling_of_other_numbers_is_left_alone():
    is_left_alone(pooling((2, 2)), numbers(2, 8, 8, 3).astype(jnp.bfloat16))
    lowest = np.int32(np.iinfo("int32").min)
    integers = np.arange(32, dtype="int32").reshape(2, 4, 4, 1)
    is_left_alone(lambda x: lax.reduce_window(x, lowest, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), integers)


def test_equal_infinities_are_pooled_as_by_xla():
    x = np.full((1, 4, 4, 1), -np.inf, "float32")
    x[0, 3] = np.inf
    expected, got = (with_gradients(each, (x,)) for each in (pooling((2, 2)), rewrite_for_cpu(pooling((2, 2)))))
    jax.tree.map(np.testing.assert_array_equal, expected, got)


# --- both: inside other functions, and derivatives ------------------------------------------------------------------------


def small_net(x, kernels):
    """Run each of the operations once."""
    depthwise, mixing, first = kernels
    x = convolution(2)(x, first)
    x = jnp.tanh(convolution(2, groups=6)(x, depthwise))
    return jnp.tanh(convolution(2)(pooling((2, 2))(x), mixing)).mean(axis=(1, 2))


KERNELS_OF_THE_NET = numbers(3, 3, 1, 6), numbers(1, 1, 6, 4), numbers(3, 3, 2, 6)


@pytest.mark.slow
def test_nan_stays_nan():
    x = numbers(2, 8, 6, 2)
    x[1, 3, 3, 0] = np.nan
    assert np.isnan(rewrite_for_cpu(pooling((2, 2)))(x)[1, 1, 1]).tolist() == [True, False]
    assert np.isnan(rewrite_for_cpu(convolution(2, groups=2))(x, numbers(3, 3, 1, 2))[1, 2:5, 2:5, 0]).all()
    out = rewrite_for_cpu(small_net)(x, KERNELS_OF_THE_NET)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[0]).all()


@pytest.mark.parametrize("inside", [jax.jit, lambda f: jax.jit(jax.jit(f)), lambda f: f])
def test_operations_within_jit_are_found(inside):
    x, net = numbers(2, 8, 6, 2), inside(small_net)
    assert not operations(rewrite_for_cpu(net), x, KERNELS_OF_THE_NET)
    expected, got = (each(x, KERNELS_OF_THE_NET) for each in (net, rewrite_for_cpu(net)))
    np.testing.assert_allclose(expected, got, rtol=1e-5, atol=1e-6)


def test_a_function_with_derivatives_of_its_own_keeps_them():
    @jax.custom_jvp
    def pool(x):
        return pooling((2, 2))(x)

    @pool.defjvp
    def _(primals, tangents):
        return pool(primals[0]), 3 * pooling((2, 2))(tangents[0])

    x = numbers(2, 8, 6, 2)
    is_left_alone(pool, x)
    _, got = jax.jvp(rewrite_for_cpu(pool), (x,), (x,))
    np.testing.assert_array_equal(got, 3 * pooling((2, 2))(x))


def test_a_loop_keeps_its_operations():
    def loop(x):
        return lax.fori_loop(0, 2, lambda _, x: convolution(2, groups=2)(x, numbers(3, 3, 1, 2)), x)

    x = numbers(2, 8, 6, 2)
    is_left_alone(loop, x)


def test_replicas_under_vmap():
    x = numbers(3, 2, 8, 6, 2)

    def of_all(net):
        return with_gradients(lambda kernels: jax.vmap(net, (0, None))(x, kernels), (KERNELS_OF_THE_NET,))

    expected, got = of_all(small_net), of_all(rewrite_for_cpu(small_net))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), expected, got)


def test_forward_derivatives():
    x, along = numbers(2, 8, 6, 2), numbers(2, 8, 6, 2, seed=2)

    def derivative(net):
        return jax.jvp(lambda x: net(x, KERNELS_OF_THE_NET), (x,), (along,))

    expected, got = derivative(small_net), derivative(rewrite_for_cpu(small_net))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), expected, got)


@pytest.mark.parametrize("hessian", [jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))], ids=["forward", "backward"])
def test_second_derivatives(hessian):
    x = numbers(1, 4, 4, 2)

    def found(net):
        return jax.jit(hessian(lambda x: (net(x, KERNELS_OF_THE_NET) ** 2).sum()))(x)

    np.testing.assert_allclose(found(small_net), found(rewrite_for_cpu(small_net)), rtol=1e-3, atol=1e-5)


def test_a_function_without_such_operations_is_called_as_it_is():
    def dense(x, weights, *, scale):
        return {"out": jnp.tanh(x @ weights["kernel"]) * scale, "sum": x.sum()}

    x, weights = numbers(4, 3), {"kernel": numbers(3, 2)}
    traces = [jax.make_jaxpr(lambda x, w, f=f: f(x, w, scale=2))(x, weights) for f in (dense, rewrite_for_cpu(dense))]
    assert str(traces[0]) == str(traces[1])


def test_trees_go_in_and_come_out():
    def pool(inputs, weights):
        return {"pooled": [pooling((2, 2))(inputs["x"]), None], "sum": (inputs["x"].sum() * weights,)}

    x = {"x": numbers(2, 8, 6, 2)}
    expected, got = pool(x, weights=2.0), rewrite_for_cpu(pool)(x, weights=2.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), expected, got)


# --- a model --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_of_slow_layers_learns_as_on_one_device():
    def build():
        keras.utils.set_random_seed(1)
        parts = [
            keras.Input((12, 12, 3)),
            keras.layers.Conv2D(8, 3, padding="same", activation="relu"),
            keras.layers.DepthwiseConv2D(3, strides=2, padding="same", depth_multiplier=2),
            keras.layers.Conv2D(4, 1, activation="tanh"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
        return keras.Sequential(parts)

    x, y = numbers(24, 12, 12, 3), numbers(24, 3, seed=1)
    plain = build()
    plain.compile("sgd", "mse")
    plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
        ours = build()
        ours.compile("sgd", "mse")
    ours.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for one, other in zip(plain.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
