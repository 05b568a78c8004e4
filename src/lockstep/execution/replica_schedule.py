"""Which replica each device runs when, where replicas run one by one: arithmetic only.

In a round each device runs one replica, or none. Replicas with different numbers of rows have different programs, and so
different rounds.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from lockstep.collectives.tree import PartialSum, branches
from lockstep.devices.layout import Layout

__all__ = ["ReplicaRound", "reduction_schedule", "replica_rounds"]


@dataclass(frozen=True)
class ReplicaRound:
    """One program on several devices: ``replicas[d]`` is what device d runs, or None."""

    rows: int
    replicas: tuple[int | None, ...]

    @property
    def places(self) -> list[int]:
        """The devices that run a replica."""
        return [place for place, replica in enumerate(self.replicas) if replica is not None]

    def numbers(self, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each device its replica, and that replica's first row on the device and in the global batch."""
        sizes = [rows for device in layout.per_device for rows in device]
        starts = list(accumulate(sizes, initial=0))
        on_device = list(accumulate(layout.device_rows, initial=0))
        replica = [chosen or 0 for chosen in self.replicas]
        first = [0 if chosen is None else starts[chosen] for chosen in self.replicas]
        local = [0 if chosen is None else starts[chosen] - on_device[d] for d, chosen in enumerate(self.replicas)]
        return np.asarray(replica, "int32"), np.asarray(local, "int32"), np.asarray(first, "int32")


def replica_rounds(layout: Layout) -> list[ReplicaRound]:
    """The rounds of one batch; on each device the replicas come in their order."""
    rounds = []
    for size in sorted(set(layout.busy_replicas), reverse=True):
        waiting = [
            [layout.first_replica[device] + i for i, rows in enumerate(own) if rows == size]
            for device, own in enumerate(layout.per_device)
        ]
        for turn in range(max(map(len, waiting))):
            rounds.append(ReplicaRound(size, tuple(own[turn] if turn < len(own) else None for own in waiting)))
    return rounds


def reduction_schedule(layout: Layout) -> tuple[list[list[int]], list[PartialSum]]:
    """Adding up replicas as they come, in the order of the tree, in as few partial sums as the tree allows.

    A device keeps its partial sums on a stack. What a round yields is added to as many of them as the number says, from
    the top, and put there.

    Returns:
        For each round and device that number; where the branches lie at the end: on which device, how high in its stack.
    """
    replicas = len(layout.busy_replicas)
    stacks: list[list[tuple[int, int]]] = [[] for _ in range(layout.devices)]
    merges = [
        [
            0 if replica is None else _push(stacks[place], replica, replicas)
            for place, replica in enumerate(one.replicas)
        ]
        for one in replica_rounds(layout)
    ]
    where = [
        PartialSum(*piece, device, slot) for device, stack in enumerate(stacks) for slot, piece in enumerate(stack)
    ]
    return merges, where


def _push(stack: list[tuple[int, int]], replica: int, replicas: int) -> int:
    piece, merges = (replica, replica + 1), 0
    while stack and branches(stack[-1][0], piece[1], replicas) == [(stack[-1][0], piece[1])]:
        piece = (stack.pop()[0], piece[1])
        merges += 1
    stack.append(piece)
    return merges
