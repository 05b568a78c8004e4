"""TensorFlow's MirroredStrategy on two logical CPUs, batches from the cache of ``tf.data``: NET BATCH STEPS."""

import sys

import tensorflow as tf
from fitting import fit
from nets import build
from rows import rows
from turns import Turns


def main():
    turns = Turns()
    net, batch, steps = sys.argv[1], *map(int, sys.argv[2:])
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = build(net)
    dataset = tf.data.Dataset.from_tensor_slices(rows(net, batch * steps)).batch(batch, drop_remainder=True)
    fit(model, dataset.cache().prefetch(tf.data.AUTOTUNE), turns=turns, steps=steps, finish=finish)


def finish(model):
    model.optimizer.iterations.numpy()


if __name__ == "__main__":
    main()
