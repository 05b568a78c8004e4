"""Device names as ``tf.distribute`` spells them, and the JAX devices that they mean."""

import os
import re
from collections.abc import Collection, Sequence

import jax

from lockstep._errors import DeviceError, shown
from lockstep.devices.cpu_devices import check_thread_pool, clear_pool_variable, ensure_cpu_devices

# "/job:localhost/replica:0/task:0/device:GPU:0" is the form that TensorFlow prints.
_NAME = re.compile(r"(?:/job:\w+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?(cpu|gpu|tpu):(\d{1,9})", re.IGNORECASE)
_MOST_LISTED = 16  # names of devices in a sentence


def parse_device_name(name: str, argument: str = "devices") -> tuple[str, int]:
    """Return platform and index of a device name: ``"/device:GPU:0"``, ``"gpu:0"`` and ``"/gpu:0"`` are ``("gpu", 0)``.

    Raises:
        DeviceError: it is no such name; the message has the name of the argument.
    """
    match = _NAME.fullmatch(name.strip())
    if match is None:
        raise DeviceError(
            f"{argument}: unknown device name {shown(name)}. Fix: pass a platform and a number, such as 'gpu:0' or '/gpu:0'."
        )
    return match.group(1).lower(), int(match.group(2))


def device_name(device: jax.Device) -> str:
    """Return the short name of a device, as strategies accept it: ``gpu:0``; ``worker:1/gpu:0`` in another process."""
    platform, process = platform_of(device), device.process_index
    number = [other for other in device.client.devices() if other.process_index == process].index(device)
    return f"{platform}:{number}" if process == jax.process_index() else f"worker:{process}/{platform}:{number}"


def resolve_devices(devices: Sequence[str | jax.Device] | None) -> tuple[jax.Device, ...]:
    """Return the JAX devices that ``devices`` names; None means every local device of JAX's default platform.

    Raises:
        DeviceError: a name is unknown, absent or used twice; the platforms are mixed; it is too late to make the CPU
            devices that are asked for. Nothing was changed then.
    """
    if devices is None:
        found = tuple(jax.local_devices())
    elif isinstance(devices, (str, set, frozenset)) or not isinstance(devices, Collection):
        raise DeviceError(
            f"devices: expected a list of names such as ['gpu:0'], got {shown(devices)}. Fix: pass a list or a tuple."
        )
    elif not len(devices):
        raise DeviceError("devices: the list is empty. Fix: leave it out to use every device.")
    else:
        found = _named(list(devices))
    clear_pool_variable()
    platforms = sorted({platform_of(device) for device in found})
    if len(platforms) > 1:
        raise DeviceError(f"devices: {', '.join(platforms)} cannot be mixed in one strategy. Fix: choose one platform.")
    if platforms == ["cpu"]:
        check_thread_pool(len(found), os.environ)
    return found


def is_described(device: jax.Device) -> bool:
    """Return whether a device of this process is only described, for compiling without it: it holds no arrays."""
    return device.local_hardware_id is None


def count_cpu_devices(devices: Sequence[str | jax.Device] | None) -> int:
    """Return how many logical CPU devices the names need; at least 1."""
    names = [] if devices is None or isinstance(devices, str) else [x for x in devices if isinstance(x, str)]
    parsed = [parse_device_name(name) for name in names]
    return max((index + 1 for platform, index in parsed if platform == "cpu"), default=1)


def _named(devices: list[str | jax.Device]) -> tuple[jax.Device, ...]:
    for device in devices:
        if not isinstance(device, (str, jax.Device)):
            raise DeviceError(
                f"devices: {shown(device)} is neither a name such as 'gpu:0' nor a JAX device. Fix: pass one of jax.devices() or its name."
            )
    parsed = [parse_device_name(device) for device in devices if isinstance(device, str)]
    cpu_indices = [index for platform, index in parsed if platform == "cpu"]
    if cpu_indices and len(set(cpu_indices)) == len(cpu_indices):
        ensure_cpu_devices(max(cpu_indices) + 1)
    found = [device if isinstance(device, jax.Device) else find_device(device) for device in devices]
    for position, device in enumerate(found):
        if device in found[:position]:
            raise DeviceError(
                f"devices: {devices[position]!r} and {devices[found.index(device)]!r} are the same device. Fix: for "
                "several replicas on one device write MirroredStrategy(devices=[…], replicas=…)."
            )
    return tuple(found)


def listed_devices(names: Sequence[str]) -> str:
    """Format names of devices, of many only the first and the last.

    Example:
        >>> listed_devices(["tpu:0", "tpu:1"]), listed_devices([f"tpu:{number}" for number in range(256)])
        ('tpu:0, tpu:1', 'tpu:0, tpu:1, tpu:2, …, tpu:255')
    """
    return ", ".join(names if len(names) <= _MOST_LISTED else [*names[:3], "…", names[-1]])


def find_device(name: str, argument: str = "devices") -> jax.Device:
    """Return the local device of a name, such as "gpu:0".

    Raises:
        DeviceError: the name is none of a device, or there is no such device.
    """
    platform, index = parse_device_name(name, argument)
    local = _local(platform)
    if index >= len(local):
        raise DeviceError(
            f"{argument}: there is no device {name!r} here; there are: {', '.join(_all_names())}. Fix: name one of these."
        )
    return local[index]


def _local(platform: str) -> list[jax.Device]:
    try:
        return list(jax.local_devices(backend=platform))
    except RuntimeError:  # JAX has no such platform here.
        return []


def _all_names() -> list[str]:
    default = jax.local_devices()
    others = [] if platform_of(default[0]) == "cpu" else _local("cpu")
    return [device_name(device) for device in [*default, *others]]


def platform_of(device: jax.Device) -> str:
    """Return "gpu" for GPUs of every vendor, else JAX's name of the platform."""
    return "gpu" if device.platform in ("cuda", "rocm") else device.platform
