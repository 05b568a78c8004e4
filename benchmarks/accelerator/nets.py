"""Nets of the accelerator parts, at the size of an accelerator or, with ``small``, at one that a CPU trains in a second."""

import keras
import numpy as np
from keras import layers


def dense(small, dropout=0.0):
    """A multilayer perceptron on images of digits."""
    width = 16 if small else 256
    model = keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(width, activation="relu"),
            layers.Dropout(dropout),
            layers.Dense(width, activation="relu"),
            layers.Dense(10),
        ]
    )
    return model, lambda rows: _classified(rows, (784,))


def convolutional(small):
    """A convolutional net with batch normalization."""
    model = keras.Sequential([keras.Input((32, 32, 3))])
    for filters in (4, 8) if small else (32, 64, 128):
        model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization())
        model.add(layers.ReLU())
        model.add(layers.MaxPooling2D())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(10))
    return model, lambda rows: _classified(rows, (32, 32, 3))


def language(small, words=50_257, length=512, width=512, blocks=4, heads=8):
    """A decoder of transformer blocks."""
    if small:
        words, length, width, blocks, heads = 50, 16, 16, 1, 2
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(words, width)(tokens)
    for _ in range(blocks):
        normalized = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(normalized, normalized, use_causal_mask=True)
        x = x + layers.Dense(width)(layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x)))
    model = keras.Model(tokens, layers.Dense(words, use_bias=False)(layers.LayerNormalization()(x)))

    def batch(rows):
        drawn = np.random.default_rng(0).integers(0, words, (rows, length + 1), dtype="int32")
        return drawn[:, :-1], drawn[:, 1:]

    return model, batch


def megatron_rules(blocks):
    """Megatron's layout for the decoder, by hand: heads, columns then rows, and words over the axis "model"."""
    rules = {
        f".*/(query|key|value)/{name}": axes
        for name, axes in (("kernel", (None, "model", None)), ("bias", ("model", None)))
    }
    rules |= {"embedding/embeddings": ("model", None), ".*/attention_output/kernel": ("model", None, None)}
    names = ["dense", *(f"dense_{number}" for number in range(1, 2 * blocks + 1))]
    for outer, inner in zip(names[0:-1:2], names[1::2], strict=True):  # The outer one is made first.
        rules |= {f"{inner}/kernel": (None, "model"), f"{inner}/bias": ("model",), f"{outer}/kernel": ("model", None)}
    return rules | {f"{names[-1]}/kernel": (None, "model")}  # words


def residual(small):
    """ResNet50, or MobileNetV2 if small."""
    size, classes = (32, 10) if small else (224, 1000)
    make = keras.applications.MobileNetV2 if small else keras.applications.ResNet50
    options = {"alpha": 0.35} if small else {}
    model = make(weights=None, input_shape=(size, size, 3), classes=classes, classifier_activation=None, **options)
    return model, lambda rows: _classified(rows, (size, size, 3), classes)


NETS = {"MLP": dense, "CNN": convolutional, "LM": language, "ResNet50": residual}


def compiled(net, small, optimizer="adam", steps_per_execution=1, **options):
    """Return a model of ``NETS`` with the same weights at each call, and a function from a number of rows to a batch."""
    keras.utils.set_random_seed(0)
    model, batch = NETS[net](small, **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    return model, batch


def _classified(rows, shape, classes=10):
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, *shape), "float32"), rng.integers(0, classes, rows).astype("int32")
