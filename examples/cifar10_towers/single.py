"""CIFAR-10 in a loop of one's own: one batch of 512 pictures a step, one device. Plain Keras; its twin is mirrored.py."""

import os
from functools import partial

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
from loop import evaluate, settings, train
from model import batches, build, load


def make_step(model):
    """One step: ``(state, batch) -> (loss, state)``."""

    def tower(trainable, non_trainable, pictures, labels):
        def loss_of(trainable):
            outputs, state = model.stateless_call(trainable, non_trainable, pictures, training=True)
            return model.loss(labels, outputs), state

        (loss, state), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        return loss, gradients, state

    @jax.jit
    def step(state, batch):
        trainable, non_trainable, variables = state
        loss, gradients, non_trainable = tower(trainable, non_trainable, *batch)
        trainable, variables = model.optimizer.stateless_apply(variables, gradients, trainable)
        return loss, (trainable, non_trainable, variables)

    return step


def main():
    given = settings()
    keras.utils.set_random_seed(given.seed)
    pictures, testing = load()
    model = build(given.learning_rate, given.decay, given.decay_steps)
    draw = partial(batches, *pictures, steps=given.steps, seed=given.seed)

    def batches_from(step):
        return draw(given.rows * given.towers, 1, start=step)

    train(model, make_step(model), batches_from, given)
    evaluate(model, *testing)


if __name__ == "__main__":
    main()
