"""Initialises JAX over processes; ``trains`` one step, then shuts it down itself, or waits without a strategy."""

import threading

import jax
import keras
import numpy as np

from tests.distributed.jobs.program import config, make_strategy, tell

if config.get("trains"):
    strategy = make_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
    tell(is_initialized=jax.distributed.is_initialized())
    with keras.device("cpu:0"):
        tell(own=float(keras.ops.sum(keras.ops.convert_to_tensor(np.ones(3)))))
    jax.distributed.shutdown()
    tell(shut_down=not jax.distributed.is_initialized())
else:
    jax.devices()
    threading.Event().wait(600)  # The test ends it.
