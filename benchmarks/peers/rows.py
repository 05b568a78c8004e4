"""Rows of the real shapes from a seeded generator; NumPy only, so that every program gets the same."""

import numpy as np

WORDS_OF_REUTERS, WORDS, LENGTH = 30982, 8000, 128  # LENGTH: tokens of a row for the transformer


def rows(net, count):
    """Inputs and labels."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, {"reuters": 46, "mnist": 10, "cifar": 10}.get(net, 2), count).astype("int32")
    if net == "reuters":
        return generator.integers(0, WORDS_OF_REUTERS, (count, 300), "int32"), labels
    if net == "transformer":
        return generator.integers(0, WORDS, (count, LENGTH), "int32"), labels
    shape = {"mnist": (784,), "cifar": (32, 32, 3), "mobilenet": (96, 96, 3)}[net]
    return generator.random((count, *shape), "float32"), labels
