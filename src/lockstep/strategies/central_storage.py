"""Synchronous data parallelism with the variables on one device."""

import contextlib
from collections.abc import Iterator, Sequence

import jax
import keras

from lockstep._errors import DeviceError, OptionError, shown
from lockstep._keras.graph import layers_of
from lockstep.collectives import Ops
from lockstep.data.input_options import InputOptions
from lockstep.devices.cpu_devices import ensure_cpu_devices
from lockstep.devices.names import (
    count_cpu_devices,
    device_name,
    find_device,
    parse_device_name,
    platform_of,
    resolve_devices,
)
from lockstep.devices.placement import Placement
from lockstep.devices.xla_flags import is_deterministic
from lockstep.execution.executors import CentralExecutor, Executor
from lockstep.fit.fit_hooks import FitContext
from lockstep.strategies.base import Strategy
from lockstep.strategies.options import one_axis_placement, overridden_devices, prepare_process


def resolve_with_parameter_device(
    devices: Sequence[str | jax.Device] | None, parameter_device: str | jax.Device | None
) -> tuple[tuple[jax.Device, ...], jax.Device]:
    """Return the devices that compute, as :func:`resolve_devices`, and the device of the variables.

    Args:
        devices: the devices that compute.
        parameter_device: the device of the variables; by default the CPU if ``devices`` are several accelerators, else the first of them.

    Raises:
        DeviceError: see :func:`resolve_devices`.
    """
    if parameter_device is not None and not isinstance(parameter_device, (str, jax.Device)):
        raise DeviceError(
            f"parameter_device: {shown(parameter_device)} is neither a name such as 'cpu:0' nor a JAX device. Fix: pass one of "
            "jax.devices() or its name."
        )
    named = [parameter_device] if isinstance(parameter_device, str) else []
    # JAX makes all CPU devices at once, when it starts.
    if any(parse_device_name(name, "parameter_device")[0] == "cpu" for name in named):
        ensure_cpu_devices(max(count_cpu_devices(devices), count_cpu_devices(named)))
    found = resolve_devices(devices)
    if parameter_device is None:
        several = len(found) > 1 and platform_of(found[0]) != "cpu"
        return found, find_device("cpu:0") if several else found[0]
    if isinstance(parameter_device, str):
        return found, find_device(parameter_device, "parameter_device")
    return found, parameter_device


class _OptimizerBuilder:
    """The fit hook that builds the optimizer on the parameter device: an accelerator on which Keras builds it would have to hold it once."""

    def __init__(self, device: jax.Device) -> None:
        self._device = device

    @contextlib.contextmanager
    def around_fit(self, context: FitContext) -> Iterator[None]:
        """See :class:`lockstep.fit.fit_hooks.FitHook`."""
        model, optimizer = context.model, context.model.optimizer
        is_built = model.built and all(layer.built for layer in layers_of(model))  # build(shape) may leave out layers.
        if is_built and optimizer is not None and not optimizer.built:
            with jax.default_device(self._device):
                optimizer.build(model.trainable_variables)
        yield


class CentralStorageStrategy(Strategy):
    """Trains one model on several local devices, with all variables on one device: the optimizer's need no accelerator memory.

    Counterpart of ``tf.distribute.experimental.CentralStorageStrategy``. Each step sends the weights to the compute devices, which add
    up their gradients as under :class:`MirroredStrategy`; the sum goes to the parameter device, and the optimizer runs there. The
    results are those of a ``MirroredStrategy`` with as many replicas. It pays off if the optimizer's variables do not fit beside the
    weights, because each step moves the weights out and the gradients back (``docs/central_storage.md``).

    Args:
        compute_devices: names such as ``"gpu:0"``, or JAX devices. By default every local device of JAX's default platform.
        parameter_device: holds the variables, for example ``"cpu:0"``; may be a compute device. By default the CPU if several
            accelerators compute; else the first compute device.
        replicas: number of replicas, by default one for each compute device.
        cross_device_ops: adds the devices' gradients, as for :class:`MirroredStrategy`.
        input_options: how batches reach the devices.

    Raises:
        BackendError: Keras does not run on JAX, or its version is unknown.
        DeviceError: a device is unknown, absent or named twice, or it is too late to make the CPU devices asked for.
        OptionError: ``replicas`` is not a positive integer, ``cross_device_ops`` has another type, or
            :func:`lockstep.config.set_deterministic` was called.

    Example:
        >>> import keras, lockstep, numpy as np
        >>> strategy = lockstep.CentralStorageStrategy(["cpu:0"], parameter_device="cpu:0", replicas=2)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer="adam", loss="mse")
        >>> history = model.fit(np.ones((5, 4)), np.ones((5, 1)), batch_size=3, verbose=0)
        >>> strategy.parameter_device
        'cpu:0'
    """

    def __init__(
        self,
        compute_devices: Sequence[str | jax.Device] | None = None,
        parameter_device: str | jax.Device | None = None,
        *,
        replicas: int | None = None,
        cross_device_ops: Ops | None = None,
        input_options: InputOptions | None = None,
    ) -> None:
        if is_deterministic():
            raise OptionError(
                "CentralStorageStrategy does not support lockstep.config.set_deterministic(). Fix: use MirroredStrategy, or leave "
                "set_deterministic out."
            )
        options = prepare_process(cross_device_ops, replicas, deterministic=False, input_options=input_options)
        devices, self._parameter_device = resolve_with_parameter_device(
            overridden_devices() or compute_devices, parameter_device
        )
        super().__init__(one_axis_placement(devices, options), options)
        # First, as a checkpoint restores the optimizer's variables.
        self._fit_hooks = (_OptimizerBuilder(self._parameter_device), *self._fit_hooks)

    @property
    def parameter_device(self) -> str:
        """Name of the device that holds the variables."""
        return device_name(self._parameter_device)

    def _executor_for(self, placement: Placement, model: keras.Model) -> Executor:
        return CentralExecutor(placement, self._ops, self._parameter_device, model)

    def _summary(self) -> str:
        return f"{super()._summary()}; variables and updates on {self.parameter_device}"
