"""Programs of one device, run on each: what XLA makes of them cannot depend on how many devices there are.

A program over several devices goes through other passes of the compiler than a program of one, and may come out with other
bits. So whatever rounds is compiled for a single device here, once for each of them, and run on them side by side.
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

__all__ = ["PerDevice", "PerDeviceProgram", "cut_array", "local", "whole_array"]


class PerDevice(tuple[Any, ...]):
    """A value of which each device has its own: an array on each device, in their order.

    None where there is none, and where the device belongs to another process.
    """

    __slots__ = ()


class PerDeviceProgram:
    """A function that is compiled for one device and run on several.

    Args:
        function: ``(*values) -> list of arrays``; the values are trees of arrays.
        placement: the devices; a process runs it on its own ones.
        donated: positions of the values that give their memory to the results.
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
            places: numbers of the devices, by default all. A process that has none of them runs it on its first device: nobody
                reads that result, but it says what the results look like.

        Returns:
            For each result a :class:`PerDevice`, None elsewhere.
        """
        own = self._placement.local_places
        places = [place for place in own if places is None or place in places] or own[:1]
        leaves, structure = jax.tree.flatten(values, is_leaf=lambda leaf: isinstance(leaf, PerDevice))
        calls = [jax.tree.unflatten(structure, [leaf[place] for leaf in leaves]) for place in places]
        with self._lock:
            known = self._compiled.issuperset(places)
            self._compiled.update(places)
        if known:
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


def local(value: Any, placement: Placement) -> PerDevice:
    """Each device's part of an array that is cut over the devices, or its copy; numbers are copied to each."""
    if isinstance(value, PerDevice):
        return value
    if not isinstance(value, jax.Array):
        value = placement.put(value)
    parts = {shard.device: shard.data for shard in value.addressable_shards}
    return PerDevice(parts.get(device) for device in placement.devices)


def whole_array(value: PerDevice, sharding: NamedSharding) -> jax.Array:
    """One array of the devices' copies."""
    parts = [part for part in value if part is not None]
    return jax.make_array_from_single_device_arrays(parts[0].shape, sharding, parts)


def cut_array(value: PerDevice, placement: Placement) -> jax.Array:
    """One array of the devices' parts, joined on their first axis; a device without one gets zeros, which nobody reads."""
    shape, dtype = next((part.shape, part.dtype) for part in value if part is not None)
    parts = [
        jax.device_put(np.zeros(shape, dtype), placement.devices[place]) if value[place] is None else value[place]
        for place in placement.local_places
    ]
    whole = (shape[0] * len(placement.devices), *shape[1:])
    return jax.make_array_from_single_device_arrays(whole, placement.row_sharding, parts)
