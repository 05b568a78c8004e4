"""Claim: on CPU a convolution inside a conditional is many times slower; replicas under vmap cost nothing.

Gradient of three 3×3 convolutions on a batch of (32, 32, 32, 3), computed in several ways in turn, for five rounds. The result is the best
time of each, and its ratio to the plain form in the same run. Decision 2 is based on this.
"""

import time

import jax
import jax.numpy as jnp
from jax import lax
from results_file import write

ROUNDS = 5


def network(weights, x):
    for kernel in weights:
        x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return x.sum()


def in_a_conditional(weights, x):
    return lax.switch(jnp.int32(x[0, 0, 0, 0] > 9), [lambda: network(weights, x), lambda: network(weights, x[:30])])


def both_and_select(weights, x):
    return jnp.where(x[0, 0, 0, 0] > 9, network(weights, x[:30]), network(weights, x))


def four_replicas_vmapped(weights, x):
    return jax.vmap(network, (None, 0))(weights, x.reshape(4, 8, *x.shape[1:])).sum()


def four_replicas_one_by_one(weights, x):
    return sum(network(weights, piece) for piece in x.reshape(4, 8, *x.shape[1:]))


def main():
    weights = [jnp.full((3, 3, 3, 32), 0.01)] + [jnp.full((3, 3, 32, 32), 0.01)] * 2
    x = jnp.ones((32, 32, 32, 3))
    ways = (network, in_a_conditional, both_and_select, four_replicas_vmapped, four_replicas_one_by_one)
    steps = {way.__name__: jax.jit(jax.grad(way)) for way in ways}
    best = dict.fromkeys(steps, float("inf"))
    for step in steps.values():
        jax.block_until_ready(step(weights, x))
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(weights, x))
            best[name] = min(best[name], time.perf_counter() - start)
    rows = [(name, f"{1e3 * best[name]:.1f}", f"{best[name] / best['network']:.2f}") for name in steps]
    write("replicas_on_one_device", "Replicas on one device", ("way", "ms", "ratio"), rows)


main()
