"""Reuters newswires, a text CNN, on workers that do not wait for each other and a server of variables. Plain Keras: single.py.

lockstep run --workers 2 --servers 1 examples/reuters/asynchronous.py
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from model import build, load

import lockstep

keras.backend.clear_session()
keras.utils.set_random_seed(0)

(x, y), (x_test, y_test) = load()
strategy = lockstep.ParameterServerStrategy()  # TF_CONFIG says who is chief, worker and ps
with strategy.scope():
    model = build()
if strategy.is_chief:
    model.summary()
model.fit(x, y, batch_size=32, epochs=10, validation_data=(x_test, y_test))
