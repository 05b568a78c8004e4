"""The nets in Keras, compiled; ``torch_nets.py`` has the same in torch."""

import keras
from keras import layers
from rows import LENGTH, WORDS, WORDS_OF_REUTERS

WIDTH, HEADS, INNER, BLOCKS, DROPOUT = 128, 4, 512, 2, 0.1  # of the transformer


def build(net):
    """A compiled model."""
    keras.utils.set_random_seed(0)
    make, optimizer = NETS[net]
    metrics = [keras.metrics.SparseCategoricalAccuracy()]
    if net == "reuters":
        metrics.append(keras.metrics.SparseTopKCategoricalAccuracy(5))
    model = make()
    model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=metrics)
    return model


def reuters():
    parts = [
        keras.Input((300,), dtype="int32"),
        layers.Embedding(WORDS_OF_REUTERS, 7),
        layers.Conv1D(64, 5, activation="relu"),
        layers.MaxPool1D(2),
        layers.Conv1D(32, 3, activation="relu"),
        layers.MaxPool1D(2),
        layers.Flatten(),
        layers.Dense(46),
    ]
    return keras.Sequential(parts)


def mnist():
    hidden = [layers.Dense(256, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((784,)), *hidden, layers.Dense(10)])


def cifar():
    def block(filters):
        return [
            layers.Conv2D(filters, 3, padding="same", activation="relu"),
            layers.Conv2D(filters, 3, activation="relu"),
            layers.MaxPool2D(2),
            layers.Dropout(0.25),
        ]

    top = [layers.Flatten(), layers.Dense(512, activation="relu"), layers.Dropout(0.5), layers.Dense(10)]
    return keras.Sequential([keras.Input((32, 32, 3)), *block(32), *block(64), *top])


def mobilenet():
    return keras.applications.MobileNetV2(input_shape=(96, 96, 3), weights=None, classes=2, classifier_activation=None)


class Positions(layers.Layer):
    """Adds a learned vector to each position."""

    def build(self, shape):
        """Make the vectors."""
        self.vectors = self.add_weight(shape=shape[1:], name="vectors")

    def call(self, x):
        """Rows of vectors, each with that of its position added."""
        return x + self.vectors


def transformer():
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Dropout(DROPOUT)(Positions()(layers.Embedding(WORDS, WIDTH)(tokens)))
    for _ in range(BLOCKS):
        attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=DROPOUT)(x, x)
        x = layers.LayerNormalization()(x + layers.Dropout(DROPOUT)(attended))
        inner = layers.Dropout(DROPOUT)(layers.Dense(INNER, activation="relu")(x))
        x = layers.LayerNormalization()(x + layers.Dropout(DROPOUT)(layers.Dense(WIDTH)(inner)))
    return keras.Model(tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


NETS = {
    "reuters": (reuters, keras.optimizers.Nadam),
    "mnist": (mnist, keras.optimizers.Adam),
    "cifar": (cifar, lambda: keras.optimizers.RMSprop(1e-3)),
    "mobilenet": (mobilenet, keras.optimizers.Adam),
    "transformer": (transformer, keras.optimizers.Adam),
}
