"""The text CNN and the data that both scripts of this folder share."""

import keras
from keras import layers

from lockstep import datasets

MAX_WORDS = 30_982
LENGTH = 300


def load():
    return datasets.reuters(LENGTH)


def build():
    model = keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            layers.Embedding(MAX_WORDS, 7),
            layers.Conv1D(64, 5, activation="relu"),
            layers.MaxPool1D(2),
            layers.Conv1D(32, 3, activation="relu"),
            layers.MaxPool1D(2),
            layers.Flatten(),
            layers.Dense(46, activation="softmax"),
        ]
    )
    # The tutorial has from_logits=True here as well, although softmax gives probabilities. TensorFlow notices that and
    # corrects it; on JAX the accuracy then stays near .55.
    model.compile(
        optimizer=keras.optimizers.Nadam(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=False),
        metrics=[keras.metrics.SparseCategoricalAccuracy(), keras.metrics.SparseTopKCategoricalAccuracy(5)],
    )
    return model
