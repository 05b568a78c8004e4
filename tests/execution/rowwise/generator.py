"""Random programs from arrays ``(rows, 4)`` to arrays ``(rows, 4)``; some combine rows, most do not, and the generator does not record which.

The steps use all operations that Keras's layers are traced to, in ways that stay within a row and in ways that do not.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from keras import ops

__all__ = ["mixes", "program"]

KEY = jax.random.key(7)
EYE = jnp.eye(4) * 3 + 0.5
TABLE = jnp.sin(jnp.arange(36.0)).reshape(9, 4)


def numbers(a):
    """Return integers from 0 to 3."""
    return (jnp.abs(a * 10) % 4).astype("int32")


def as_picture(a):
    return jnp.stack([a, a[:, ::-1]], 1)[..., None]  # (rows, 2, 4, 1)


def convolved(a, numbers, kernel, **options):
    return lax.conv_general_dilated(a, kernel, (1, 1), "SAME", dimension_numbers=numbers, **options)


ENTRYWISE = [
    *(
        jnp.tanh,
        jnp.abs,
        jnp.sin,
        jnp.cos,
        jnp.tan,
        jnp.sign,
        jnp.floor,
        jnp.ceil,
        jnp.expm1,
        jax.nn.relu,
        jax.nn.sigmoid,
    ),
    *(jax.nn.gelu, jax.nn.softplus, jnp.square, ops.silu, ops.hard_tanh, lax.erf, lax.neg, lax.stop_gradient),
    *(
        lambda a: lax.rsqrt(1 + a * a),
        lambda a: jnp.log(1 + jnp.abs(a)),
        lambda a: jnp.sqrt(jnp.abs(a)),
        lambda a: a**3,
    ),
    *(
        lambda a: a % 2.0,
        lambda a: lax.erf_inv(jnp.tanh(a) / 2),
        lambda a: jnp.exp(-jnp.abs(a)),
        lambda a: a.astype("bfloat16"),
    ),
    *(lambda a: jnp.where((a > 0) & (a <= 1) | (a < -1), a, -a), lambda a: jnp.where((a >= 0) != (a == 1), a, 2.0)),
    *(lambda a: jnp.minimum(a, 0.5), lambda a: jnp.clip(a, -1, 1), lambda a: a / (1 + jnp.abs(a)), lambda a: 1 - a),
    lambda a: lax.bitcast_convert_type(lax.bitcast_convert_type(a, jnp.uint32) >> 2 << 2, jnp.float32),
    *(lambda a: a + 0 * jax.random.normal(KEY, a.shape), lambda a: a * jax.random.uniform(KEY, (4,))),
    *(
        lambda a: a + 0 * jax.random.bernoulli(jax.random.split(KEY, 3)[1], 0.5, a.shape),
        lambda a: lax.reduce_precision(a, 8, 7),
    ),
]

# Each of these is used along axis 0 and along axis 1.
ALONG = [
    *(
        lambda a, i: a - a.mean(i, keepdims=True),
        lambda a, i: a - a.max(i, keepdims=True),
        lambda a, i: a + a.min(i, keepdims=True),
    ),
    *(lambda a, i: a * (a > 0).all(i, keepdims=True), lambda a, i: a * (a > 0).any(i, keepdims=True)),
    *(lambda a, i: a / (1 + jnp.std(a, i, keepdims=True)), lambda a, i: a * a.prod(i, keepdims=True)),
    *(
        lambda a, i: jax.nn.softmax(a, i),
        lambda a, i: a - jax.nn.logsumexp(a, i, keepdims=True),
        lambda a, i: jnp.cumsum(a, i),
    ),
    *(
        lambda a, i: jnp.cumprod(a, i),
        lambda a, i: lax.cummax(a, i),
        lambda a, i: lax.cumlogsumexp(a, i),
        lambda a, i: jnp.sort(a, i),
    ),
    *(
        lambda a, i: jnp.argsort(a, i) * 1.0,
        lambda a, i: a + jnp.argmax(a, i, keepdims=True),
        lambda a, i: jnp.flip(a, i),
    ),
    *(
        lambda a, i: jnp.roll(a, 1, i),
        lambda a, i: jnp.take_along_axis(a, jnp.argsort(-a, i), i),
        lambda a, i: jnp.diff(a, axis=i, prepend=0),
    ),
    *(
        lambda a, i: a * lax.broadcasted_iota("float32", a.shape, i),
        lambda a, i: a + a.shape[i] / 3,
        lambda a, i: a * lax.index_in_dim(a, 0, i),
    ),
    *(
        lambda a, i: jnp.repeat(a, 2, i).reshape(a.shape[0], -1)[:, :4],
        lambda a, i: lax.slice_in_dim(jnp.concatenate([a, -a], i), a.shape[i], 2 * a.shape[i], axis=i),
    ),
    *(
        lambda a, i: lax.slice_in_dim(jnp.concatenate([a, -a], i), 1, a.shape[i] + 1, axis=i),
        lambda a, i: jnp.stack([a, 2 * a], i).sum(i),
    ),
    *(
        lambda a, i: jnp.split(a, 2, i)[0].sum() + a,
        lambda a, i: jnp.concatenate(jnp.split(a, 2, i)[::-1], i),
        lambda a, i: jnp.tile(a, (2, 1) if i else (1, 2))[: a.shape[0], :4],
    ),
    *(
        lambda a, i: lax.reduce_window(a, 0.0, lax.add, (2, 1) if i == 0 else (1, 2), (1, 1), "SAME"),
        lambda a, i: lax.reduce_window(a, -9.0, lax.max, (2, 1) if i == 0 else (1, 2), (1, 1), "SAME"),
    ),
    *(
        lambda a, i: lax.dynamic_update_slice_in_dim(a, lax.index_in_dim(a, 1, i), 2, i),
        lambda a, i: a + lax.dynamic_slice_in_dim(a, jnp.int32(1), 1, i),
    ),
    *(
        lambda a, i: lax.pad(
            lax.slice_in_dim(a, 1, None, axis=i), 0.0, [(0, 1, 0) if i == j else (0, 0, 0) for j in (0, 1)]
        ),
        lambda a, i: jnp.median(a, i, keepdims=True) + a,
    ),
    *(
        lambda a, i: jnp.moveaxis(
            lax.scan(lambda c, v: (c * 0.5 + v, c), jnp.moveaxis(a, i, 0)[0] * 0, jnp.moveaxis(a, i, 0))[1], 0, i
        ),
        lambda a, i: lax.associative_scan(jnp.maximum, a, axis=i),
    ),
    *(
        lambda a, i: a.at[(slice(None),) * i + (1,)].add(1.0),
        lambda a, i: a.at[(slice(None),) * i + (0,)].multiply(a.sum() * 0.1),
        lambda a, i: ops.normalize(a, axis=i),
    ),
    *(
        lambda a, i: jnp.moveaxis(jnp.moveaxis(a, i, 0)[jnp.array([1, 0, 2, 3])], 0, i) if a.shape[i] == 4 else a - 1,
        lambda a, i: jnp.concatenate([a, a], i).reshape(2, *a.shape)[1] if i == 0 else a,
    ),
    *(
        lambda a, i: jax.vmap(lambda v: v * v.sum(), i, i)(a),
        lambda a, i: jax.vmap(lambda v: jnp.sort(v), i, i)(a),
        lambda a, i: (
            lax.top_k(jnp.moveaxis(a, i, 1), 2)[0].sum(1).mean() + a if i == 0 else a * lax.top_k(a, 2)[0][:, 1:]
        ),
    ),
]

OTHERS = [
    *(
        lambda a: a @ EYE,
        lambda a: a @ (a.T @ a) * 0.1,
        lambda a: jnp.einsum("bi,bj->bij", a, a).sum(1),
        lambda a: jnp.einsum("bi,cj->ij", a, a)[0] + a,
    ),
    *(
        lambda a: jnp.einsum("bi,ci->bc", a, a).sum(1, keepdims=True) + a,
        lambda a: jnp.tensordot(a, a, 2) + a,
        lambda a: jnp.vecdot(a, a)[:, None] * a,
    ),
    *(
        lambda a: jnp.swapaxes(a, 0, 1).reshape(a.shape),
        lambda a: a.reshape(-1, 2)[:, ::-1].reshape(-1, 4),
        lambda a: a.reshape(-1).cumsum().reshape(-1, 4),
    ),
    *(
        lambda a: a.reshape(-1, 2).sum(1, keepdims=True).reshape(-1, 2).repeat(2, 1),
        lambda a: a.T.reshape(-1)[: a.shape[0]][:, None] + a,
        lambda a: a.reshape(2, -1).reshape(-1, 4),
    ),
    *(
        lambda a: TABLE[numbers(a)].sum(1),
        lambda a: a[numbers(a)[:, 0] % 2],
        lambda a: jnp.take(a, numbers(a)[:, 0], axis=1)[:, :1] + a,
    ),
    *(
        lambda a: jnp.take_along_axis(a, numbers(a), 1),
        lambda a: jax.nn.one_hot(numbers(a)[:, 0], 4),
        lambda a: jnp.zeros((9, 4)).at[numbers(a)[:, 0]].add(a)[:4].sum(0) + a,
    ),
    *(
        lambda a: jax.vmap(lambda v, n: v.at[n].set(1.0))(a, numbers(a)[:, 0]),
        lambda a: jax.vmap(lambda v, n: lax.dynamic_slice(v, (n,), (1,)))(a, numbers(a)[:, 0]) + a,
    ),
    *(
        lambda a: jnp.linalg.solve(EYE, a.T).T,
        lambda a: jnp.linalg.solve(EYE + a[:, :, None] * a[:, None] * 0.1, a[..., None])[..., 0],
        lambda a: jnp.linalg.norm(a, axis=1, keepdims=True) * a,
    ),
    *(
        lambda a: a / (1 + jnp.linalg.norm(a)),
        lambda a: lax.cond(a.sum() > 0, lambda v: v, lambda v: -v, a),
        lambda a: lax.cond(a.shape[0] > 0, lambda v: v * 2, lambda v: -v, a),
    ),
    *(
        lambda a: lax.fori_loop(0, 3, lambda _, v: v * 0.5 + 1, a),
        lambda a: lax.fori_loop(0, a.shape[0], lambda _, v: v * 0.9, a),
        lambda a: lax.while_loop(lambda v: jnp.abs(v).max() > 0.5, lambda v: v / 2, a),
    ),
    *(
        lambda a: lax.fori_loop(0, 2, lambda _, v: jnp.roll(v, 1, 0), a),
        lambda a: lax.map(lambda r: r * r.sum(), a),
        lambda a: jax.checkpoint(lambda v: jnp.sin(v).cumsum(1))(a),
    ),
    *(
        lambda a: convolved(as_picture(a), ("NHWC", "HWIO", "NHWC"), jnp.ones((2, 2, 1, 1)))[:, 0, :, 0],
        lambda a: convolved(as_picture(a), ("HNWC", "HWIO", "HNWC"), jnp.ones((2, 2, 1, 1)))[:, 0, :, 0],
    ),
    *(
        lambda a: convolved(a[None, None], ("NCHW", "IOHW", "NCHW"), jnp.ones((1, 1, 1, 2)))[0, 0],
        lambda a: ops.average_pool(as_picture(a), 2, 1, "same")[:, 1, :, 0],
    ),
    *(
        lambda a: ops.conv_transpose(a[:, :, None], jnp.ones((2, 1, 1)), padding="same")[..., 0],
        lambda a: ops.image.resize(as_picture(a), (3, 4))[:, 1, :, 0],
    ),
    *(
        lambda a: jax.grad(lambda v: (jnp.tanh(v) ** 2).sum())(a),
        lambda a: jax.grad(lambda v: (v.sum(0) ** 2).sum())(a),
        lambda a: jax.nn.standardize(a),
        lambda a: jax.nn.standardize(a, axis=None),
    ),
    *(
        lambda a: ops.nn.dot_product_attention(*[a[:, :, None, None]] * 3)[..., 0, 0],
        lambda a: ops.nn.dot_product_attention(*[a[None, :, None]] * 3)[0, :, 0],
        lambda a: jnp.fft.ifft(jnp.fft.fft(a)).real,
    ),
    *(
        lambda a: jnp.fft.fft(a, axis=0).real,
        lambda a: jnp.linalg.cholesky(EYE + EYE.T + a[:, :, None] * a[:, None])[:, 3],
        lambda a: jax.random.permutation(KEY, a) * 0 + a,
        lambda a: a[::2].sum() + a,
    ),
    *(
        lambda a: jnp.unstack(a, axis=1)[0][:, None] + a,
        lambda a: jnp.outer(a[:, 0], jnp.arange(4.0)),
        lambda a: jnp.broadcast_to(jnp.arange(4.0), a.shape) + a,
        lambda a: jnp.ones(a.shape).cumsum(0) + a,
    ),
    *(
        lambda a: jnp.broadcast_to(jnp.arange(4.0), a.shape).reshape(-1).reshape(4, -1).T + a,
        lambda a: jnp.triu(a),
        lambda a: jnp.tril(a @ a.T) @ a,
        lambda a: a + len(a) % 5,
        lambda a: a * TABLE[len(a), 0],
    ),
]

JOINED = [
    *(lambda a, b: a + b, lambda a, b: a * jnp.tanh(b), lambda a, b: jnp.maximum(a, b), lambda a, b: jnp.where(a > b, a, b), lambda a, b: jnp.concatenate([a, b], 1)[:, 2:6]),
    *(lambda a, b: jnp.concatenate([a, b], 0)[: len(a)], lambda a, b: jnp.einsum("bi,bj->bi", a, b), lambda a, b: jnp.einsum("bi,ci->bc", a, b).sum(1, keepdims=True) + a),
    *(lambda a, b: a + b[::-1], lambda a, b: a - b.mean(), lambda a, b: jnp.take_along_axis(a, numbers(b), 1), lambda a, b: jax.vmap(jnp.outer)(a, b).reshape(len(a), -1)[:, 3:7], lambda a, b: jnp.stack([a, b], 2).reshape(len(a), -1)[:, :4]),
]  # fmt: skip


def program(seed):
    """Return a program of up to five steps, each on one or two of the values before it."""
    draw = random.Random(seed)
    steps = []
    for _ in range(draw.randint(1, 5)):
        kind = draw.choice((ENTRYWISE, ENTRYWISE, ALONG, OTHERS, JOINED))
        axis = draw.choice((0, 1, 1, 1, 1))  # Most programs should not mix rows.
        steps.append((draw.choice(kind), kind, axis, draw.random(), draw.random()))

    def run(x):
        values = [x]
        for step, kind, axis, first, second in steps:
            one, other = (values[int(place * len(values))] for place in (max(first, 0.4), second))
            result = step(one, axis) if kind is ALONG else step(one, other) if kind is JOINED else step(one)
            values.append(result.astype("float32"))
        return values[-1] + 0.1 * values[len(values) // 2]

    return run


def mixes(run):
    """Return whether a part of the batch has other results than the same rows of the whole, or one row changes another."""
    run = jax.jit(run)
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(6, 4)), "float32")
    whole = np.asarray(run(rows))
    spoilt = np.asarray(run(rows.at[2].set(jnp.nan)))
    others = [0, 1, 3, 4, 5]
    parts = [
        (np.asarray(run(rows[:4])), whole[:4]),
        (np.asarray(run(rows[2:])), whole[2:]),
        (spoilt[others], whole[others]),
    ]
    return not all(one.shape == two.shape and np.allclose(one, two, 1e-3, 1e-4, equal_nan=True) for one, two in parts)
