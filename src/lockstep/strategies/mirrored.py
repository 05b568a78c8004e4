"""Synchronous data parallelism on the devices of one process."""

from collections.abc import Sequence

import jax

from lockstep.collectives import CommunicationOptions, Ops, choose_cross_device_ops
from lockstep.data.fit_entry import InputOptions
from lockstep.strategies.base import Strategy
from lockstep.strategies.setup import find_devices, prepare_process

__all__ = ["MirroredStrategy"]


class MirroredStrategy(Strategy):
    """Trains one model on several local devices at once, with the results of one device.

    Counterpart of ``tf.distribute.MirroredStrategy``: each device holds a copy of the variables, computes the gradient
    on its rows of the global batch, and all make the same update. A replica is logical: any number of replicas runs on
    any number of devices, and results depend on the replicas alone.

    Args:
        devices: names such as ``"gpu:0"``, ``"/gpu:0"``, ``"/device:GPU:0"``, ``"cpu:1"``, or JAX devices. By default
            every local device of JAX's default platform.
        cross_device_ops: adds the devices' gradients: an instance, a class, a name (``"ring"``), or a function
            ``(array, axis) -> array``. ``docs/collectives.md`` has the list; the default is :class:`AutoAllReduce`.
        replicas: number of replicas, by default one a device.
        deterministic: give the same bits on any number of devices, as long as the number of replicas is the same. Each
            replica then runs as a separate program, and gradients are added in the order of a fixed tree. By default as set by
            :func:`lockstep.config.set_deterministic`, else False.
        communication_options: chooses the operation instead of ``cross_device_ops``.
        shard_optimizer: each of n devices keeps and updates 1/n of the optimizer's variables, for less memory: gradients
            are added by a reduce-scatter, and an all-gather distributes the new weights. A variable with no axis that n
            divides stays whole on each device. Source: Rajbhandari et al., "ZeRO" (2020), stage 1.
        input_options: how batches reach the devices.

    Raises:
        BackendError: Keras does not run on JAX, or its version is unknown.
        DeviceError: a device is unknown, absent or named twice, or it is too late to make the CPU devices asked for.
        OptionError: ``replicas`` is not a positive integer; ``cross_device_ops`` or ``communication_options`` has another type,
            both are given, or the options have a ``timeout_seconds``; ``deterministic`` is combined with an operation whose
            order depends on the devices; or ``shard_optimizer`` is combined with ``deterministic`` or an operation.

    Example:
        >>> import keras, lockstep, numpy as np
        >>> strategy = lockstep.MirroredStrategy(replicas=2)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> history = model.fit(np.ones((5, 4)), np.ones((5, 1)), batch_size=3, verbose=0)
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        cross_device_ops: Ops | None = None,
        *,
        replicas: int | None = None,
        deterministic: bool | None = None,
        communication_options: CommunicationOptions | None = None,
        shard_optimizer: bool = False,
        input_options: InputOptions | None = None,
    ) -> None:
        if communication_options is not None:
            cross_device_ops = choose_cross_device_ops(cross_device_ops, communication_options)
        options = prepare_process(cross_device_ops, replicas, deterministic, shard_optimizer, input_options)
        super().__init__(find_devices(devices), options)
