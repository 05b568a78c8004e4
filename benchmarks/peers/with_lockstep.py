"""Lockstep with two replicas on one CPU device, on two where ``TWO_DEVICES`` is set, or with ``TF_CONFIG`` in one of several workers: NET BATCH STEPS."""

import os
import sys

import jax
from fitting import fit
from nets import build
from rows import rows
from turns import Turns

import lockstep


def main():
    turns = Turns()
    net, batch, steps = sys.argv[1], *map(int, sys.argv[2:])
    with strategy().scope():
        model = build(net)
    fit(model, *rows(net, batch * steps), turns=turns, steps=steps, finish=finish, batch_size=batch)


def strategy():
    if "TF_CONFIG" in os.environ:
        return lockstep.MultiWorkerMirroredStrategy()
    return lockstep.MirroredStrategy(["cpu:0", "cpu:1"] if "TWO_DEVICES" in os.environ else None, replicas=2)


def finish(model):
    jax.block_until_ready([variable.value for variable in model.trainable_variables])


if __name__ == "__main__":
    main()
