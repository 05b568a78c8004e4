"""The choice of axes, by nets; and that XLA's partitioner inserts the collectives that the choice names, and no others."""

import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from keras import layers, ops

import lockstep
from lockstep.execution.model_parallel.auto_layout import MAX_MOVED, choose_axes
from lockstep.execution.model_parallel.axis_rules import _factors
from tests.execution.model_parallel.nets import (
    attention_block,
    choices,
    collectives_in,
    convolutions,
    language_model,
    mixture_of_experts,
    mlp,
    run_on_mesh,
)


def axes(found):
    """The axes of those variables that are sharded, by the end of their paths."""
    return {"/".join(path.split("/")[-2:]): one.axis for path, one in found.items() if one.axis is not None}


def axes_of(function, *shapes, batch=(), ways=4):
    """Choose the axes of the arguments of a function, of which the last ones are of the batch."""
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (*shapes, *batch)]
    variables = [(f"v{number}", struct) for number, struct in enumerate(structs[: len(shapes)])]
    found = choose_axes(jax.make_jaxpr(function)(*structs), variables, [0] * len(batch), ways)
    return [one.axis for one in found]


def test_the_reason_names_the_variable_that_is_gathered():
    """The columns of ``a`` and the rows of ``b`` are one logical axis, and sorting the columns gathers ``a``."""
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((63, 128), (128, 33), (8, 63))]
    program = jax.make_jaxpr(lambda a, b, x: (x @ a @ b, jnp.sort(a, axis=1)))(*structs)
    first, second = choose_axes(program, [("a", structs[0]), ("b", structs[1])], [0], 2)
    assert first.reason.startswith("axis 1 (128) is used in a way that gathers the variable")
    assert second.reason.startswith("axis 0 (128) is shared with 'a', which is gathered along it")


# --- products -------------------------------------------------------------------------------------------------------------------


def test_hidden_units_of_two_layers_are_columns_then_rows():
    found = choices(*mlp(256, 64))
    assert axes(found) == {"dense_0/kernel": 1, "dense_0/bias": 0, "dense_1/kernel": 0}
    one = found["net/dense_0/kernel"]
    assert one.collectives == ("all-reduce of 2.0 KiB in 'dense_1'",)
    assert one.reason == (
        "with axis 0 of 'net/dense_1/kernel' (columns, then rows); all-reduce of 2.0 KiB in 'dense_1'"
    )
    assert found["net/dense_1/bias"].reason.startswith("fewer than 4,096 numbers")


def test_a_last_layer_with_a_length_that_is_not_divisible_stays_whole_or_is_sharded_by_rows():
    assert axes(choices(*mlp(128, 128, 10))) == {"dense_0/kernel": 1, "dense_0/bias": 0, "dense_1/kernel": 0}
    assert axes(choices(*mlp(128, 128, 99))) == {"dense_0/kernel": 0, "dense_1/kernel": 1, "dense_1/bias": 0} | {
        "dense_2/kernel": 0
    }


def test_a_narrow_hidden_layer_is_summed_and_the_wide_ones_are_sharded():
    assert axes(choices(*mlp(64, 256, inputs=256))) == {"dense_0/kernel": 0, "dense_1/kernel": 1, "dense_1/bias": 0}


def test_no_axis_is_divisible():
    found = choices(*mlp(63, inputs=77))
    assert found["net/dense_0/kernel"].reason == "no axis that 4 divides: (77, 63)"
    assert axes(found) == {}


def test_one_device_shards_nothing():
    assert axes(choices(*mlp(256, 64), ways=1)) == {}


def test_small_variables_alone_are_not_sharded():
    assert axes(choices(*mlp(16, 16, inputs=16))) == {}


def test_a_variable_stays_whole_if_its_collectives_move_too_much():
    def product(kernel, x):
        return x @ kernel - x @ kernel.T

    few, many = (axes_of(product, (64, 64), batch=[(rows, 64)]) for rows in (8, 4096))
    assert few != [None]
    assert many == [None]
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (4096, 64))]
    (found,) = choose_axes(jax.make_jaxpr(product)(*structs), [("kernel", structs[0])], [0], 4)
    assert re.search(
        rf"axis 0 \(64\) would move \d+ times the bytes of its variables, more than {MAX_MOVED}", found.reason
    )


def test_a_reshape_of_no_entries_links_no_axes():
    assert list(_factors((4, 0), (0,))) == []


def test_an_axis_of_the_rows_is_not_sharded():
    assert axes_of(lambda state, x: state + x, (64, 99), batch=[(64, 99)]) == [None]


def test_a_residual_product_does_not_shard_its_kernel_twice():
    found = axes_of(lambda kernel, x: x + jnp.tanh(x @ kernel), (64, 64), batch=[(8, 64)])
    assert found in ([0], [1])


def test_a_subclass_with_einsum():
    class Gated(keras.Model):
        def build(self, shape):
            self.gate = self.add_weight(shape=(shape[-1], 2, 128), name="gate")
            self.out = self.add_weight(shape=(128, shape[-1]), name="out")

        def call(self, x, training=None):
            gate, inner = ops.unstack(ops.einsum("btd,dgf->gbtf", x, self.gate), axis=0)
            return x + ops.einsum("btf,fd->btd", ops.silu(gate) * inner, self.out)

    x = np.ones((8, 4, 64), "float32")
    model = Gated(name="net")
    model(x)
    assert axes(choices(model, x)) == {"net/gate": 2, "net/out": 0}


# --- transformers -----------------------------------------------------------------------------------------------------------------

BLOCK = {
    **{f"{name}/kernel": 1 for name in ("query", "key", "value", "block_up")},
    **{f"{name}/bias": 0 for name in ("query", "key", "value", "block_up")},
    **{f"{name}/kernel": 0 for name in ("attention_output", "block_down")},
}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_heads_and_hidden_units_of_a_transformer_block(dropout):
    assert axes(choices(*attention_block(dropout=dropout))) == BLOCK


def test_heads_that_are_not_divisible():
    found = axes(choices(*attention_block(heads=3, width=96, hidden=384)))
    assert [found[f"{name}/kernel"] for name in ("query", "key", "value", "attention_output")] == [2, 2, 2, 1]


@pytest.mark.parametrize(("groups", "sharded"), [(4, True), (2, False)])
def test_grouped_query_attention(groups, sharded):
    attention = layers.GroupQueryAttention(16, 8, groups, name="gqa")
    found = axes(choices(*attention_block(heads=8, width=128, attention=attention)))
    assert (found["query/kernel"], found["attention_output/kernel"]) == (1, 0)
    assert [found.get(f"{name}/kernel") for name in ("key", "value")] == ([1, 1] if sharded else [None, None])


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary(tied):
    found = axes(choices(*language_model(512, tied)))
    assert found["tokens/embeddings"] == 0
    assert tied or found["tokens/reverse_embeddings"] == 1
    assert found["query/kernel"] == 1
    assert found["block_1_down/kernel"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_an_odd_vocabulary_stays_whole_and_the_blocks_are_sharded(tied):
    found = choices(*language_model(509, tied))
    reason = found["tokens/embeddings"].reason
    assert "4 does not divide 509" in reason
    assert "axis 1 (64) would shard an array a second time" in reason
    assert axes(found).keys() == axes(choices(*language_model(512, tied))).keys() - {
        "tokens/embeddings",
        "tokens/reverse_embeddings",
    }


def test_experts():
    assert axes(choices(*mixture_of_experts())) == {"experts/router": 1, "experts/up": 0, "experts/down": 0}
    assert axes(choices(*mixture_of_experts(experts=3))) == {"experts/up": 2, "experts/down": 1}


def test_fused_attention_shards_heads():
    fused = Primitive("dot_product_attention_fwd_wrapper")
    fused.multiple_results = True
    fused.def_abstract_eval(lambda query, *_, layout: [query])

    def attention(query, key, value, out, x):
        inputs = [jnp.einsum("btd,dnh->btnh", x, kernel) for kernel in (query, key, value)]
        return jnp.einsum("btnh,nhd->btd", fused.bind(*inputs, layout=0)[0], out)

    assert axes_of(attention, *[(64, 4, 16)] * 3, (4, 16, 64), batch=[(8, 16, 64)]) == [1, 1, 1, 0]


# --- convolutions and loops -------------------------------------------------------------------------------------------------------


def test_channels_of_a_residual_network():
    found = choices(*convolutions())
    assert {path: axis for path, axis in axes(found).items() if "kernel" in path} == {
        f"block_{n}_conv_{i}/kernel": 4 - i for n in (0, 1) for i in (1, 2)
    }
    assert axes(found)["block_0_norm_1/moving_mean"] == 0
    assert found["block_0_norm_2/gamma"].axis is None


def bottleneck(channels=128, inner=64):
    x = y = keras.Input((4, 4, channels))
    for n in (0, 1):
        z = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(inner, 1, name=f"a{n}")(y)))
        z = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(inner, 3, padding="same", name=f"b{n}")(z)))
        y = layers.Add()([y, layers.Conv2D(channels, 1, name=f"c{n}")(z)])
    return keras.Model(x, y, name="net"), np.random.default_rng(0).normal(size=(8, 4, 4, channels)).astype("float32")


def test_the_middle_of_three_convolutions_is_sharded_alone():
    found = choices(*bottleneck())
    assert [axes(found)[f"{name}0/kernel"] for name in "abc"] == [2, 2, 3]
    assert found["b0/kernel"].reason.startswith("alone, by rows; all-reduce of 32.0 KiB in 'b0'")


def separable():
    x = keras.Input((8, 8, 64))
    y = layers.SeparableConv2D(128, 3, padding="same", name="separable")(x)
    y = layers.DepthwiseConv2D(3, padding="same", depth_multiplier=4, name="depth")(y)
    model = keras.Model(x, layers.Conv2D(64, 1, name="point")(y), name="net")
    return model, np.random.default_rng(0).normal(size=(8, 8, 8, 64)).astype("float32")


def test_channels_pass_through_depthwise_convolutions():
    found = axes(choices(*separable()))
    assert {name: found[name] for name in ("separable/pointwise_kernel", "depth/kernel", "point/kernel")} == {
        "separable/pointwise_kernel": 3,
        "depth/kernel": 2,
        "point/kernel": 2,
    }


def recurrent(layer):
    x = keras.Input((12, 32))
    model = keras.Model(x, layers.Dense(10, name="head")(layer(64, name="rnn")(x)), name="net")
    return model, np.random.default_rng(0).normal(size=(8, 12, 32)).astype("float32")


@pytest.mark.slow
def test_collectives_in_a_loop_count_as_often_as_it_runs():
    found = choices(*recurrent(layers.LSTM))
    assert axes(found) == {"lstm_cell/kernel": 1, "lstm_cell/recurrent_kernel": 1, "lstm_cell/bias": 0}
    assert found["rnn/lstm_cell/kernel"].collectives == ("all-gather of 8.0 KiB in 'rnn', 12 times",)


def test_layers_that_a_scan_runs_are_sharded_along_other_axes_than_that_of_the_scan():
    def function(up, down, x):
        return lax.scan(lambda h, layer: (h + jnp.tanh(h @ layer[0]) @ layer[1], h[0]), x, (up, down))

    assert axes_of(function, (4, 64, 256), (4, 256, 64), batch=[(8, 64)]) == [2, 1]


def test_what_a_scan_returns_for_each_repetition_is_not_linked_with_what_it_reads():
    def function(kernel, x):
        return lax.scan(lambda h, row: (h, jnp.outer(row, h)), x[0], kernel)[1]

    assert axes_of(function, (64, 64), batch=[(8, 99)]) == [1]


def test_a_variable_that_would_be_gathered_stays_whole():
    model = keras.Sequential([keras.Input((16, 16, 3)), layers.Conv2D(33, 8, 8, name="patches")], name="net")
    found = choices(model, np.ones((8, 16, 16, 3), "float32"))["net/patches/kernel"]
    assert found.axis is None
    assert "axis 0 (8) is used in a way that gathers the variable" in found.reason


@pytest.mark.parametrize(
    "between",
    [
        lambda h: lax.while_loop(lambda c: jnp.sum(c[1]) < 0, lambda c: (jnp.tanh(c[0]), c[1] + 1), (h, jnp.zeros(2)))[
            0
        ],
        lambda h: lax.cond(jnp.sum(h) > 0, jnp.sin, jnp.cos, h),
        lambda h: jax.checkpoint(jnp.sin)(h),
        lambda h: lax.scan(lambda carry, _: (jnp.sin(carry), None), h, None, length=3)[0],
        lambda h: jnp.stack([h, h]).sum(0),
        lambda h: (
            lax.reduce_precision(h.reshape(8, 16, 16).transpose(1, 0, 2), 8, 7).transpose(1, 0, 2).reshape(8, 256)
        ),
        lambda h: jnp.pad(h, ((1, 1), (0, 0)))[1:-1],
        lambda h: jnp.zeros((9, 256)).at[1:].set(h)[1:],
        lambda h: h.at[jnp.array([0, 1])].add(1.0),
        lambda h: jnp.cumsum(h, axis=0) + jnp.flip(h, 0) + jnp.sort(h, 0),
        lambda h: jnp.split(jnp.concatenate([h, h], 0), 2)[0],
        lambda h: lax.dynamic_update_slice(h, jnp.ones((1, 256)), (0, 0)),
        lambda h: h * jax.random.bernoulli(jax.random.key(0), 0.5, h.shape),
    ],
)
def test_what_may_stand_between_two_products(between):
    def function(up, down, x):
        return between(x @ up) @ down

    assert axes_of(function, (64, 256), (256, 64), batch=[(8, 64)]) == [1, 0]


@pytest.mark.parametrize(
    "between",
    [
        lambda h: jnp.cumsum(h, axis=1),
        lambda h: jnp.flip(h, 1),
        lambda h: jnp.concatenate([h[:, :128], h[:, 128:]], 1),
        lambda h: jnp.sort(h, axis=1),
        lambda h: jnp.fft.irfft(jnp.fft.rfft(h), n=256),
    ],
)
def test_what_needs_all_entries_between_two_products_is_an_all_gather(between):
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((62, 256), (8, 62))]
    program = jax.make_jaxpr(lambda up, x: between(x @ up))(*structs)
    (found,) = choose_axes(program, [("up", structs[0])], [0], 4)
    assert found.axis == 1
    (gathered,) = found.collectives
    assert gathered.startswith("all-gather of 8.0 KiB in test_auto_layout.py:")


# --- XLA ----------------------------------------------------------------------------------------------------------------------------

COMPILED = {
    "mlp": lambda: mlp(256, 64),
    "odd_mlp": lambda: mlp(128, 128, 99),
    "block": attention_block,
    "block_with_three_heads": lambda: attention_block(heads=3, width=96, hidden=384),
    "tied": lambda: language_model(512),
    "odd_vocabulary": lambda: language_model(509, tied=False),
    "convolutions": convolutions,
    "separable": separable,
}


# What is linked in each is tested above; XLA compiles the more difficult one of each kind every day.
EVERY_DAY = ("odd_mlp", "block_with_three_heads", "tied", "separable")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.nightly) for name in COMPILED]
)
def test_xla_inserts_the_collectives_of_the_choice(name):
    model, inputs = COMPILED[name]()
    found = choices(model, inputs)
    got, expected, text = run_on_mesh(model, found, inputs)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    needed = {line for one in found.values() for line in one.collectives}
    assert collectives_in(text) == {"all-reduce": len(needed)}
    assert all(line.startswith("all-reduce of") for line in needed)


def test_a_transformer_block_has_one_all_reduce_for_each_half():
    """Megatron's count in a forward pass."""
    found = choices(*attention_block())
    assert {line for one in found.values() for line in one.collectives} == {
        "all-reduce of 32.0 KiB in 'block_attention/attention_output'",
        "all-reduce of 32.0 KiB in 'block_down'",
    }


@pytest.mark.slow
@pytest.mark.parametrize("made", [mixture_of_experts, lambda: recurrent(layers.LSTM), bottleneck])
def test_results_are_those_of_one_device(made):
    model, inputs = made()
    got, expected, _ = run_on_mesh(model, choices(model, inputs), inputs)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_a_call_without_an_argument_training_is_followed():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.up, self.down = layers.Dense(256), layers.Dense(64)

        def call(self, x):
            return self.down(self.up(x))

    strategy = lockstep.ModelParallelStrategy({"data": 1, "model": 2}, devices=["cpu:0", "cpu:1"])
    with strategy.scope():
        model = Net()
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 64)), np.ones((8, 64)), verbose=0)
    assert not model.up.kernel.value.sharding.is_fully_replicated
