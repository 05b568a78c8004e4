"""Rows that stay with their replicas: which operations run on them there, and that they compute what they compute on joined rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from lockstep.devices.placement import placement_on
from lockstep.execution.deterministic_rows import ReplicaRows, RowsOfReplicas, RowwiseEquations, join_rows
from lockstep.execution.jaxpr_utils import inline_all_calls
from lockstep.execution.spmd import PerDevice

ROWS, WIDTH = 7, 5
WHOLE = {"labels": np.arange(ROWS) % WIDTH, "matrix": np.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)}
LABELS, MATRIX = (jnp.asarray(value, dtype) for value, dtype in zip(WHOLE.values(), ("int32", "float32"), strict=True))


def crossentropy(x):
    return -jnp.sum(jax.nn.one_hot(LABELS, WIDTH) * jax.nn.log_softmax(x), axis=-1)


ALONG_ROWS = {
    "crossentropy": crossentropy,
    "gradient of a mean": jax.grad(lambda x: jnp.mean(crossentropy(x))),
    "hits": lambda x: jnp.argmax(x, axis=-1) == LABELS,
    "best two": lambda x: lax.top_k(x, 2)[0],
    "sorted": lambda x: jnp.sort(x, axis=1),
    "cumulative": lambda x: jnp.cumsum(x, axis=1),
    "taken": lambda x: jnp.take_along_axis(x, LABELS[:, None], axis=1),
    "gradient of what is taken": jax.grad(lambda x: jnp.sum(jnp.take_along_axis(x, LABELS[:, None], axis=1) ** 2)),
    "reshaped": lambda x: x.reshape(ROWS, 1, WIDTH),
    "sliced": lambda x: x[:, 1:3],
    "beside": lambda x: jnp.concatenate([x, MATRIX], axis=1),
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 2))),
    "reversed": lambda x: x[:, ::-1],
    "by its place in the batch": lambda x: x * jnp.arange(float(ROWS))[:, None],
    "with what every device has": lambda x: jnp.where(MATRIX > 0, x, MATRIX),
    "selected": lambda x: jnp.where(LABELS[:, None] > 2, x, 0.0),
}
MIXING = {
    "sum": lambda x: jnp.sum(x, axis=0),
    "sorted rows": lambda x: jnp.sort(x, axis=0),
    "cumulative over rows": lambda x: jnp.cumsum(x, axis=0),
    "rolled": lambda x: jnp.roll(x, 1, axis=0),
    "reversed rows": lambda x: x[::-1],
    "similarities": lambda x: x @ x.T,
    "shifted": lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1],
    "other rows": lambda x: x[LABELS],
    "written to rows": lambda x: x.at[LABELS].add(1.0),
    "transposed and back": lambda x: x.reshape(WIDTH, ROWS).T,
    "loop": lambda x: lax.fori_loop(0, 2, lambda _, value: value * 2, x),
}


def equations_of(function, layout, placement):
    closed = inline_all_calls(jax.make_jaxpr(function)(jnp.zeros((ROWS, WIDTH))))
    jaxpr = closed.jaxpr
    return jaxpr, closed.consts, RowwiseEquations(jaxpr, layout, placement, jaxpr.invars, [])


def with_replicas(value, layout, placement):
    """The rows of an array where replicas have computed them."""
    rounds = []
    for one in RowsOfReplicas(layout, placement).rounds:
        _, _, first = one.offsets(layout)
        own = [
            None if replica is None else jax.device_put(value[start : start + one.rows], device)
            for replica, start, device in zip(one.replicas, first, placement.devices, strict=True)
        ]
        rounds.append(PerDevice(own))
    return ReplicaRows(rounds, layout)


@pytest.mark.parametrize(("replicas", "devices"), [(2, 2), pytest.param(3, 2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ALONG_ROWS)
def test_what_works_along_the_rows_is_computed_by_the_replicas(name, replicas, devices):
    placement = placement_on(jax.local_devices()[:devices], replicas)
    layout = placement.layout(ROWS)
    jaxpr, constants, found = equations_of(ALONG_ROWS[name], layout, placement)
    (result,) = jaxpr.outvars
    assert found.computes(result)
    program = found.program([result])
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    read = jaxpr_as_fun(ClosedJaxpr(jaxpr.replace(outvars=program.inputs), constants))(x)
    values = dict(zip(program.inputs, placement.put(read), strict=True)) | {
        jaxpr.invars[0]: with_replicas(x, layout, placement)
    }
    (rows,) = program.run([values[var] for var in program.inputs])
    (joined,), expected = join_rows([rows], placement), ALONG_ROWS[name](x)
    assert joined.shape == expected.shape
    np.testing.assert_allclose(joined, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_is_not(name):
    placement = placement_on(jax.local_devices()[:2], 2)
    jaxpr, _, found = equations_of(MIXING[name], placement.layout(ROWS), placement)
    assert not found.computes(jaxpr.outvars[0])


def test_an_axis_that_is_as_long_as_the_batch_by_chance_is_not_taken_for_rows():
    """Such as that of a weight, whose update would otherwise be computed in parts."""
    placement = placement_on(jax.local_devices()[:2], 2)
    weight = jnp.ones((ROWS, 3))
    jaxpr, _, found = equations_of(lambda x: (weight - 0.1 * weight**2, jnp.sum(x)), placement.layout(ROWS), placement)
    assert not any(found.computes(var) for var in jaxpr.outvars)


def test_a_value_that_is_read_whole_is_computed_whole():
    placement = placement_on(jax.local_devices()[:2], 2)
    closed = jax.make_jaxpr(lambda x: jnp.zeros((ROWS, WIDTH)))(jnp.zeros((ROWS, WIDTH)))
    found = RowwiseEquations(closed.jaxpr, placement.layout(ROWS), placement, closed.jaxpr.invars, closed.jaxpr.outvars)
    assert not found.computes(closed.jaxpr.outvars[0])
