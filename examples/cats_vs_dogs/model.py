"""MobileNetV2, the pictures of cats and dogs, and the flags that the scripts of this folder share."""

import argparse
import math
import os
from pathlib import Path

import keras
from keras import layers
from pictures import batches, find


def flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("devices", nargs="*", help="of mirrored.py, such as gpu:0 gpu:1; by default all there are")
    parser.add_argument("--replicas", type=int, help="of mirrored.py, by default one a device")
    parser.add_argument("--rows", type=int, default=64, help="of a replica in each batch")
    parser.add_argument("--size", type=int, default=96, help="pixels of a side; the tutorial has 224")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--index", type=int, choices=(0, 1), help="of this worker, for two_workers.py")
    parser.add_argument("--port", type=int, default=12345, help="of worker 0, for two_workers.py")
    parser.add_argument("--deterministic", action="store_true", help="the same bits on any devices, for two_workers.py")
    return parser.parse_args()


def load(global_batch_size, size):
    """Endless training batches, the steps of an epoch, and the batches of a pass over the test pictures."""
    folder = Path(os.environ.get("LOCKSTEP_DATA", ".")) / "cats_vs_dogs"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no {folder}: set LOCKSTEP_DATA to a folder with cats_vs_dogs/train/cat/*.jpg …"
        )
    train, test = find(folder / "train"), find(folder / "test")
    steps = math.ceil(len(train) / global_batch_size)
    return batches(train, size, global_batch_size, seed=0), steps, batches(test, size, global_batch_size)


def build(size):
    pictures = keras.Input((size, size, 3), dtype="uint8")
    scaled = layers.Rescaling(1 / 127.5, offset=-1)(pictures)
    model = keras.applications.MobileNetV2(input_tensor=scaled, weights=None, classes=2)
    # Plain functions, as in the tutorial: the last layer is a softmax, and both take its probabilities.
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.sparse_categorical_crossentropy,
        metrics=[keras.metrics.sparse_categorical_accuracy],
    )
    return model
