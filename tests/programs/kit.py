"""What a program is: a model as one of Keras's official examples builds it, at small size, with random data of the real shapes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np
from keras import layers, losses, optimizers

__all__ = ["ROWS", "Noise", "OwnStep", "Program", "compiled", "logits", "own"]

ROWS = 21  # Three batches of 7, which three replicas share as 3, 3 and 1: one program for all.


@dataclass(frozen=True)
class Noise:
    """What tells replicas apart in a model: ``rate`` of its dropout, and its normalization by batches, if it has any."""

    rate: float = 0.0
    by_batch: bool = False

    def dropout(self, rate: float = 1.0) -> layers.Layer:
        return layers.Dropout(self.rate * rate)

    def normalization(self) -> layers.Layer:
        """BatchNormalization, or where replicas must not differ one that normalizes each row."""
        return layers.BatchNormalization() if self.by_batch else layers.LayerNormalization()


@dataclass(frozen=True, eq=False)
class Program:
    """A model and its data.

    Attributes:
        name: after the example.
        area: "vision", for instance.
        build: a compiled model.
        data: arguments of ``fit``.
        global_batch: words of the reason, where it runs on the global batch.
        has_noise: whether it has dropout or normalizes by batches.
        fit_only: it makes no predictions by rows.
        relative: how far it may be from plain Keras: more where a normalization cancels most of the gradient that reaches what is before it.
        relative_of_momenta: the same for momenta, which are sums of such gradients; None: ``relative``.
    """

    name: str
    area: str
    build: Callable[[Noise], keras.Model]
    data: Callable[[np.random.Generator], dict[str, Any]]
    global_batch: str = ""
    has_noise: bool = False
    fit_only: bool = False
    relative: float = 1e-5
    relative_of_momenta: float | None = None

    def __str__(self) -> str:
        return self.name


def compiled(model: keras.Model, loss: Any = "mse", metrics: Any = (), optimizer: Any = None) -> keras.Model:
    # Momentum, and not Adam, which makes a rounding of a gradient near nothing a step of full length.
    model.compile(optimizer or optimizers.SGD(0.02, momentum=0.9), loss, metrics=list(metrics))
    return model


def logits() -> losses.Loss:
    return losses.SparseCategoricalCrossentropy(from_logits=True)


def own(kind: Callable[[], keras.Model], loss: Any = None) -> Callable[[Noise], keras.Model]:
    """Builds a model that has no noise and a training of its own."""
    return lambda noise: compiled(kind(), loss)


class OwnStep(keras.Model):
    """A model whose training is a function of its own: subclasses say what ``losses_of`` is."""

    def losses_of(self, trainable, non_trainable, data):
        """A scalar to be differentiated; logs; and new values of the non-trainable variables."""
        raise NotImplementedError

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        data = data if isinstance(data, tuple) else (data,)

        def loss(trainable):
            total, logs, values = self.losses_of(trainable, non_trainable, data)
            return total, (logs, values)

        (_, (logs, values)), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return logs, (trainable, values, optimizer, metrics)

    def part(self, model, values):
        """The trainable values of a model within this one."""
        places = {id(variable): number for number, variable in enumerate(self.trainable_variables)}
        return [values[places[id(variable)]] for variable in model.trainable_variables]

    def run(self, model, values, *inputs):
        """What a model within this one, without other variables, makes of inputs."""
        return model.stateless_call(self.part(model, values), [], *inputs, training=True)[0]
