"""A batch that the devices do not share evenly: the same collectives and memory as an even one, and the same numbers."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from keras import layers, ops

import lockstep
from lockstep._keras import trainer
from lockstep.execution.rowwise.proof import draws_for_each_row, trace_for_rows
from lockstep.execution.spmd import SpmdForward, switch_with_common_residuals
from lockstep.tools.plan.hlo import collectives

DEVICES, LENGTH, WIDTH, WORDS = 4, 32, 32, 500
SMALL = 4096  # bytes: numbers, seeds and statistics


def language_model(dropout=0.0):
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Dropout(dropout)(layers.Embedding(WORDS, WIDTH)(words))
    x = x + layers.MultiHeadAttention(2, WIDTH // 2, dropout=dropout)(x, x, use_causal_mask=True)
    x = x + layers.Dense(WIDTH, "gelu", kernel_regularizer="l2")(layers.LayerNormalization()(x))
    model = keras.Model(words, layers.Dense(WORDS)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model, lambda rows: (np.zeros((rows, LENGTH), "int32"), np.zeros((rows, LENGTH), "int32"))


def normalized_images():
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(8, 3),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(500),
        ]
    )
    model.compile("sgd", "mse")
    return model, lambda rows: (np.zeros((rows, 16, 16, 3), "float32"), np.zeros((rows, 500), "float32"))


def strategy(replicas, **options):
    return lockstep.MirroredStrategy([f"cpu:{number}" for number in range(DEVICES)], replicas=replicas, **options)


def compiled_step(strategy, make, rows):
    with strategy.scope():
        model, batch_of = make()
    batch, functions = batch_of(rows), strategy._functions_of(model)
    step = functions.executor.train_step(functions.build_step(functions.executor, "train"))
    return step.compile_for(trainer.training_state(model, batch), strategy._placement.abstract_batch(batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(language_model, id="rows", marks=pytest.mark.nightly),  # "dropout" has these rows, and draws.
        pytest.param(lambda: language_model(0.1), id="dropout"),
        pytest.param(normalized_images, id="batch normalization"),
    ],
)
def test_uneven_batch_needs_the_collectives_and_memory_of_an_even_one(make):
    even, uneven = (compiled_step(strategy(DEVICES), make, rows) for rows in (64, 59))
    large = [[found for found in collectives(program.as_text()) if found.bytes > SMALL] for program in (even, uneven)]
    assert len(large[1]) <= len(large[0])
    assert sum(found.bytes for found in large[1]) <= 1.02 * sum(found.bytes for found in large[0])
    assert len(collectives(uneven.as_text())) <= len(collectives(even.as_text())) + 2
    assert uneven.memory_analysis().temp_size_in_bytes <= 1.2 * even.memory_analysis().temp_size_in_bytes


class Transposed(layers.Layer):
    """Normalizes arrays whose rows are the second axis."""

    def __init__(self):
        super().__init__()
        self.inner = layers.BatchNormalization()

    def call(self, x, training=False):
        return ops.transpose(self.inner(ops.transpose(x, (1, 0, 2)), training=training), (1, 0, 2))


class Counted(layers.Layer):
    """Adds up how many rows the replicas have had."""

    def build(self, shape):
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")

    def call(self, x):
        self.rows.assign_add(ops.sum(0.0 * x[:, 0, 0] + 1.0))
        return x


class MaskedByOthers(layers.Layer):
    """Normalizes over the entries that are large beside those of all rows."""

    def __init__(self):
        super().__init__()
        self.inner = layers.BatchNormalization()

    def call(self, x, training=False):
        size = ops.mean(x, -1)
        return self.inner(x, mask=size > 0.3 * ops.max(size, axis=0, keepdims=True), training=training)


class WithOwnMoments(layers.BatchNormalization):
    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean, variance + 1.0


NORMALIZED = {
    "rows": (lambda: [layers.BatchNormalization(momentum=0.5)], True),
    "dropout": (lambda: [layers.BatchNormalization(), layers.Dropout(0.5)], True),
    "rows in another axis": (lambda: [layers.TimeDistributed(layers.BatchNormalization())], True),
    "masked": (lambda: [layers.Masking(), layers.BatchNormalization()], True),
    "renormalized": (lambda: [layers.BatchNormalization(renorm=True)], True),
    "half precision": (lambda: [layers.BatchNormalization(dtype="mixed_bfloat16")], True),
    "rows are not first": (lambda: [Transposed()], False),
    "with a sum": (lambda: [Counted(), layers.BatchNormalization()], False),
    "own moments": (lambda: [WithOwnMoments()], False),
    "masked by others": (lambda: [MaskedByOthers()], None),  # runs on the global batch
}


# A replica without rows, and several on a device, differ in the layout only.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "devices", "replicas"),
    [
        *((name, 7, 3, 3) for name in NORMALIZED),
        *((name, *layout) for name in ("rows", "dropout", "masked") for layout in ((2, 3, 3), (11, 2, 4))),
    ],
)
def test_padding_of_an_uneven_batch_is_no_part_of_a_replicas_statistics(monkeypatch, name, rows, devices, replicas):
    make, is_padded = NORMALIZED[name]
    calls, found = SpmdForward.padded_calls, []
    monkeypatch.setattr(SpmdForward, "padded_calls", lambda self: found.append(calls(self)) or found[-1])

    def trained(devices):
        keras.utils.set_random_seed(0)
        with lockstep.MirroredStrategy([f"cpu:{number}" for number in range(devices)], replicas=replicas).scope():
            model = keras.Sequential([keras.Input((3, 4)), *make(), layers.Dense(5, "tanh"), layers.Dense(2)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        x = np.random.default_rng(0).normal(1, 2, (rows, 3, 4)).astype("float32")
        x[0, 1:] = 0.0  # which Masking leaves out
        losses = model.fit(x, x[..., :2], batch_size=rows, epochs=3, shuffle=False, verbose=0).history["loss"]
        return [*map(np.asarray, model.variables), losses]

    tolerance = 1e-2 if name == "half precision" else 1e-5
    for padded, exact in zip(trained(devices), trained(1), strict=True):
        np.testing.assert_allclose(padded, exact, rtol=tolerance, atol=tolerance)
    assert {calls is not None for calls in found} == ({is_padded} - {None})


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 2])
def test_padding_stays_finite_where_the_rows_of_its_replica_are(rows):
    def trained(devices):
        keras.utils.set_random_seed(0)
        with lockstep.MirroredStrategy([f"cpu:{number}" for number in range(devices)], replicas=3).scope():
            hidden = [layers.Dense(32), layers.BatchNormalization(), layers.Activation("exponential")]
            model = keras.Sequential([keras.Input((16,)), *hidden, layers.Dense(4)])
            model.compile(keras.optimizers.SGD(0.01), "mse")
        x = np.random.default_rng(0).normal(0, 10, (rows, 16)).astype("float32")
        return model.fit(x, x[:, :4] / 10, batch_size=rows, epochs=2, shuffle=False, verbose=0).history["loss"]

    np.testing.assert_allclose(trained(3), trained(1), rtol=1e-4)


@pytest.mark.slow
def test_only_rows_at_the_edges_move_if_devices_have_several_replicas_of_an_uneven_batch():
    rows = 59
    uneven = compiled_step(strategy(2 * DEVICES), language_model, rows)
    found = collectives(uneven.as_text())
    assert not [one for one in found if one.name in ("all-gather", "all-to-all") and one.bytes > SMALL]
    # XLA shards 59 rows over 4 devices as 15 each, replicas of 8 rows as 16: a device gets up to 3 rows of another, twice.
    moved = sum(one.bytes for one in found if one.name == "collective-permute")
    assert moved <= 2 * (DEVICES - 1) * LENGTH * WORDS * 4


def custom_step(strategy, build, rows, returned):
    """Compile a step that runs a model on each replica, adds the gradients, and returns the loss or reduces the replicas' losses."""
    with strategy.scope():
        model = build()
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def on_replica(trainable, others, own, x, y):
        def loss_of(trainable):
            outputs, state = model.stateless_call(trainable, others, x, training=True)
            return lockstep.compute_average_loss(((outputs - y) ** 2).mean(-1), global_batch_size=rows), state

        (loss, state), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        context = lockstep.get_replica_context()
        gradients, total = context.all_reduce("SUM", (gradients, loss))
        trainable, own = optimizer.stateless_apply(own, gradients, trainable)
        return trainable, state, own, loss if returned == "reduced" else total

    @jax.jit
    def step(state, batch):
        *state, loss = strategy.run(on_replica, (*state, *batch))
        return state, strategy.reduce("SUM", loss, axis=None) if returned == "reduced" else loss

    parts = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    state = strategy._placement.put([[variable.value for variable in part] for part in parts])
    (batch,) = strategy.experimental_distribute_dataset(
        [(np.zeros((rows, 8), "float32"), np.zeros((rows, 3), "float32"))]
    )
    return step.lower(state, batch).compile()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "between", "returned"),
    [
        pytest.param(DEVICES, [], "total", id="plain", marks=pytest.mark.nightly),
        pytest.param(DEVICES, [layers.BatchNormalization], "reduced", id="normalized"),
        pytest.param(2 * DEVICES, [lambda: layers.Dropout(0.5)], "reduced", id="dropout"),
    ],
)
def test_custom_loop_needs_the_collectives_of_an_even_batch_for_an_uneven_one(replicas, between, returned):
    def build():
        hidden = [layers.Dense(16, "relu"), *(layer() for layer in between)]
        return keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(3)])

    even, uneven = (collectives(custom_step(strategy(replicas), build, rows, returned).as_text()) for rows in (64, 59))
    assert len(uneven) <= len(even)
    assert sum(found.bytes for found in uneven) <= sum(found.bytes for found in even)


def rows_of(count):
    def branch(weights, inputs, words, seed):
        hidden = jnp.tanh(inputs[:count] @ weights[0]) + weights[2][words[:count]] + jax.random.uniform(seed)
        rows = jnp.pad(hidden @ weights[1], ((0, 6 - count), (0, 0)))
        return {"rows": rows, "count": jnp.int32(count), "mean": (hidden**2).mean()}

    return branch


def no_rows(*operands):
    return jax.tree.map(jnp.zeros_like, jax.eval_shape(rows_of(6), *operands))


def uneven_operands():
    draw = np.random.default_rng(0).normal
    weights = [jnp.asarray(draw(size=shape), "float32") for shape in ((3, 40), (40, 2), (7, 40))]
    return weights, jnp.asarray(draw(size=(6, 3)), "float32"), jnp.arange(6) % 7, jax.random.key_data(jax.random.key(0))


def loss_of(switch):
    def loss(weights, inputs, choice, rest):
        result = switch(choice, [rows_of(6), rows_of(4), no_rows], (weights, inputs, *rest))
        return (result["rows"] ** 2).sum() + result["mean"] * result["count"]

    return loss


def plain_switch(choice, branches, operands):
    return lax.switch(choice, branches, *operands)


@functools.cache
def values_and_gradients(switch):
    return jax.jit(jax.value_and_grad(loss_of(switch), argnums=(0, 1)))


@pytest.mark.parametrize("choice", [0, 1, 2])
@pytest.mark.xdist_group("values and gradients of a switch")
def test_switch_with_common_residuals_has_the_values_and_gradients_of_a_switch(choice):
    weights, inputs, *rest = uneven_operands()
    results = [
        values_and_gradients(switch)(weights, inputs, jnp.int32(choice), rest)
        for switch in (plain_switch, switch_with_common_residuals)
    ]
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_switch_with_common_residuals_is_differentiated_twice_like_a_switch():
    weights, inputs, *rest = uneven_operands()

    def penalty(switch):
        def of(weights):
            gradient = jax.grad(loss_of(switch), argnums=1)(weights, inputs, jnp.int32(1), rest)
            return (gradient**2).sum()

        return jax.grad(of)(weights)

    for one, other in zip(penalty(plain_switch), penalty(switch_with_common_residuals), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_switch_with_common_residuals_keeps_those_of_one_branch():
    weights, inputs, *rest = uneven_operands()

    def kept(switch):
        traced = jax.make_jaxpr(jax.grad(loss_of(switch)))(weights, inputs, jnp.int32(0), rest)
        forward = next(equation for equation in traced.jaxpr.eqns if equation.primitive.name == "cond")
        return sum(np.prod(variable.aval.shape, dtype=int) for variable in forward.outvars)

    assert kept(switch_with_common_residuals) < kept(plain_switch)


def test_branches_of_different_operations_are_left_to_a_switch():
    def cubes(x):
        return x**3

    def waves(x):
        return jnp.sin(x) * jnp.cos(2 * x)

    gradient = jax.grad(lambda x: switch_with_common_residuals(jnp.int32(1), [cubes, waves], (x,)))
    np.testing.assert_allclose(gradient(0.3), jax.grad(waves)(0.3), rtol=1e-6)


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda key, rows: jax.random.normal(key, (rows, 3)), True),
        (lambda key, rows: jax.random.bernoulli(key, 0.3, (rows,)), True),
        (lambda key, rows: jax.vmap(jax.random.uniform)(jax.random.split(key, rows)), True),
        (lambda key, rows: jax.random.normal(key, (4, 3)), True),
        (lambda key, rows: jax.random.normal(key, (3, rows)), False),
        (lambda key, rows: jax.random.normal(key, (2 * rows, 3)), False),
        (lambda key, rows: jax.random.gamma(key, 2.0, (rows,)), False),
    ],
)
def test_random_numbers_of_a_row_do_not_depend_on_later_rows_if_rows_are_first(draw, expected):
    key = jax.random.key(3)
    traces = [trace_for_rows(lambda _, x: [draw(key, len(x[0]))], [], [np.zeros((2, 1))], rows) for rows in (7, 5)]
    assert draws_for_each_row(*traces) == expected
    if expected:
        fewer = np.asarray(draw(key, 5))
        np.testing.assert_array_equal(np.asarray(draw(key, 7))[: len(fewer)], fewer)
