"""A model with a custom training step."""

import jax
import keras


class OwnStep(keras.Sequential):
    """A train_step as users write it, whose logs are no metrics: the optimizer's count of steps and its learning rate are among them."""

    def train_step(self, state, data):
        trainable, other, optimizer, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def loss_of(trainable, other):
            predicted, other = self.stateless_call(trainable, other, x, training=True)
            return 3 * keras.ops.mean((predicted - y) ** 2), other

        (loss, other), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable, other)
        step, rate = optimizer[:2]
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": loss, "step": step, "rate": rate}, (trainable, other, optimizer, metrics)
