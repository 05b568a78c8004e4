"""Synchronous data parallelism on the devices of one process."""

import os
from collections.abc import Sequence

import jax

from lockstep._errors import OptionError, instance_of
from lockstep._logging import log_warning
from lockstep.collectives import CommunicationOptions, Ops, ops_from_options
from lockstep.data.input_options import InputOptions
from lockstep.distributed.cluster.env_reader import launched_workers
from lockstep.execution.variable_shards import Recompute
from lockstep.strategies.base import Strategy
from lockstep.strategies.options import find_devices, one_axis_placement, prepare_process


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
        input_options: how batches reach the devices.
        shard: ``"variables"``: each of n devices keeps 1/n of every large variable of the model and of its optimizer, so that a model
            may be larger than a device. A variable is gathered where a step uses it, and its gradient is added by a
            reduce-scatter. ``"optimizer"``: only the optimizer's variables are sharded. Small variables, and those
            with no axis of at least n entries, stay whole. Source: Rajbhandari et al., "ZeRO" (2020), stages 3 and 1.
        recompute: with ``shard="variables"``, which layers are computed again in the backward pass, so that their gathered
            variables and inner results need no memory until then: ``"blocks"``: repeated layers, and all others that have large
            variables; a function ``layer -> bool``; None: no layer.

    Raises:
        BackendError: Keras does not run on JAX, or its version is unknown.
        DeviceError: a device is unknown, absent or named twice, or it is too late to make the CPU devices asked for.
        OptionError: ``replicas`` is not a positive integer; ``cross_device_ops`` or ``communication_options`` has another type,
            both are given, or the options have a ``timeout_seconds``; ``deterministic`` is combined with an operation whose
            order depends on the devices; ``shard`` is combined with an operation, or ``recompute`` is given without it.

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
        input_options: InputOptions | None = None,
        shard: str | None = None,
        recompute: Recompute = None,
    ) -> None:
        if communication_options is not None:
            _check_options(communication_options, cross_device_ops)
            cross_device_ops = ops_from_options(communication_options)
        options = prepare_process(cross_device_ops, replicas, deterministic, input_options, shard, recompute)
        super().__init__(one_axis_placement(find_devices(devices), options), options)
        if (workers := launched_workers(os.environ)) > 1:
            self._log(
                f"lockstep run has started {workers} workers, and with this strategy each of them trains by itself. Fix: make a "
                "lockstep.MultiWorkerMirroredStrategy, or leave out lockstep run.",
                log_warning,
            )


def _check_options(options: CommunicationOptions, ops: Ops | None) -> None:
    """Check the options of a strategy of one process.

    Raises:
        OptionError: they are of another type or have a ``timeout_seconds``, or ``ops`` is given, too.
    """
    instance_of(CommunicationOptions, "communication_options", options, "lockstep.CommunicationOptions(…)")
    if ops is not None:
        raise OptionError(
            f"cross_device_ops={ops!r} and communication_options={options!r} both say how gradients travel. Fix: leave one "
            "out; an operation takes bytes_per_pack itself, for example lockstep.RingAllReduce(bytes_per_pack=…)."
        )
    if options.timeout_seconds is not None:
        raise OptionError(
            f"communication_options: timeout_seconds={options.timeout_seconds!r} is for collectives between processes. "
            "The devices of one process are waited for by XLA, with limits of its own. Fix: leave timeout_seconds out."
        )
