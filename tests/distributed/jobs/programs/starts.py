"""Makes a strategy, trains one step, and tells; ``jax_first`` has JAX started by then."""

import jax
import keras
import numpy as np

from tests.distributed.jobs.program import config, make_strategy, tell

if config.get("jax_first"):
    jax.numpy.zeros(1)
strategy = make_strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
tell(trained=strategy.num_replicas_in_sync)
