"""Reference for per-replica semantics: a loop over replicas on one device, with plain Keras and without Lockstep.

Each replica normalizes its own rows and draws from its own stream; the loss is that of the global batch; moving
statistics are averaged by rows. The test of the real thing is that it equals this.
"""

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import ops


def naive_fit(model, x, y, *, batch_size, replicas, epochs=1):
    """Train ``model`` in place; it is built, and compiled with a loss that averages over rows."""
    model.optimizer.build(model.trainable_variables)
    for _ in range(epochs):
        for start in range(0, len(y), batch_size):
            rows = slice(start, start + batch_size)
            naive_step(model, jax.tree.map(lambda leaf, rows=rows: leaf[rows], x), y[rows], replicas)


def naive_step(model, x, y, replicas):
    groups = model.trainable_variables, model.optimizer.variables, model.non_trainable_variables
    step = jax.jit(naive_values, static_argnums=(0, 1))
    new = step(model, replicas, x, y, *([variable.value for variable in group] for group in groups))
    for variables, values in zip(groups, new, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def naive_values(model, replicas, x, y, trainable, optimizer, old):
    chunk = -(-len(y) // replicas)

    def loss(trainable):
        predictions, added, states, sizes = [], 0.0, [], []
        for replica in range(replicas):
            rows = slice(replica * chunk, (replica + 1) * chunk)
            own_x, size = jax.tree.map(lambda leaf, rows=rows: leaf[rows], x), len(y[rows])
            if size == 0:
                continue
            own = [seed(v, replica) if v.dtype == jnp.uint32 else v for v in old]
            out, state, losses = model.stateless_call(trainable, own, own_x, training=True, return_losses=True)
            predictions.append(out)
            states.append(state)
            sizes.append(size)
            added += size / len(y) * sum(losses)
        of_rows = keras.losses.get(model.loss)(
            y, ops.concatenate(predictions)
        )  # A loss by name has one value for each row.
        return ops.mean(of_rows) + added, (states, sizes)

    gradients, (states, sizes) = jax.grad(loss, has_aux=True)(trainable)
    trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)
    return trainable, optimizer, [merge(values, sizes) for values in zip(*states, strict=True)]


def seed(state, replica):
    if replica == 0:
        return state
    key = jax.random.wrap_key_data(state, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(key, replica))


def merge(values, sizes):
    if not np.issubdtype(values[0].dtype, np.floating):
        return values[0]
    return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
