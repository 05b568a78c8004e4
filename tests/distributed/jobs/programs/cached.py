"""Trains with a cache in a file, whose path is that of the other workers, and on arrays that are on the devices."""

import contextlib
from pathlib import Path

import keras
import numpy as np

import lockstep
from tests.distributed.jobs.program import config, make_strategy, tell

asked = []


def batches():
    for number in range(4):
        asked.append(number)
        yield np.ones((4, 1), "float32"), np.ones((4, 1), "float32")


strategy = make_strategy(input_options=lockstep.InputOptions(cache=config["cache"]))
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
found = set()
look = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: found.update(path.name for path in Path(config["cache"]).parent.iterdir())
)
model.fit(batches(), epochs=2, verbose=0, callbacks=[look])


def weights_after_fit(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.arange(14, dtype="float32").reshape(7, 2) / 14
    model.fit(x, x.sum(axis=1), batch_size=4, epochs=2, verbose=0)
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


on_devices = weights_after_fit(make_strategy(input_options=lockstep.InputOptions(cache="device")))
difference = float(abs(on_devices - weights_after_fit(None)).max())
tell(on_devices=difference < 1e-6, files=sorted(found), asked=len(asked), steps=int(model.optimizer.iterations.value))
