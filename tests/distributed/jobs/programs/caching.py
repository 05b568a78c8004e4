"""Trains under each plan with JAX's persistent compilation cache, and tells how many programs were compiled and how many were found in it."""

import jax
import keras
import numpy as np

import lockstep
from tests.distributed.jobs.program import config, make_strategy, tell

jax.config.update("jax_compilation_cache_dir", config["cache"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
counts = {"compile_requests_use_cache": 0, "cache_hits": 0}
jax.monitoring.register_event_listener(
    lambda event, **_: counts.update({name: counts[name] + 1 for name in counts if event.endswith(f"/{name}")})
)
x, y = np.zeros((7, 4), "float32"), np.zeros(7, "int32")


def strategies():
    """Yield a strategy of each plan; those of workers start JAX with the first."""
    if config["workers"] > 1:
        for plan in {}, {"shard": "variables"}, {"deterministic": True}:
            yield make_strategy(replicas=4, **plan)
        return
    devices = ["cpu:0", "cpu:1"]
    plans = {}, {"replicas": 4}, {"shard": "optimizer"}, {"shard": "variables"}, {"cross_device_ops": "ring"}
    for plan in (*plans, {"deterministic": True}):
        yield lockstep.MirroredStrategy(devices, **plan)
    yield lockstep.CentralStorageStrategy(devices)


for strategy in strategies():
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inner = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((4,)), *inner, keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    model.fit(x, y, batch_size=4, verbose=0)
    model.evaluate(x, y, batch_size=4, verbose=0)
    model.predict(x, batch_size=4, verbose=0)
tell(**counts)
