"""Trains with checkpoints and trackers; a worker may send itself a signal. Only the chief has the trackers of other packages, as the documentation says."""

import contextlib
import os
import signal
from pathlib import Path

import keras
import numpy as np

import lockstep
from tests.distributed.jobs.program import config, make_strategy, tell

ROWS, BATCH, EPOCHS = 24, 8, 3
folder = Path(config["folder"])


class Signalled(keras.callbacks.Callback):
    """The last worker gets SIGTERM after some step."""

    def on_train_batch_end(self, batch, logs=None):
        if (
            config["index"] == config["workers"] - 1
            and int(self.model.optimizer.iterations.value) == config["signal_at"]
        ):
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def mlflow_run():
    """The run whose id is in a file, or a new one."""
    import mlflow

    mlflow.set_tracking_uri((folder / "mlruns").as_uri())
    known = folder / "mlflow_run_id"
    with mlflow.start_run(run_id=known.read_text() if known.exists() else None) as run:
        known.write_text(run.info.run_id)
        yield mlflow.keras.MlflowCallback()


@contextlib.contextmanager
def wandb_run():
    """The run with an id of the user's choice."""
    import wandb
    from wandb.integration.keras import WandbMetricsLogger

    with wandb.init(project="lockstep", id="night-7", resume="allow", mode="offline", dir=folder):
        yield WandbMetricsLogger()


TRACKERS = {"mlflow": mlflow_run, "wandb": wandb_run}

generator = np.random.default_rng(0)
x, y = generator.normal(size=(ROWS, 3)).astype("float32"), generator.normal(size=(ROWS, 1)).astype("float32")
keras.utils.set_random_seed(3)
strategy = make_strategy(replicas=2, deterministic=True)
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
callbacks = [
    lockstep.callbacks.BackupAndRestore(folder / "run", save_freq=1000),
    keras.callbacks.CSVLogger(folder / "log.csv", append=True),
    Signalled(),
]
with contextlib.ExitStack() as stack:
    if strategy.is_chief:
        callbacks += [stack.enter_context(TRACKERS[name]()) for name in config["trackers"]]
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, callbacks=callbacks, verbose=0).history
tell(loss=history["loss"])
