"""Cats and dogs, MobileNetV2, one device: plain Keras. Its twin is mirrored.py."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from model import build, flags, load

given = flags()
keras.utils.set_random_seed(0)
train, steps, test = load(given.rows, given.size)
model = build(given.size)
model.fit(train, epochs=given.epochs, steps_per_epoch=steps, shuffle=False, validation_data=test, verbose=2)
