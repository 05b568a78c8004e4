"""Plain Keras on JAX: NET BATCH STEPS. With several CPU devices, ``keras.distribution.DataParallel`` over them."""

import sys

import jax
import keras
from fitting import fit
from nets import build
from rows import rows
from turns import Turns


def main():
    turns = Turns()
    net, batch, steps = sys.argv[1], *map(int, sys.argv[2:])
    devices = keras.distribution.list_devices("cpu")
    if len(devices) > 1:
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    fit(build(net), *rows(net, batch * steps), turns=turns, steps=steps, finish=finish, batch_size=batch)


def finish(model):
    jax.block_until_ready([variable.value for variable in model.trainable_variables])


if __name__ == "__main__":
    main()
