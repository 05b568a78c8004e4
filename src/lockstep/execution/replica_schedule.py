"""Schedule of replicas that run one by one, and the sum of their results in the order of a fixed tree.

In a round each device runs one replica, or none. Replicas with different numbers of rows have different programs, and so
different rounds. A device keeps at most about log2(its replicas) partial sums at a time, like a binary counter.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from lockstep.collectives.tree import PartialSum, branches, tree_sum
from lockstep.data.device_placement import DEVICE_AXIS, Placement
from lockstep.devices.batch_split import Layout
from lockstep.execution.per_device import PerDevice, sharded_array

__all__ = ["ReplicaRound", "TreeAdder", "reduction_schedule", "replica_rounds"]


@dataclass(frozen=True)
class ReplicaRound:
    """One program on several devices: ``replicas[d]`` is the replica that device d runs, or None."""

    rows: int
    replicas: tuple[int | None, ...]

    @property
    def places(self) -> list[int]:
        """The devices that run a replica."""
        return [place for place, replica in enumerate(self.replicas) if replica is not None]

    def offsets(self, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for each device its replica, and that replica's first row on the device and in the global batch."""
        sizes = [rows for device in layout.per_device for rows in device]
        starts = list(accumulate(sizes, initial=0))
        on_device = list(accumulate(layout.device_rows, initial=0))
        replica = [chosen or 0 for chosen in self.replicas]
        first = [0 if chosen is None else starts[chosen] for chosen in self.replicas]
        local = [0 if chosen is None else starts[chosen] - on_device[d] for d, chosen in enumerate(self.replicas)]
        return np.asarray(replica, "int32"), np.asarray(local, "int32"), np.asarray(first, "int32")


def replica_rounds(layout: Layout) -> list[ReplicaRound]:
    """Return the rounds of one batch; each device runs its replicas of one size in their order."""
    rounds = []
    for size in sorted(set(layout.busy_replicas), reverse=True):
        queues = [
            [layout.first_replica[device] + i for i, rows in enumerate(own) if rows == size]
            for device, own in enumerate(layout.per_device)
        ]
        for turn in range(max(map(len, queues))):
            rounds.append(ReplicaRound(size, tuple(own[turn] if turn < len(own) else None for own in queues)))
    return rounds


def reduction_schedule(layout: Layout) -> tuple[list[list[int]], list[PartialSum]]:
    """Return the order in which results of rounds are added: that of the tree, with as few partial sums as possible.

    A device keeps its partial sums on a stack. The result of a round is added to a number of them, from the top, and pushed.

    Returns:
        For each round and device that number; and the partial sums that remain: the device and the position in its stack.
    """
    replicas = len(layout.busy_replicas)
    stacks: list[list[tuple[int, int]]] = [[] for _ in range(layout.devices)]
    additions = [
        [
            0 if replica is None else _push(stacks[place], replica, replicas)
            for place, replica in enumerate(one.replicas)
        ]
        for one in replica_rounds(layout)
    ]
    remaining = [
        PartialSum(*interval, device, slot)
        for device, stack in enumerate(stacks)
        for slot, interval in enumerate(stack)
    ]
    return additions, remaining


def _push(stack: list[tuple[int, int]], replica: int, replicas: int) -> int:
    """Push the interval of one replica, merged with those below it that form a branch; return their number."""
    interval, count = (replica, replica + 1), 0
    while stack and branches(stack[-1][0], interval[1], replicas) == [(stack[-1][0], interval[1])]:
        interval = (stack.pop()[0], interval[1])
        count += 1
    stack.append(interval)
    return count


# --- the sum ----------------------------------------------------------------------------------------------------------

Values = list[jax.Array]  # of one device: one array for each variable, (1, …)


class TreeAdder:
    """Adds results of replicas over rounds and devices, in the order of the tree.

    Args:
        layout: which replica runs on which device.
        placement: the devices.
    """

    def __init__(self, layout: Layout, placement: Placement) -> None:
        self.placement = placement
        self.rounds = replica_rounds(layout)
        self.additions, remaining = reduction_schedule(layout)
        self.slots = 1 + max(branch.slot for branch in remaining)
        self._over_devices = _over_devices(placement.mesh, tuple(remaining))

    def __call__(self, rounds: Iterable[list[PerDevice]]) -> list[jax.Array]:
        """Return the sum of each value, ``(…)``, on every device.

        Args:
            rounds: results of each round, ``(1, …)`` on each device that had a replica; read one by one, to save memory.
        """
        local_indices = self.placement.local_indices
        stacks: dict[int, list[Values]] = {place: [] for place in local_indices}
        for one, additions, values in zip(self.rounds, self.additions, rounds, strict=True):
            for place in set(one.places).intersection(local_indices):
                own = [value[place] for value in values]
                for _ in range(additions[place]):
                    own = _pair(stacks[place].pop(), own)
                stacks[place].append(own)
        if not any(stacks.values()):  # This process had no replica; its values give the shapes and are not read.
            stacks[local_indices[0]].append([value[local_indices[0]] for value in values])
        slots = {p: _in_slots([*own, *[own[-1]] * (self.slots - len(own))]) for p, own in stacks.items() if own}
        places, count = range(len(self.placement.devices)), len(next(iter(slots.values())))
        parts = [PerDevice(slots[place][i] if place in slots else None for place in places) for i in range(count)]
        return self._over_devices([sharded_array(part, self.placement) for part in parts])


@jax.jit
def _pair(left: Values, right: Values) -> Values:
    return [a + b for a, b in zip(left, right, strict=True)]


@jax.jit
def _joined(stack: list[Values]) -> Values:
    return [jnp.concatenate(slots) for slots in zip(*stack, strict=True)]


def _in_slots(stack: list[Values]) -> Values:
    return stack[0] if len(stack) == 1 else _joined(stack)


@lru_cache
def _over_devices(mesh: Mesh, partial_sums: tuple[PartialSum, ...]) -> Any:
    """Return a program that only moves bytes and adds pairs, whose bits no compiler pass can change."""
    cut, whole = PartitionSpec(DEVICE_AXIS), PartitionSpec()
    add = jax.shard_map(
        lambda stack: tree_sum(stack, partial_sums, DEVICE_AXIS),
        mesh=mesh,
        in_specs=cut,
        out_specs=whole,
        check_vma=False,
    )
    return jax.jit(add)
