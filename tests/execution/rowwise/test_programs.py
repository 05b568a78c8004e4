"""The proof rejects programs that mix rows, accepts row-wise programs, and accepts no random program that mixes rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from keras import ops

from lockstep.execution.rowwise.row_axes import Mixed, RowAxis, RowMean, move_rows_back, move_rows_first

from .following import dependences_of_function, is_by_rows
from .generator import mixes, program

X = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
COLUMN = jnp.arange(10.0)
TABLE = np.ones((6, 4), "float32")


def differences(x):
    return x[:, None] - x[None]


def gradient_normed(x, norm):
    """Return ``tanh`` with a custom derivative that is divided by ``norm``."""

    @ops.custom_gradient
    def function(value):
        def gradient(upstream):
            return upstream * (1 - jnp.tanh(value) ** 2) / norm(upstream)

        return jnp.tanh(value), gradient

    return function(x)


@jax.custom_jvp
def doubled(x):
    """Return the double, with a derivative that is divided by the norm of all rows."""
    return 2 * x


@doubled.defjvp
def _(primals, tangents):
    return 2 * primals[0], tangents[0] / jnp.linalg.norm(primals[0])


def folded_otherwise(x):
    """Return the rows, flattened column by column, plus positions flattened row by row."""
    counted = jnp.broadcast_to(jnp.arange(4.0), x.shape)
    return (counted.reshape(-1) + x.T.reshape(-1)).reshape(4, -1).T


def kept_in_a_reference(x):
    reference = jax.new_ref(jnp.zeros(4))
    reference[...] = x.mean(0)
    return x - reference[...]


def noise_of_rows(x):
    """Return noise from a key for each row that is made of the row's own number."""
    keys = jax.vmap(jax.random.key)(x[:, 0].astype("uint32"))
    return jax.vmap(jax.random.normal)(keys)[:, None]


@jax.custom_vjp
def centred_on_the_way(x):
    """Return the rows; in training these are centred."""
    return x


centred_on_the_way.defvjp(lambda x: (x - x.mean(0), None), lambda _, gradient: (gradient,))

other_tanh = jax.custom_jvp(jnp.tanh)
other_tanh.defjvp(lambda primals, tangents: (jnp.tanh(*primals), tangents[0] / jnp.linalg.norm(primals[0])))

tanh_of_one_rule = jax.custom_jvp(jnp.tanh)
tanh_of_one_rule.defjvps(lambda tangent, result, x: tangent / (1 + jnp.linalg.norm(result)))


def solved(x, mix):
    def transposed(_, gradient):
        return gradient / 2 + mix * gradient.mean(0)

    return jax.lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: b / 2, transpose_solve=transposed)


def rooted(x):
    """Return the rows as roots of a function, with a derivative that is centred over the rows."""
    return jax.lax.custom_root(lambda y: y - x, x, lambda _, guess: guess, lambda _, y: y - y.mean(0))


MIXING = {
    "mean over the rows": lambda x: x - ops.mean(x, axis=0),
    "first row": lambda x: x - x[0],
    "rolled": lambda x: x + ops.roll(x, 1, axis=0),
    "turned around": lambda x: ops.flip(x, axis=0),
    "all pairs": lambda x: ops.matmul(x, ops.transpose(x)),
    "products summed over rows": lambda x: ops.tensordot(x, x, 2) + x[:, :1],
    "softmax over the rows": lambda x: ops.softmax(x, axis=0),
    "sorted": lambda x: ops.sort(x, axis=0),
    "ranks": lambda x: ops.argsort(x, axis=0),
    "cumulative": lambda x: ops.cumsum(x, axis=0),
    "running maximum": lambda x: jax.lax.cummax(x, axis=0),
    "distances": lambda x: ops.sum(ops.abs(differences(x)), axis=1),
    "attention over the rows": lambda x: ops.matmul(ops.softmax(ops.matmul(x, x.T)), x),
    "divided by the number of rows": lambda x: x / x.shape[0],
    "to the power of the number of rows": lambda x: x ** x.shape[0],
    "times the position": lambda x: x * ops.arange(x.shape[0], dtype="float32")[:, None],
    "shifted by the number of rows": lambda x: x + x.shape[0] / 7,
    "loop until all are large": lambda x: jax.lax.while_loop(lambda v: v.sum() < 1e6, lambda v: 2 * v + 1, jnp.abs(x)),
    "rows one by one": lambda x: jax.lax.fori_loop(0, 4, lambda t, v: v + x[t], x),
    "as many turns as rows": lambda x: jax.lax.fori_loop(0, x.shape[0], lambda _, v: v * 1.5, x),
    "branch on the sum": lambda x: jax.lax.cond(x.sum() > 0, lambda v: v, lambda v: -v, x),
    "branch on the number of rows": lambda x: x * 2 if x.shape[0] > 5 else x * 3,
    "the other way round": lambda x: x - x**2 if x.shape[0] > 5 else x**2 - x,
    "scanned": lambda x: jax.lax.scan(lambda c, row: (c + row, c), jnp.zeros(4), x)[1],
    "shuffled": lambda x: jax.random.permutation(jax.random.key(0), x),
    "moving average": lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 1), (1, 1), "SAME"),
    "convolution along the rows": lambda x: ops.conv(x[None], jnp.ones((2, 4, 4)), padding="same")[0],
    "rows written to others": lambda x: x.at[0].set(x[1]),
    "norm of all": lambda x: x / ops.norm(x),
    "folded into columns": lambda x: ops.reshape(ops.transpose(x), x.shape),
    "covariance": lambda x: x @ (x.T @ x),
    "every second row": lambda x: ops.repeat(x[::2], 2, axis=0),
    "largest row": lambda x: x == ops.max(x, axis=0),
    "column chosen by the number of rows": lambda x: x + x[:, x.shape[0] - 4 : x.shape[0] - 3],
    "entry of a table at the number of rows": lambda x: x * COLUMN[x.shape[0]],
    "written over the first row": lambda x: jax.lax.dynamic_update_slice(x, jnp.ones((1, 4)), (0, 0)),
    "written over the first rows": lambda x: jax.lax.dynamic_update_slice(
        jnp.concatenate([x, x]), jnp.full((len(x), 4), 2.0), (0, 0)
    ).reshape(-1, 8),
    "positions folded into the rows": lambda x: folded_otherwise(x)[:, None],
    "reduced otherwise": lambda x: jax.lax.reduce(
        x, 0.0 if len(x) > 5 else 1.0, jax.lax.add if len(x) > 5 else jax.lax.mul, (1,)
    ),
    "reduced by another function": lambda x: jax.lax.reduce(
        (x, x),
        (0.0, 0.0),
        (lambda a, b: (a[0] + b[0], a[1])) if len(x) > 5 else (lambda a, b: (a[1], a[0] + b[0])),
        (1,),
    )[0],
    "type chosen by the number of rows": lambda x: x.astype("bfloat16" if len(x) > 5 else "float16").astype("float32"),
    "number of rows rounded": lambda x: x - ops.sum(x) / ops.cast(ops.cast(1.75 * len(x), "int32"), "float32"),
    "another function on the way back": lambda x: gradient_normed(x, lambda g: jnp.linalg.norm(g)),
    "the number of rows on the way back": lambda x: gradient_normed(x, lambda g: g.shape[0]),
    "derivative over the rows": lambda x: doubled(x),
    "noise of a key that all replicas share": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "keys for the rows from one that all replicas share": lambda x: (
        x + jax.vmap(jax.random.normal)(jax.random.split(jax.random.key(0), len(x)))[:, None]
    ),
    "standardized": lambda x: (x - ops.mean(x)) / ops.std(x),
    "flattened column by column": lambda x: jnp.ravel(x, order="F").reshape(x.shape),
    "kept in a reference": kept_in_a_reference,
    "a count of calls": lambda x: (
        x * jax.experimental.io_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), "float32"))
    ),
    "another function in training": lambda x: centred_on_the_way(x),
    "a library's function with another derivative": lambda x: other_tanh(x),
    "root with its own derivative": rooted,
    "a library's function with another derivative by its argument": lambda x: tanh_of_one_rule(x),
    "a transposed solution of all rows": lambda x: solved(x, 0.1),
    "rows carried through a map": lambda x: jax.lax.scan(lambda c, row: (c, row - x[0]), None, x)[1],
    "noise of the rows, turned around": lambda x: x + noise_of_rows(x)[::-1],
}
BY_ROWS = {
    "a function of weights with a library's derivative": lambda x: x * jax.nn.relu(COLUMN[:4]),
    "dense": lambda x: jnp.tanh(x @ jnp.ones((4, 3))),
    "softmax": ops.softmax,
    "normalized": lambda x: (x - ops.mean(x, -1, keepdims=True)) / ops.std(x, -1, keepdims=True),
    "pairs of columns": lambda x: ops.einsum("bi,bj->bij", x, x),
    "folded and unfolded": lambda x: ops.reshape(ops.tanh(ops.reshape(x, (-1, 2))), (-1, 4)),
    "two towers in one": lambda x: (lambda both: both[: x.shape[0]] - both[x.shape[0] :])(
        ops.tanh(jnp.concatenate([x, 2 * x]))
    ),
    "split towers": lambda x: (lambda both: both[0] - both[1])(ops.split(jnp.concatenate([x, 2 * x]), 2)),
    "stacked": lambda x: ops.stack([x, 2 * x])[1],
    "sorted columns": lambda x: ops.take_along_axis(x, ops.argsort(x, axis=1), axis=1),
    "largest columns": lambda x: ops.top_k(x, 2)[0],
    "one hot": lambda x: ops.one_hot(ops.argmax(x, axis=1), 4),
    "looked up": lambda x: ops.take(jnp.ones((9, 3)), ops.cast(ops.abs(x), "int32"), axis=0),
    "mapped": lambda x: jax.vmap(lambda row: row * row.sum())(x),
    "padded columns": lambda x: ops.pad(x, ((0, 0), (1, 1))),
    "with a token": lambda x: ops.concatenate([ops.tile(ops.ones((1, 1)), (x.shape[0], 1)), x], axis=1),
    "column written": lambda x: x.at[:, 1].set(0.0),
    "loop of three turns": lambda x: jax.lax.fori_loop(0, 3, lambda _, v: v * 1.5, x),
    "columns one by one": lambda x: jax.lax.fori_loop(0, 4, lambda t, v: v + x[:, t], jnp.zeros(len(x))),
    "scanned columns": lambda x: jax.lax.scan(lambda c, column: (c + column, c), jnp.zeros(len(x)), x.T)[1].T,
    "linear systems": lambda x: jnp.linalg.solve(ops.eye(4) + ops.einsum("bi,bj->bij", x, x), x[..., None])[..., 0],
    "own derivative": lambda x: gradient_normed(x, lambda g: 2 + jnp.abs(g)),
    "mapped row by row": lambda x: ops.map(lambda row: ops.sort(row) * row.sum(), x),
    "noise of the rows": lambda x: x + noise_of_rows(x),
    "derivative": lambda x: jax.vmap(jax.grad(lambda row: (row**3).sum()))(x),
}


@pytest.mark.parametrize("name", MIXING)
def test_proof_rejects_programs_that_mix_rows(name):
    (place,) = dependences_of_function(MIXING[name], X)
    assert isinstance(place, Mixed), place
    assert "test_programs.py:" in str(place) or "operations change" in str(place)


@pytest.mark.parametrize("name", BY_ROWS)
def test_proof_accepts_row_wise_programs(name):
    (place,) = dependences_of_function(BY_ROWS[name], X)
    assert is_by_rows(place), place


def test_a_table_as_long_as_the_batch_fails_on_another_batch_size():
    with pytest.raises(TypeError):
        dependences_of_function(lambda x: x + TABLE, X)


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (lambda x: ops.mean(x**2), RowMean()),
        (lambda x: 0.1 * ops.sum(x) / x.shape[0] + 3.0, RowMean()),
        (lambda x: ops.mean(ops.sum(x, axis=1)) - ops.mean(x), RowMean()),
    ],
)
def test_proof_recognizes_means_over_the_rows(function, place):
    assert dependences_of_function(function, X) == [place]


@pytest.mark.parametrize(
    "function",
    [
        ops.sum,
        ops.max,
        lambda x: ops.mean(x) ** 2,
        lambda x: ops.sum(x) / (x.shape[0] - 1),
        lambda x: ops.sum(ops.cast(ops.cast(ops.sum(ops.cast(x > 0, "int32"), 0), "bool"), "float32")) / x.shape[0],
        lambda x: ops.sum(ops.cast(ops.cast(ops.sum(ops.cast(x > 0, "int32"), 0), "int8"), "float32")) / x.shape[0],
    ],
)
def test_proof_takes_no_other_reduction_for_a_mean(function):
    assert dependences_of_function(function, X) not in ([RowMean()], [None])


@pytest.mark.parametrize("place", [RowAxis(0), RowAxis(1), RowAxis(0, 2, 3), RowAxis(1, 1, 2), RowAxis(2, 3, 1)])
def test_move_rows_first_and_back_are_inverse(place):
    shape = [4, 5, 7]
    shape[place.axis] = place.outer * 3 * place.inner
    value = np.arange(np.prod(shape)).reshape(shape)
    first = move_rows_first(jnp.asarray(value), place, 3)
    assert first.shape[0] == 3
    np.testing.assert_array_equal(move_rows_back(first, place), value)
    taken = np.take(
        value, [number for number in range(shape[place.axis]) if number // place.inner % 3 == 1], axis=place.axis
    )
    assert sorted(np.ravel(first[1])) == sorted(np.ravel(taken))


@pytest.mark.parametrize(
    ("first", "programs"),
    [
        pytest.param(0, 60, marks=pytest.mark.slow),
        *(pytest.param(start, 200, marks=pytest.mark.nightly) for start in range(0, 2000, 200)),
    ],
)
def test_proof_accepts_no_random_program_that_mixes_rows(first, programs):
    count = {True: 0, False: 0}
    for seed in range(first, first + programs):
        run = program(seed)
        (place,) = dependences_of_function(run, X)
        proved = place == RowAxis(0) or (isinstance(place, RowAxis) and place.uniform)
        if proved:
            assert not mixes(run), seed
        count[proved] += 1
    assert min(count.values()) > programs // 4, count  # Both kinds are there.
