"""MNIST on 1, 2, 3 and 4 replicas at four batch sizes, gradients added on one device. Plain Keras: single.py."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from model import EPOCHS, ROWS, build, load

import lockstep

train, validation, test = load()
lockstep.config.set_logical_cpu_devices(4)
print("replicas  global batch  test accuracy")
for replicas, batch in ROWS:
    keras.utils.set_random_seed(0)
    devices = [f"/device:cpu:{index}" for index in range(replicas)]
    with lockstep.MirroredStrategy(devices, cross_device_ops=lockstep.ReductionToOneDevice()).scope():
        model = build()
    model.fit(*train, batch_size=batch, epochs=EPOCHS, shuffle=False, validation_data=validation, verbose=0)
    _, accuracy = model.evaluate(*test, batch_size=batch, verbose=0)
    print(f"{replicas:8}  {batch:12}  {accuracy:13.4f}", flush=True)
