"""Adding up what the replicas of all devices yield, one round after the other, in the order of the tree.

A device holds at most about log2(its replicas) partial sums at a time, as in counting with binary digits.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from lockstep.collectives.tree import PartialSum, tree_sum
from lockstep.data.device_placement import DEVICE_AXIS, Placement
from lockstep.devices.layout import Layout
from lockstep.execution.per_device import PerDevice, cut_array
from lockstep.execution.replica_schedule import reduction_schedule, replica_rounds

__all__ = ["TreeAdder"]

Values = list[jax.Array]  # of one device: one array for each variable, (1, …)


class TreeAdder:
    """Adds over rounds and devices.

    Args:
        layout: which replica runs where.
        placement: the devices.
    """

    def __init__(self, layout: Layout, placement: Placement) -> None:
        self.placement = placement
        self.rounds = replica_rounds(layout)
        self.merges, where = reduction_schedule(layout)
        self.slots = 1 + max(branch.slot for branch in where)
        self._over_devices = _over_devices(placement.mesh, tuple(where))

    def __call__(self, rounds: Iterable[list[PerDevice]]) -> list[jax.Array]:
        """The sum of each value, ``(…)``, on every device.

        Args:
            rounds: what each round yields, ``(1, …)`` on each device that had a replica; asked for the next when there is room.
        """
        local_places = self.placement.local_places
        stacks: dict[int, list[Values]] = {place: [] for place in local_places}
        for one, merges, values in zip(self.rounds, self.merges, rounds, strict=True):
            for place in set(one.places).intersection(local_places):
                own = [value[place] for value in values]
                for _ in range(merges[place]):
                    own = _pair(stacks[place].pop(), own)
                stacks[place].append(own)
        if not any(stacks.values()):  # This process has had no replica; it brings what nobody reads.
            stacks[local_places[0]].append([value[local_places[0]] for value in values])
        slots = {p: _in_slots([*own, *[own[-1]] * (self.slots - len(own))]) for p, own in stacks.items() if own}
        places, count = range(len(self.placement.devices)), len(next(iter(slots.values())))
        parts = [PerDevice(slots[place][i] if place in slots else None for place in places) for i in range(count)]
        return self._over_devices([cut_array(part, self.placement) for part in parts])


@jax.jit
def _pair(left: Values, right: Values) -> Values:
    return [a + b for a, b in zip(left, right, strict=True)]


@jax.jit
def _joined(stack: list[Values]) -> Values:
    return [jnp.concatenate(slots) for slots in zip(*stack, strict=True)]


def _in_slots(stack: list[Values]) -> Values:
    return stack[0] if len(stack) == 1 else _joined(stack)


@lru_cache
def _over_devices(mesh: Mesh, where: tuple[PartialSum, ...]) -> Any:
    """Only moves bytes and adds pairs: no compiler can make other bits of it."""
    cut, whole = PartitionSpec(DEVICE_AXIS), PartitionSpec()
    add = jax.shard_map(
        lambda stack: tree_sum(stack, where, DEVICE_AXIS), mesh=mesh, in_specs=cut, out_specs=whole, check_vma=False
    )
    return jax.jit(add)
