"""Trains for a long time; at step 5 the ``faulty`` worker does what it was told to."""

import os
import sys
import threading
import time

import keras
import numpy as np

from tests.distributed.jobs.program import config, make_strategy, tell

IS_FAULTY = config["index"] == config.get("faulty")
FAULT = config.get("does", "nothing") if IS_FAULTY else "nothing"
STEP = 5
x, y = np.ones((4, 1), "float32"), np.ones((4, 1), "float32")


class Callback(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == STEP - 2:
            tell(training=True)
        if self.steps == STEP:
            self.act()

    def act(self):
        if FAULT == "raise in a callback":
            raise ValueError("the labels of batch 5 are missing")
        if FAULT == "exit":
            sys.exit(3)
        if FAULT == "exit without a word":
            os._exit(7)
        if FAULT == "change a weight":
            self.model.layers[-1].bias.assign([7.0])
        if FAULT == "stop the training":
            self.model.stop_training = True
        if FAULT == "stick in a callback":
            never_released().acquire()


def batches():
    for number in range(config.get("steps", 100_000)):
        if number == STEP and FAULT == "raise in the data":
            raise ValueError("the picture of row 5 cannot be read")
        if number == STEP and FAULT == "stick in the data":
            never_released().acquire()
        if number == STEP and FAULT == "stop the data":
            return
        yield x, y


def never_released():
    lock = threading.Lock()
    lock.acquire()
    return lock


if IS_FAULTY and config.get("does") == "die at the start":
    os._exit(7)
strategy = make_strategy(check_every=config.get("check_every", 100))
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(2, name="hidden"), keras.layers.Dense(1, name="out")]
    )
    model.compile(keras.optimizers.SGD(0.0), "mse")
model.fit(batches(), steps_per_epoch=config.get("steps", 100_000), epochs=1, callbacks=[Callback()], verbose=0)
tell(trained=True)
if FAULT == "come to the end early":
    sys.exit(0)
if FAULT == "come to the end late":
    time.sleep(5)
elif config.get("evaluates"):
    model.evaluate(x, y, verbose=0)
tell(done=True)
