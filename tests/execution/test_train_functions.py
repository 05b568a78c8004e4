"""The functions that Keras's ``fit`` calls."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep


class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        return 2 * x


class Probe(layers.Layer):
    """Notes, when it is called, how many losses the layers after it know."""

    known, seen = (), []  # of the class: Keras would track those of a layer

    def call(self, x):
        self.seen.append(sum(len(layer._loss_ids) for layer in self.known))
        return x


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["split", "global batch"])
def test_layers_do_not_know_losses_of_earlier_calls(deterministic, kind):
    """Keras keeps the ids of such losses, and a new loss of another layer may have the same id: it would be lost or counted twice."""
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2, deterministic=deterministic).scope():
        inputs = keras.Input((4,))
        x = Probe()(inputs)
        for _ in range(3):
            x = Penalty()(x)
        if kind == "global batch":
            x = x - ops.mean(x, axis=0)
        model = keras.Model(inputs, 0 * x)
        model.compile("sgd", "mse")
    Probe.seen, Probe.known = [], [layer for layer in model.layers if isinstance(layer, Penalty)]
    loss = model.evaluate(np.ones((7, 4)), np.zeros((7, 4)), batch_size=4, verbose=0)
    assert loss == pytest.approx(1 + 4 + 16)
    assert len(Probe.seen) > 2
    assert set(Probe.seen) == {0}
