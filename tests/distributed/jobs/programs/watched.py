"""One worker reads slowly; the chief writes a status."""

import time

import keras
import numpy as np

import lockstep
from tests.distributed.jobs.program import config, make_strategy


class Slow(keras.utils.PyDataset):
    def __len__(self):
        return config["steps"]

    def __getitem__(self, number):
        time.sleep(config["seconds"] * config["index"])
        return np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


def generated():
    data = Slow()
    for number in range(len(data)):
        yield data[number]


with make_strategy().scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
for name, made in (("dataset", Slow()), ("generator", generated())):
    backup = lockstep.callbacks.BackupAndRestore(f"{config['folder']}/{name}")
    model.fit(made, callbacks=[backup, lockstep.callbacks.TensorBoard(f"{config['folder']}/logs")])
