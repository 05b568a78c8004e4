"""Programs compiled for one device and run on each, so that XLA's code does not depend on the number of devices.

XLA compiles a program over several devices with other passes than a program of one device, and the results may differ in bits. So
everything that rounds is compiled here for a single device, once for each of them, and the devices run it side by side.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from lockstep.data.device_placement import Placement
from lockstep.devices.cpu_devices import compiler_options

__all__ = ["PerDevice", "PerDeviceProgram", "replicated_array", "sharded_array", "to_per_device"]


class PerDevice(tuple[Any, ...]):
    """One value for each device: arrays in the order of the devices.

    None for a device without a value, and for a device of another process.
    """

    __slots__ = ()


class PerDeviceProgram:
    """A function that is compiled for one device and run on several.

    Args:
        function: ``(*values) -> list of arrays``; the values are trees of arrays.
        placement: the devices; a process runs it on its own ones.
        donated: positions of the values whose memory the results may reuse.
    """

    def __init__(self, function: Callable[..., list[Any]], placement: Placement, donated: Sequence[int] = ()) -> None:
        self._placement = placement
        options = compiler_options(placement.platform)
        self._program = jax.jit(function, donate_argnums=tuple(donated), compiler_options=options)
        self._compiled: set[int] = set()
        self._lock = threading.Lock()

    def __call__(self, *values: Any, places: Sequence[int] | None = None) -> list[PerDevice]:
        """Run on the devices at ``places``.

        Args:
            values: the function's, with a :class:`PerDevice` for each array.
            places: numbers of the devices, by default all. A process that has none of them runs it on its first device: that result
                is not read, but gives the shapes of the results.

        Returns:
            For each result a :class:`PerDevice`, None for all other devices.
        """
        own = self._placement.local_indices
        places = [place for place in own if places is None or place in places] or own[:1]
        leaves, structure = jax.tree.flatten(values, is_leaf=lambda leaf: isinstance(leaf, PerDevice))
        calls = [jax.tree.unflatten(structure, [leaf[place] for leaf in leaves]) for place in places]
        with self._lock:
            is_compiled = self._compiled.issuperset(places)
            self._compiled.update(places)
        if is_compiled:
            found = [self._program(*call) for call in calls]
        else:  # XLA compiles for several devices at the same time.
            with ThreadPoolExecutor(len(calls)) as pool:
                found = list(pool.map(lambda call: self._program(*call), calls))
        count = len(self._placement.devices)
        by_place = dict(zip(places, found, strict=True))
        return [
            PerDevice(by_place[place][i] if place in by_place else None for place in range(count))
            for i in range(len(found[0]))
        ]


def to_per_device(value: Any, placement: Placement) -> PerDevice:
    """Return each device's shard or copy of an array; numbers are copied to each device."""
    if isinstance(value, PerDevice):
        return value
    if not isinstance(value, jax.Array):
        value = placement.put(value)
    shards = {shard.device: shard.data for shard in value.addressable_shards}
    return PerDevice(shards.get(device) for device in placement.devices)


def replicated_array(value: PerDevice, sharding: NamedSharding) -> jax.Array:
    """Return one array of the devices' copies."""
    copies = [copy for copy in value if copy is not None]
    return jax.make_array_from_single_device_arrays(copies[0].shape, sharding, copies)


def sharded_array(value: PerDevice, placement: Placement) -> jax.Array:
    """Return one array whose shards along the first axis are the devices' values; a device without one gets zeros, which are not read."""
    shape, dtype = next((shard.shape, shard.dtype) for shard in value if shard is not None)
    shards = [
        jax.device_put(np.zeros(shape, dtype), placement.devices[place]) if value[place] is None else value[place]
        for place in placement.local_indices
    ]
    whole = (shape[0] * len(placement.devices), *shape[1:])
    return jax.make_array_from_single_device_arrays(whole, placement.row_sharding, shards)
