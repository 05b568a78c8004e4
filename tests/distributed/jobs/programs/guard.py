"""A row of one replica is bad; all workers say the same of it, and the chief prints."""

import keras
import numpy as np

import lockstep
from tests.distributed.jobs.program import config, make_strategy, tell

x, y = np.random.default_rng(0).normal(size=(24, 3)).astype("float32"), np.ones((24, 1), "float32")


class Log(keras.layers.Layer):
    def call(self, x):
        return x + 0.01 * keras.ops.log(x[:, :1] + 50)


def trained(guard, x, y, *callbacks):
    keras.utils.set_random_seed(3)
    with make_strategy(deterministic=config["deterministic"]).scope():
        inner = [Log(name="log"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *inner])
        model.compile("adam", "mse")
    callbacks = [*callbacks, guard] if guard else list(callbacks)
    try:
        model.fit(x, y, batch_size=8, shuffle=False, callbacks=callbacks)
    except lockstep.NonFiniteError as error:
        tell(stopped=[error.batch, error.replicas, error.layer, error.rows, str(error)])
    return [weight.tolist() for weight in model.get_weights()]


good = x.copy()
x[8 + config["bad_row"]] = -60
NanGuard = lockstep.callbacks.NanGuard
backup = lockstep.callbacks.BackupAndRestore(config["folder"], save_freq=1)
tell(
    before=trained(NanGuard(), x, y) == trained(None, x[:8], y[:8]),
    skipped=trained(NanGuard("skip"), x, y) == trained(None, np.delete(x, np.s_[8:16], 0), y[:16]),
    back=trained(NanGuard("rollback"), x, y, backup) == trained(None, np.delete(x, np.s_[8:16], 0), y[:16]),
    unchanged=trained(NanGuard(), good, y) == trained(None, good, y),
)
