"""All workers write to the same paths, load what was written, and train it on under a second strategy."""

import time
from pathlib import Path

import keras
import numpy as np

import lockstep
from tests.distributed.jobs.program import config, make_strategy, tell

folder = Path(config["folder"])
x, y = np.arange(16, dtype="float32")[:, None] / 16, np.ones((16, 1), "float32")


class Names(keras.callbacks.Callback):
    """A callback of the user runs on every worker."""

    def on_epoch_end(self, epoch, logs=None):
        tell(**{f"epoch {epoch}": logs["loss"], f"folder {epoch}": Path(checkpoint.filepath).parent.name})


class WritesLate(keras.callbacks.Callback):
    """A file that the chief takes its time to write."""

    def on_train_end(self, logs=None):
        if strategy.is_chief:
            time.sleep(0.3)
            (folder / "late").touch()


strategy = make_strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")

own = folder if strategy.is_chief else Path(__file__)  # In a file there can be no folder.
checkpoint = keras.callbacks.ModelCheckpoint(own / "runs" / "{epoch}.keras", verbose=1)
callbacks = [
    Names(),
    checkpoint,
    keras.callbacks.ModelCheckpoint(folder / "epoch-{epoch}.keras"),
    keras.callbacks.ModelCheckpoint(folder / "last.weights.h5", save_weights_only=True, save_freq=1),
    keras.callbacks.CSVLogger(folder / "log.csv"),
    WritesLate(),
]
if not strategy.is_chief:  # It needs TensorFlow, which is not there: on the chief this would fail.
    callbacks.append(keras.callbacks.TensorBoard(folder / "board"))
model.fit(x, y, batch_size=8, epochs=2, callbacks=callbacks, verbose=1)
tell(is_complete=(folder / "late").exists())
if strategy.is_chief:
    time.sleep(0.3)
model.save_weights(folder / "late.weights.h5")
model.load_weights(folder / "late.weights.h5")
model.evaluate(x, y, batch_size=8, verbose=1)
model.predict(x, batch_size=8, verbose=1)
model.save(folder / "model.keras")
model.save_weights(folder / "model.weights.h5")

second = make_strategy(replicas=2 * config["workers"])
with second.scope():
    loaded = keras.models.load_model(folder / "model.keras")
tell(
    chief=strategy.is_chief,
    same=[np.array_equal(ours, theirs) for ours, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True)],
    loss=loaded.fit(x, y, batch_size=8, epochs=1, verbose=0).history["loss"],
    replicas=[strategy.num_replicas_in_sync, second.num_replicas_in_sync],
)
loaded.save(folder / "second.keras")

plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
plain.compile("sgd", "mse")
plain.fit(x * (1 + config["index"]), y, batch_size=3 + config["index"], verbose=0)  # This is nobody else's business.
plain.save(folder / f"own-{config['index']}.keras")
listed = keras.callbacks.CallbackList([keras.callbacks.ModelCheckpoint(own / "listed" / "last.keras")], model=model)
model.fit(x, y, callbacks=listed, verbose=0)
model.fit(x, y, callbacks=keras.callbacks.CSVLogger(folder / f"one-{config['index']}.csv"), verbose=0)
backup = keras.callbacks.BackupAndRestore(folder / "backup")
refused = []
for callbacks in ([backup], backup, {"backup": backup}):
    try:
        model.fit(x, y, callbacks=callbacks)
    except lockstep.ModelError as error:
        refused.append(str(error))
tell(backup=refused)
