"""CIFAR-10 in towers: each draws its own batch of 128, gradients are averaged, one update; on the devices named as arguments."""

import os
from functools import partial

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
from loop import evaluate, settings, train
from model import batches, build, load

import lockstep


def make_step(model, strategy):
    """One step: ``(state, batch) -> (loss, state)``."""

    def tower(trainable, non_trainable, pictures, labels):
        def loss_of(trainable):
            outputs, state = model.stateless_call(trainable, non_trainable, pictures, training=True)
            return model.loss(labels, outputs), state

        (loss, state), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        loss, gradients = lockstep.get_replica_context().all_reduce("MEAN", (loss, gradients))
        return loss, gradients, state

    @jax.jit
    def step(state, batch):
        trainable, non_trainable, variables = state
        loss, gradients, non_trainable = strategy.run(tower, args=(trainable, non_trainable, *batch))
        trainable, variables = model.optimizer.stateless_apply(variables, gradients, trainable)
        return loss, (trainable, non_trainable, variables)

    return step


def main():
    given = settings()
    keras.utils.set_random_seed(given.seed)
    pictures, testing = load()
    with lockstep.MirroredStrategy(given.devices or None, replicas=given.towers).scope() as strategy:
        model = build(given.learning_rate, given.decay, given.decay_steps)
    draw = partial(batches, *pictures, steps=given.steps, seed=given.seed)

    def batches_from(step):
        return strategy.distribute_datasets_from_function(lambda context: draw(given.rows, given.towers, start=step))

    with strategy.checkpoint(given.folder / "steps", save_freq=given.save_freq) as checkpoint:
        train(model, make_step(model, strategy), batches_from, given, checkpoint)
    evaluate(model, *testing)


if __name__ == "__main__":
    main()
