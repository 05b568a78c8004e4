"""What only the chief has read, on every worker: arrays travel as a sum over the devices to which only the chief adds something."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from lockstep.data.device_placement import DEVICE_AXIS, Placement
from lockstep.distributed.control.control_client import ControlClient

__all__ = ["shared_arrays"]

_PIECE = 1 << 22  # numbers of 4 bytes that travel at once


def shared_arrays(
    session: ControlClient, placement: Placement, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The chief's arrays; all workers call it, and what the others give is not looked at.

    Args:
        session: the workers.
        placement: their devices.
        arrays: by name, of dtypes of numbers.
    """
    names = session.broadcast("the arrays", [[name, x.dtype.name, list(x.shape)] for name, x in arrays.items()])
    kinds = {name: (np.dtype(dtype), tuple(shape)) for name, dtype, shape in names}
    size = sum(dtype.itemsize * int(np.prod(shape, dtype=int)) for dtype, shape in kinds.values())
    numbers = np.zeros(-(-size // 4), np.int32)
    if session.group.is_chief:
        own = b"".join(np.ascontiguousarray(value).tobytes() for value in arrays.values())
        numbers.view(np.uint8)[:size] = np.frombuffer(own, np.uint8)
    data = np.concatenate(
        [_sum(placement, numbers[start : start + _PIECE]) for start in range(0, len(numbers), _PIECE)] or [numbers]
    ).view(np.uint8)
    found, start = {}, 0
    for name, (dtype, shape) in kinds.items():
        stop = start + dtype.itemsize * int(np.prod(shape, dtype=int))
        found[name] = np.frombuffer(data[start:stop].tobytes(), dtype).reshape(shape)
        start = stop
    return found


def _sum(placement: Placement, own: np.ndarray) -> np.ndarray:
    """The sum over the workers; of each, one device brings what it has."""
    nothing = np.zeros_like(own)
    parts = [
        jax.device_put((own if place == placement.local_indices[0] else nothing)[None], placement.devices[place])
        for place in placement.local_indices
    ]
    whole = (len(placement.devices), *own.shape)
    stack = jax.make_array_from_single_device_arrays(whole, placement.row_sharding, parts)
    return np.asarray(_summed(placement.mesh)(stack).addressable_shards[0].data)


@cache
def _summed(mesh: Mesh) -> Any:
    whole, cut = PartitionSpec(), PartitionSpec(DEVICE_AXIS)
    add = jax.shard_map(
        lambda x: lax.psum(x[0], DEVICE_AXIS), mesh=mesh, in_specs=cut, out_specs=whole, check_vma=False
    )
    return jax.jit(add)
