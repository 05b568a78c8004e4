"""Cats and dogs on two workers, with the TF_CONFIG of the tutorial, which also lists a ps: start it with --index 0 and --index 1.

Without --index it runs in one process, on the devices named as arguments. With --deterministic both print the same digits.
"""

import json
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from model import build, flags, load

import lockstep

given = flags()
if given.index is not None:  # On two machines: their names in place of localhost.
    cluster = {
        "worker": [f"localhost:{given.port}", f"localhost:{given.port + 1}"],
        "ps": [f"localhost:{given.port + 2}"],
    }
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": given.index}})

strategy = lockstep.MultiWorkerMirroredStrategy(
    devices=given.devices or None, replicas=given.replicas, deterministic=given.deterministic
)
keras.utils.set_random_seed(0)
train, steps, test = load(given.rows * strategy.num_replicas_in_sync, given.size)
with strategy.scope():
    model = build(given.size)
model.fit(train, epochs=given.epochs, steps_per_epoch=steps, shuffle=False, validation_data=test, verbose=2)
