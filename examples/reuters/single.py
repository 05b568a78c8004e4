"""Reuters newswires, a text CNN, one device: plain Keras. Its twin is mirrored.py."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from model import build, load

keras.backend.clear_session()
keras.utils.set_random_seed(0)

(x, y), (x_test, y_test) = load()
model = build()
model.summary()
model.fit(x, y, batch_size=32, epochs=10, validation_data=(x_test, y_test))
