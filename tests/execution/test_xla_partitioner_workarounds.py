"""Operations that XLA would divide with wrong gradients, or not at all, have the numbers of one device: decision 67."""

import contextlib
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from keras import layers, ops

import lockstep
from lockstep._errors import ModelError
from lockstep.execution.xla_partitioner_workarounds import constrain_partitioning
from tests.support.marks import every_pair

ROWS = 8


class Along(layers.Layer):
    """Applies a function to an array ``(rows, …)``, whose result has the same shape."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return x + ops.tanh(self.function(x)) / 2

    def compute_output_shape(self, input_shape):
        return input_shape


def convolved_rows(x):
    return lax.conv_general_dilated(x[None, None], x[None, None, :3, :3], (1, 1), "SAME")[0, 0]


def max_pooled(x):
    return ops.max_pool(x[None], 2, 1, padding="same")[0]


def clamped_row(x):
    return lax.dynamic_index_in_dim(x, jnp.int32(99), keepdims=True)


def rows_written_at_the_end(x):
    return ops.slice_update(x, (ops.shape(x)[0] - 1, 0), x[:2] * 3)


def sorted_rows(x):
    return ops.sort(x, axis=0)


def sorted_within_rows(x):
    return ops.sort(x, axis=1) + ops.mean(x, axis=0, keepdims=True)


def median(x):
    return ops.median(x, axis=0, keepdims=True)


def pooled_images(x):
    """A pooling of each row, and a sum over the rows."""
    images = ops.reshape(x, (-1, 6, 1))
    pooled = ops.reshape(ops.max_pool(images, 2, 1, padding="same"), (-1, 6))
    return pooled + ops.mean(x, axis=0, keepdims=True)


def in_another_order(x):
    return ops.take(x, ops.argsort(ops.sum(x, axis=1)), axis=0)


def some_rows(x):
    return ops.tanh(x * ops.mean(ops.slice(x, (1, 0), (3, 6)), axis=0, keepdims=True))


def pooled_in_a_loop(x):
    return lax.scan(lambda total, _: (total + max_pooled(jnp.tanh(total)), None), x, None, length=2)[0]


def padded_with_two_values(x):
    rows = ((1, 0), (0, 0))
    return (ops.pad(x, rows) - ops.pad(x, rows, constant_values=1.0))[:-1] + x


def accumulated_twice(x):
    return ops.cumsum(x, 0) + ops.cumprod(x, 0)


WRONG = [
    convolved_rows,
    max_pooled,
    clamped_row,
    rows_written_at_the_end,
    sorted_rows,
    sorted_within_rows,
    median,
    pooled_in_a_loop,
    padded_with_two_values,
    accumulated_twice,
]


class DirectModel(keras.Sequential):
    """Calls itself instead of ``stateless_call``."""

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y = data

        def loss_of(values):
            with keras.StatelessScope(zip(self.trainable_variables, values, strict=True)):
                return ops.mean(ops.square(self(x) - y))

        loss, gradients = jax.value_and_grad(loss_of)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": loss}, (trainable, non_trainable, optimizer, metrics)


def trained(place, function, strategy=None, rows=ROWS):
    """Weights, losses and predictions of a model that applies ``function`` in a layer, in its loss, or in a model that is called directly."""
    keras.utils.set_random_seed(0)
    kind = DirectModel if place == "direct call" else keras.Sequential
    along = [] if place == "loss" else [Along(function)]
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = kind([keras.Input((6,)), layers.Dense(6), *along, layers.Dense(6)])
        model.compile(keras.optimizers.SGD(0.02), squared_difference(function) if place == "loss" else "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 6)), rng.normal(size=(rows, 6))
    history = model.fit(x, y, batch_size=ROWS, shuffle=False, epochs=3, verbose=0).history
    return [*model.get_weights(), history["loss"], model.predict(x, batch_size=ROWS, verbose=0)]


def squared_difference(function):
    def loss(y, outputs):
        return ops.mean(ops.square(y - outputs - ops.tanh(function(outputs))), axis=-1)

    return loss


def assert_equal(found, expected):
    for mine, its in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)


STRATEGIES = {
    "mirrored": lambda: lockstep.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mesh": lambda: lockstep.ModelParallelStrategy({"data": 2, "model": 2}, devices=[f"cpu:{n}" for n in range(4)]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "strategy", "function"), every_pair([ROWS, ROWS + 5], STRATEGIES, WRONG))
def test_layers_that_xla_divides_wrongly_have_the_numbers_of_one_device(function, rows, strategy):
    assert_equal(trained("layer", function, STRATEGIES[strategy](), rows), trained("layer", function, rows=rows))


@pytest.mark.slow
@pytest.mark.parametrize("function", WRONG)
@pytest.mark.parametrize("place", ["loss", "direct call"])
def test_what_is_outside_of_stateless_call_has_the_numbers_of_one_device(place, function, monkeypatch):
    monkeypatch.setattr("lockstep.execution.spmd.REPLICATE_BELOW", 0)  # else outputs of 1 MiB are needed
    strategy = STRATEGIES["mirrored"]()
    assert_equal(trained(place, function, strategy, ROWS + 5), trained(place, function, rows=ROWS + 5))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS, ROWS + 5], ids=["even", "uneven"])
@pytest.mark.parametrize("function", [pooled_images, in_another_order, some_rows])
def test_what_xla_divides_rightly_has_the_numbers_of_one_device(function, rows):
    strategy = STRATEGIES["mirrored"]()
    assert_equal(trained("layer", function, strategy, rows), trained("layer", function, rows=rows))


def in_branch(x):
    return lax.cond(x[0, 0] < 99, max_pooled, jnp.tanh, x)


def in_while(x):
    return lax.while_loop(lambda pair: pair[0] < 2, lambda pair: (pair[0] + 1, max_pooled(pair[1])), (0, x))[1]


def with_own_derivative(x):
    run = jax.custom_jvp(sorted_rows)
    run.defjvp(lambda primals, tangents: (sorted_rows(*primals), sorted_rows(*tangents)))
    return run(x)


def solved(x):
    return jnp.linalg.solve(max_pooled(x.T @ x) + 9 * jnp.eye(x.shape[1]), x.T).T


NESTED = [in_branch, pooled_in_a_loop, jax.jit(max_pooled), jax.checkpoint(max_pooled)]


def step_on_two_devices(function, x):
    """The compiled program of the step ``function`` of ``x``, which is sharded over the first axis."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("rows",))
    step = constrain_partitioning(lambda state, batch: (function(jnp.tanh(batch * state)), state), mesh)
    described = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec("rows")))
    whole = jax.ShapeDtypeStruct((), x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    return jax.jit(step).lower(whole, described).compile()


def gradient_of(function):
    return jax.grad(lambda x: jnp.sum(jnp.sin(function(x))))


@pytest.mark.parametrize(
    "function",
    [*map(gradient_of, NESTED), in_while, with_own_derivative, gradient_of(solved)],
    ids=["cond", "scan", "jit", "checkpoint", "while", "custom_jvp", "solve"],
)
def test_operations_in_loops_branches_and_calls_are_constrained(function):
    x = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
    program = step_on_two_devices(function, x)
    found, _ = program(*jax.device_put((np.float32(1), x), program.input_shardings[0]))
    np.testing.assert_allclose(found, function(jnp.tanh(x)), rtol=1e-5, atol=1e-6)


def accumulated(x, interpret=True):
    """Return cumulative sums of each row, by a kernel."""

    def kernel(values, result):
        result[...] = jnp.cumsum(values[...])

    shape = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    return jax.vmap(pallas.pallas_call(kernel, out_shape=shape, interpret=interpret, name="accumulate"))(x)


def test_a_kernel_keeps_its_operations():
    x = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
    program = step_on_two_devices(accumulated, x)
    found, _ = program(*jax.device_put((np.float32(1), x), program.input_shardings[0]))
    np.testing.assert_allclose(found, np.cumsum(np.tanh(x), 1), rtol=1e-5)


@pytest.mark.parametrize("is_divided", [False, True])
def test_a_kernel_of_tpus_that_is_not_divided_is_an_error(is_divided):
    """JAX would say that Mosaic kernels cannot be automatically partitioned, and not which one of whom."""
    own = Mesh(np.asarray(jax.devices()[:2]), ("rows",))
    tpus = SimpleNamespace(size=2, shape={"rows": 2}, devices=np.array([SimpleNamespace(platform="tpu")] * 2))
    spec = PartitionSpec("rows")

    def function(x):
        accumulate = partial(accumulated, interpret=False)
        divide = partial(jax.shard_map, mesh=own, in_specs=spec, out_specs=spec, check_vma=False)
        return (divide(accumulate) if is_divided else accumulate)(x)

    step = constrain_partitioning(lambda state, batch: (function(batch), state), tpus)
    expected = (
        contextlib.nullcontext() if is_divided else pytest.raises(ModelError, match=r"'accumulate'.*disable_flash")
    )
    with expected:
        jax.eval_shape(step, jnp.ones(()), jnp.ones((ROWS, 6)))


def test_pooling_of_images_stays_divided():
    def pooled(x):
        return ops.max_pool(x, 3, 2, padding="same")

    images = np.zeros((ROWS, 12, 12, 3), "float32")
    assert "all-gather" not in step_on_two_devices(gradient_of(pooled), images).as_text()
    assert "all-gather" in step_on_two_devices(gradient_of(max_pooled), images[:, 0, :, 0]).as_text()


def written_at(x, position):
    return lax.dynamic_update_slice(x, x[:, :2] * 2, (0, position))


def first_rows_added(x, position):
    return jnp.zeros_like(x).at[jnp.array([0, 1, 0])].add(x[:3]) * position


def filtered_channels(x, position):
    """A convolution of each channel of rows of three places and two channels, with a kernel from ``x``."""
    kernel, layout = x[:3, None, :2] * position, ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(
        x.reshape(-1, 3, 2), kernel, (1,), "SAME", None, None, layout, feature_group_count=2
    )


def test_positions_on_a_mesh_of_two_axes_are_those_of_one_device():
    """From JAX 0.12 on, ``nonzero`` is one operation in a trace."""
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("rows", "features"))
    x = np.array([1, 1, -1, -1, -1, -1, 1], "float32")

    def step(state, batch):
        rows = lax.with_sharding_constraint(batch, NamedSharding(mesh, PartitionSpec("rows")))
        return jnp.nonzero(rows > 0, size=5)[0], state

    found, _ = jax.jit(constrain_partitioning(step, mesh))(np.float32(1), x)
    np.testing.assert_array_equal(found, [0, 1, 6, 0, 0])


@pytest.mark.parametrize(
    ("function", "position", "axes"),
    [
        (written_at, 5, (None, "features")),
        (written_at, 1, (None, "features")),
        (first_rows_added, 2, ("rows",)),
        (filtered_channels, 2, ("rows",)),
        (filtered_channels, 2, (None, "features")),
    ],
    ids=["clamped slice", "slice", "uneven scatter", "grouped convolution", "grouped convolution of divided channels"],
)
def test_a_mesh_of_two_axes_has_the_gradients_of_one_device(function, position, axes):
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("rows", "features"))
    x = np.random.default_rng(0).normal(size=(6, 6)).astype("float32")

    def gradient(position, x, place=lambda h: h):
        return jax.grad(lambda x: jnp.sum(jnp.square(function(place(jnp.tanh(x)), position))))(x)

    def place(h):
        return lax.with_sharding_constraint(h, NamedSharding(mesh, PartitionSpec(*axes)))

    step = constrain_partitioning(lambda state, batch: (gradient(state, batch, place), state), mesh)
    found, _ = jax.jit(step)(*jax.device_put((np.int32(position), x), NamedSharding(mesh, PartitionSpec())))
    np.testing.assert_allclose(found, gradient(position, x), rtol=1e-5, atol=1e-6)
