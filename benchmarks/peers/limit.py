"""What the machine allows: NET BATCH STEPS. Each of the processes trains its share of the rows on a core of its own, and tells nobody.

Bare compiled steps, no ``fit``, no shuffling, no exchange.
"""

import os
import sys

import jax
from nets import build
from rows import rows
from turns import Turns


def main():
    turns = Turns()
    net, batch, steps = sys.argv[1], *map(int, sys.argv[2:])
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    share = batch // processes
    data = rows(net, share * steps)
    model = build(net)
    model.train_on_batch(*(part[:share] for part in data))
    step = jax.jit(lambda state, *batch: model.train_step(state, batch)[1], donate_argnums=0)
    state = epoch(step, values(model), data, share)
    turns.ready(sum(variable.size for variable in state[0]))
    while True:
        turns.wait()
        state = epoch(step, state, data, share)
        turns.done(steps)


def values(model):
    kinds = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    return tuple([variable.value for variable in kind] for kind in kinds)


def epoch(step, state, data, share):
    x, y = data
    for start in range(0, len(x), share):
        state = step(state, *jax.device_put((x[start : start + share], y[start : start + share])))
    return jax.block_until_ready(state)


if __name__ == "__main__":
    main()
