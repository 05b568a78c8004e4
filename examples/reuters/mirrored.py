"""Reuters newswires, a text CNN, two replicas: on one device (the default here) or on those named as arguments."""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from model import build, load

import lockstep

keras.backend.clear_session()
keras.utils.set_random_seed(0)

(x, y), (x_test, y_test) = load()
strategy = lockstep.MirroredStrategy(sys.argv[1:] or None, replicas=2)  # for example: cpu:0 cpu:1
with strategy.scope():
    model = build()
model.summary()
model.fit(x, y, batch_size=32, epochs=10, validation_data=(x_test, y_test))
