"""CIFAR-10, a small CNN with dropout, one device: plain Keras. Its twin is mirrored.py."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from model import build, load

keras.utils.set_random_seed(0)
train, test = load()
model = build()
model.fit(*train, batch_size=128, epochs=3, validation_data=test, verbose=2)
