"""Devices that every strategy made in a context gets, whatever it names: so a script is measured on others than its own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import jax

from lockstep._errors import DeviceError, OptionError
from lockstep.devices.cpu_devices import ensure_cpu_devices
from lockstep.devices.names import platform_of, resolve_devices

__all__ = ["as_imposed", "devices_imposed", "is_out_of_use"]

FindDevices = Callable[[], Sequence[jax.Device]]

_SEVERAL_PROCESSES = ("MultiWorkerMirroredStrategy", "ParameterServerStrategy")
_imposed: ContextVar[int | None] = ContextVar("imposed", default=None)


@contextmanager
def devices_imposed(count: int) -> Iterator[None]:
    """Give each strategy that is made here the first ``count`` devices of JAX's default platform, and one replica a device.

    Args:
        count: number of devices; 0: strategies are made on one device, and their scopes leave models to plain Keras.
    """
    token = _imposed.set(count)
    try:
        yield
    finally:
        _imposed.reset(token)


def as_imposed(strategy: str, find_devices: FindDevices, replicas: int | None) -> tuple[FindDevices, int | None]:
    """What a strategy of that name is made of: its own devices and replicas, or those that are imposed.

    Raises:
        OptionError: devices are imposed, and the strategy is one of several processes.
    """
    count = _imposed.get()
    if count is None:
        return find_devices, replicas
    if strategy in _SEVERAL_PROCESSES:
        raise OptionError(
            f"{strategy}: only strategies of one process can be measured. Use a MirroredStrategy for that."
        )
    return partial(_first_devices, max(1, count)), max(1, count)


def is_out_of_use() -> bool:
    """Whether scopes leave models to plain Keras here."""
    return _imposed.get() == 0


def _first_devices(count: int) -> Sequence[jax.Device]:
    platform = platform_of(jax.local_devices()[0])
    if platform == "cpu":
        ensure_cpu_devices(count)
    found = jax.local_devices()
    if len(found) < count:
        raise DeviceError(
            f"There are {len(found)} {platform} devices here; {count} were asked for. Take {len(found)} at most."
        )
    return resolve_devices(found[:count])
