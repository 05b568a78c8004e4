"""CIFAR-10, a small CNN with dropout, two replicas on the devices named as arguments (by default all there are)."""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from model import build, load

import lockstep

keras.utils.set_random_seed(0)
train, test = load()
with lockstep.MirroredStrategy(sys.argv[1:] or None, replicas=2).scope():
    model = build()
model.fit(*train, batch_size=128, epochs=3, validation_data=test, verbose=2)
