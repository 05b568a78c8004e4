"""Ends training, and loops, in the middle of inputs that all workers read ahead, and then goes on with them."""

import itertools
import time

import keras
import numpy as np

from tests.distributed.jobs.program import config, make_strategy, tell


def numbered():
    """Batches of one number, for ever; the second worker reads them slowly."""
    for number in itertools.count():
        time.sleep(0.05 * (config["index"] == 1))
        yield np.zeros((4, 1), "float32"), np.full((4, 1), number, "float32")


class Note(keras.callbacks.Callback):
    """Writes down the numbers that the model was trained with, and stops after ``count`` batches."""

    def __init__(self, count):
        super().__init__()
        self.count, self.losses = count, []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        if batch + 1 == self.count:
            self.model.stop_training = True
            linger()


def fitted(data, count):
    """The model gives 0, so that the running mean of the absolute error tells the numbers."""
    note = Note(count)
    model.fit(data, steps_per_epoch=1000, callbacks=[note], verbose=0)
    sums = np.asarray(note.losses) * np.arange(1, count + 1)
    return np.rint(np.diff(sums, prepend=0.0)).tolist()


def looped(dataset, count):
    found = []
    for _, number in dataset:
        found.append(float(strategy.reduce("MEAN", number, axis=0)[0]))
        if len(found) == count:
            linger()
            break
    return found


def linger():
    """The first worker stays a while in the middle, and reads on; the others have closed their inputs by then."""
    time.sleep(0.5 * (config["index"] == 0))


strategy = make_strategy()
with strategy.scope():
    zero = keras.layers.Dense(1, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), zero])
    model.compile(keras.optimizers.SGD(0.0), "mae")

generator, dataset = numbered(), strategy.experimental_distribute_dataset(numbered())
own = strategy.distribute_datasets_from_function(lambda context: numbered())
began = time.monotonic()
tell(**{"fit": fitted(generator, 4), "fit goes on": fitted(generator, 3)})
tell(**{"loop": looped(dataset, 4), "loop goes on": looped(dataset, 3)})
tell(**{"own": looped(own, 4), "own goes on": looped(own, 3)})
tell(seconds=time.monotonic() - began)
