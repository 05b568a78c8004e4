"""A cheap proof that the copies of the variables on all devices of all workers are the same."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lockstep.data.device_placement import Placement
from lockstep.distributed.control.control_client import ControlClient
from lockstep.execution.per_device import PerDeviceProgram, to_per_device

__all__ = ["DriftCheck"]

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class DriftCheck:
    """Compares checksums of the variables, device by device and worker by worker.

    Args:
        session: the workers.
        placement: the devices.
    """

    def __init__(self, session: ControlClient, placement: Placement) -> None:
        self._session, self._placement = session, placement
        self._sums = PerDeviceProgram(lambda arrays: [jnp.stack([_checksum(array) for array in arrays])], placement)

    def __call__(self, step: int, names: Sequence[str], arrays: Sequence[Any]) -> None:
        """Compare.

        Args:
            step: number of the step, for the message.
            names: of the variables.
            arrays: their values, one for each name, replicated over the devices.

        Raises:
            ClusterError: they differ; it names the worker and the variable, on every worker.
        """
        (sums,) = self._sums([to_per_device(array, self._placement) for array in arrays])
        columns = zip(*(np.asarray(part).tolist() for part in sums if part is not None), strict=True)
        own = {
            name: column[0] if len(set(column)) == 1 else list(column)
            for name, column in zip(names, columns, strict=True)
        }
        self._session.agree(f"the checksums of the variables after step {step}", own)


def _checksum(array: jax.Array) -> jax.Array:
    """Sum of the array's bits, each number with a weight of its own, modulo 2 ** 32."""
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    size = array.dtype.itemsize
    bits = lax.bitcast_convert_type(array, _UNSIGNED[min(size, 4)]).reshape(-1).astype(jnp.uint32)
    return jnp.sum(bits * (2 * lax.iota(jnp.uint32, bits.size) + 1), dtype=jnp.uint32)
