"""MNIST at four batch sizes on one device: plain Keras. Its twin is mirrored.py."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from model import EPOCHS, ROWS, build, load

train, validation, test = load()
print("replicas  global batch  test accuracy")
for _, batch in ROWS:
    keras.utils.set_random_seed(0)
    model = build()
    model.fit(*train, batch_size=batch, epochs=EPOCHS, shuffle=False, validation_data=validation, verbose=0)
    _, accuracy = model.evaluate(*test, batch_size=batch, verbose=0)
    print(f"{1:8}  {batch:12}  {accuracy:13.4f}", flush=True)
