"""Cats and dogs, MobileNetV2, a replica on each device named as an argument (by default on each there is)."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from model import build, flags, load

import lockstep

given = flags()
keras.utils.set_random_seed(0)
strategy = lockstep.MirroredStrategy(
    devices=given.devices or None, cross_device_ops=lockstep.HierarchicalCopyAllReduce, replicas=given.replicas
)
train, steps, test = load(given.rows * strategy.num_replicas_in_sync, given.size)
with strategy.scope():
    model = build(given.size)
model.fit(train, epochs=given.epochs, steps_per_epoch=steps, shuffle=False, validation_data=test, verbose=2)
