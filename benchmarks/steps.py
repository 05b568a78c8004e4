"""Time of a training step of one model: within ``fit``, and of the bare compiled step in a loop that feeds outputs back.

The difference is the host's part of a step: Keras's loop, callbacks, input, and the overhead of a strategy.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import keras

EPOCHS = 3  # of a turn: the first one also pays for starting fit and is left out


class Scalars(keras.layers.Layer):
    """Multiplies by the sum of as many variables as one likes, each a single number: nearly nothing to compute."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def build(self, shape):
        """Make the variables."""
        self.numbers = [self.add_weight(shape=(), initializer="zeros", name=f"number_{i}") for i in range(self.count)]

    def call(self, x):
        """``x`` times the sum."""
        return x * sum(number.value for number in self.numbers)


def scalars(count):
    """A model of ``count`` variables, not compiled."""
    return keras.Sequential([keras.Input((1,)), Scalars(count)])


class Steps:
    """One compiled model in training on ``batches`` equal batches, under its strategy or, with None, in plain Keras."""

    def __init__(self, model, strategy, x, y, rows):
        self.model, self.strategy, self.data, self.rows = model, strategy, (x, y), rows
        self.batches = len(x) // rows
        batch = tuple(part[:rows] for part in self.data)
        model.fit(*batch, batch_size=rows, verbose=0)
        # Copies: what is donated is not the model's.
        state = jax.tree.map(jnp.copy, state_of(model))
        if strategy is None:
            step, self._batch, self._state, places = model.train_step, jax.device_put(batch), state, None
        else:
            functions, placement = strategy._functions_of(model), strategy._placement
            step, self._batch = functions.build_step(functions.executor, "train"), placement.place(batch)
            self._state, places = placement.put(state), placement.replicated
        self.program = jax.jit(step, donate_argnums=0, out_shardings=places)

    def compiled_text(self):
        """What the compiler made of the bare step."""
        return self.program.lower(self._state, self._batch).compile().as_text()

    def in_fit(self):
        """Seconds of a step within ``fit``, without those in which it starts."""
        clock = Clock()
        self.model.fit(*self.data, batch_size=self.rows, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[clock])
        return statistics.median(clock.seconds[1:]) / self.batches

    def bare(self):
        """Seconds of a step in a loop that does nothing else."""
        state = self.program(self._state, self._batch)[1]  # Compiles, the first time.
        jax.block_until_ready(state)
        begun = time.perf_counter()
        for _ in range(self.batches):
            _, state = self.program(state, self._batch)
        jax.block_until_ready(state)
        self._state = state
        return (time.perf_counter() - begun) / self.batches


class Clock(keras.callbacks.Callback):
    """Seconds of each epoch."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        """Start."""
        self._begun = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        """Stop; Keras has read the logs, so the last step has ended."""
        self.seconds.append(time.perf_counter() - self._begun)


def state_of(model):
    """The values that a training step changes, as Keras passes them."""
    kinds = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    return tuple([variable.value for variable in kind] for kind in kinds)
