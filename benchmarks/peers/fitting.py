"""Keras's ``fit`` in turns: one call, whose epochs wait for the driver."""

import math

import keras

FOR_EVER = 1_000_000  # epochs; "stop" ends the program


class InTurns(keras.callbacks.Callback):
    """The first epoch compiles and warms up; each later one waits for its turn and says what a step took.

    ``finish`` is given the model and returns when its last step is computed.
    """

    def __init__(self, turns, steps, finish):
        super().__init__()
        self._turns, self._steps, self._finish = turns, steps, finish

    def on_epoch_begin(self, epoch, logs=None):
        """Wait."""
        if epoch:
            self._turns.wait()

    def on_epoch_end(self, epoch, logs=None):
        """Tell."""
        self._finish(self.model)
        if epoch:
            self._turns.done(self._steps)
        else:
            self._turns.ready(sum(math.prod(variable.shape) for variable in self.model.trainable_variables))


def fit(model, *data, turns, steps, finish, **options):
    model.fit(*data, epochs=FOR_EVER, verbose=0, callbacks=[InTurns(turns, steps, finish)], **options)
