"""All workers look for a batch size; one of them has less memory, and then other data."""

import keras
import numpy as np

import lockstep
from tests.distributed.jobs.program import config, make_strategy, tell

x, y = np.ones((64, 8), "float32"), np.ones((64, 1), "float32")
with make_strategy().scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64), keras.layers.Dense(1)])
    model.compile("adam", "mse")
before = [weight.tobytes() for weight in model.get_weights()]

found = lockstep.batch_size_finder(model, x, y, batch_sizes=[16, 32, 64], steps=2)
least, most = (found.measurements[number].memory_bytes for number in (0, 1))
less = (least + most) // 2
limit = less if config["index"] else None
limited = lockstep.batch_size_finder(model, x, y, batch_sizes=[16, 32, 64], steps=2, memory_limit=limit)
tell(
    largest=[found.largest, limited.largest],
    shown=[str(found), str(limited)],
    least=[less, limited.available_bytes],
    same=before == [weight.tobytes() for weight in model.get_weights()],
)
model.fit(x, y, batch_size=32, verbose=0)
try:
    lockstep.batch_size_finder(model, x[: 64 - config["index"]], y[: 64 - config["index"]], batch_sizes=[16])
except lockstep.ClusterError as error:
    tell(refused=str(error))
