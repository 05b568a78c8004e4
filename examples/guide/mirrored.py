"""The guide's flow under a strategy, and a new strategy for each training: three live in this process."""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from model import build, load

import lockstep

train, validation, test = load()


def make_or_restore_model(folder):
    saved = sorted(folder.glob("*.keras"), key=lambda path: path.stat().st_mtime)
    if saved:
        print("Restoring from", saved[-1].name)
        return keras.models.load_model(saved[-1])
    print("Creating a new model")
    return build()


def run_training(folder, epochs):
    with lockstep.MirroredStrategy(replicas=2).scope():
        model = make_or_restore_model(folder)
    saving = keras.callbacks.ModelCheckpoint(folder / "ckpt-{epoch}.keras", save_freq="epoch")
    backup = lockstep.callbacks.BackupAndRestore(folder / "backup", extend=True)
    model.fit(*train, batch_size=32, epochs=epochs, callbacks=[saving, backup], validation_data=validation, verbose=2)
    return model


keras.utils.set_random_seed(0)
with lockstep.MirroredStrategy(replicas=2).scope():
    model = build()
model.fit(*train, batch_size=32, epochs=2, validation_data=validation, verbose=2)
model.evaluate(*test, batch_size=32, verbose=2)

with tempfile.TemporaryDirectory() as folder:
    run_training(Path(folder), epochs=1)
    model = run_training(Path(folder), epochs=1)
    model.evaluate(*test, batch_size=32, verbose=2)
