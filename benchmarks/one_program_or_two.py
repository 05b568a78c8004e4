"""Claim: a gradient in two programs, forward and backward, costs about as much as in one.

One device, one replica. The forward program passes the residuals of ``jax.vjp`` to the backward program; the loss between them is a third,
small program. Decision 9 is based on this. The variants take turns; the result is the median of the ratios.
"""

import os
import statistics
import time

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import layers
from results_file import write

ROUNDS, CALLS = 15, 5


def mlp():
    hidden = [layers.Dense(256, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((784,)), *hidden, layers.Dense(10)]), (784,)


def cnn():
    def block(filters):
        return [
            layers.Conv2D(filters, 3),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.MaxPooling2D(),
        ]

    inner = [*block(32), *block(64), layers.Flatten(), layers.Dropout(0.3), layers.Dense(10)]
    return keras.Sequential([keras.Input((32, 32, 3)), *inner]), (32, 32, 3)


def in_one(model, x, y):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def total(trainable, non_trainable):
        outputs, state = model.stateless_call(trainable, non_trainable, x, training=True)
        return loss(y, outputs), state

    return jax.jit(jax.value_and_grad(total, has_aux=True))


def in_two(model, x, y):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    structure = None

    @jax.jit
    def forward(trainable, non_trainable):
        nonlocal structure
        call = lambda trainable: model.stateless_call(trainable, non_trainable, x, training=True)  # noqa: E731
        outputs, backward, state = jax.vjp(call, trainable, has_aux=True)
        residuals, structure = jax.tree.flatten(backward)
        return outputs, residuals, state

    middle = jax.jit(jax.value_and_grad(lambda outputs: loss(y, outputs)))
    backward = jax.jit(lambda residuals, cotangent: jax.tree.unflatten(structure, residuals)(cotangent))

    def run(trainable, non_trainable):
        outputs, residuals, state = forward(trainable, non_trainable)
        value, cotangent = middle(outputs)
        (gradients,) = backward(residuals, cotangent)
        return (value, state), gradients

    return run


def compare(build, batch):
    keras.utils.set_random_seed(0)
    model, shape = build()
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(batch, *shape)).astype("float32")), jnp.asarray(rng.integers(0, 10, batch))
    values = [
        [variable.value for variable in kind] for kind in (model.trainable_variables, model.non_trainable_variables)
    ]
    ways = in_one(model, x, y), in_two(model, x, y)
    one, two = (jax.block_until_ready(way(*values)) for way in ways)
    for a, b in zip(one[1], two[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    times = [[once(way, values) for way in ways] for _ in range(ROUNDS)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return *(round(1e3 * median, 2) for median in medians), round(statistics.median(b / a for a, b in times), 2)


def once(way, values):
    start = time.perf_counter()
    for _ in range(CALLS):
        jax.block_until_ready(way(*values))
    return (time.perf_counter() - start) / CALLS


def main():
    nets = {"MNIST MLP": mlp, "CIFAR-10 CNN": cnn}
    rows = [(name, batch, *compare(build, batch)) for name, build in nets.items() for batch in (16, 64, 256)]
    columns = "net", "rows", "one program, ms", "two programs, ms", "ratio"
    write("one_program_or_two", "The gradient of one replica in one program or in two", columns, rows)


if __name__ == "__main__":
    main()
