"""Layout of a global batch: which rows belong to which replica, and which device runs the replica. Arithmetic only.

Replicas determine the results, devices only the speed. The split is that of ``tf.distribute``: contiguous chunks of
``ceil(rows / replicas)`` rows, so the last replicas may hold fewer rows or none.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np


def rows_of_replicas(rows: int, replicas: int) -> tuple[int, ...]:
    """Return the number of rows of each replica: 7 rows on 2 replicas are (4, 3), 6 rows on 4 are (2, 2, 2, 0)."""
    chunk = -(-rows // replicas)
    return tuple(min(chunk, max(0, rows - replica * chunk)) for replica in range(replicas))


@dataclass(frozen=True)
class BatchLayout:
    """One global batch of ``rows`` rows on ``replicas`` replicas over ``devices`` devices."""

    rows: int
    replicas: int
    devices: int

    @cached_property
    def per_device(self) -> tuple[tuple[int, ...], ...]:
        """For each device the rows of each of its replicas; neighbouring replicas share a device."""
        rows = rows_of_replicas(self.rows, self.replicas)
        bounds = [device * self.replicas // self.devices for device in range(self.devices + 1)]
        return tuple(rows[start:stop] for start, stop in pairwise(bounds))

    @cached_property
    def device_rows(self) -> tuple[int, ...]:
        """Number of rows that each device holds."""
        return tuple(sum(rows) for rows in self.per_device)

    @cached_property
    def first_replica(self) -> tuple[int, ...]:
        """Index of the first replica of each device."""
        return tuple(accumulate((len(rows) for rows in self.per_device[:-1]), initial=0))

    @property
    def capacity(self) -> int:
        """Rows of each device's shard, padding included: arrays on several devices are sharded into equal parts."""
        return max(self.device_rows)

    @property
    def busy_replicas(self) -> tuple[int, ...]:
        """Number of rows of each replica that has rows."""
        return tuple(rows for device in self.per_device for rows in device if rows)

    @property
    def is_full(self) -> bool:
        """Whether no shard has padding, so that the rows need not be reordered to be placed."""
        return self.capacity * self.devices == self.rows

    @property
    def has_trailing_padding(self) -> bool:
        """Whether all padding comes after the last row, as always if the devices divide the replicas: a slice drops it."""
        filled = (
            min(self.capacity, max(0, self.rows - start))
            for start in range(0, self.devices * self.capacity, self.capacity)
        )
        return self.device_rows == tuple(filled)

    @property
    def is_sharded_like_rows(self) -> bool:
        """Whether each device holds the rows that it would get if XLA sharded the rows: ``ceil(rows / devices)``, while there are any."""
        return self.has_trailing_padding and self.capacity == -(-self.rows // self.devices)

    def row_index(self) -> np.ndarray:
        """Return the row at each place of the shards, shape ``(devices * capacity,)``.

        Padding repeats the last row of its device, or of the batch: its result is not read, but the arithmetic on it is as safe as that
        on this row. A normalization would make large numbers of zeros, or of rows that are not in its statistics.
        """
        bounds = accumulate(self.device_rows, initial=0)
        return np.concatenate(
            [np.minimum(np.arange(start, start + self.capacity), max(stop - 1, 0)) for start, stop in pairwise(bounds)]
        )
