"""Trains with a cache in a file, whose path is that of the other workers."""

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
tell(files=sorted(found), asked=len(asked), steps=int(model.optimizer.iterations.value))
