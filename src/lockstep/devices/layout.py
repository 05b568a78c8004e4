"""Which rows of a global batch belong to which replica, and which device runs it: arithmetic only.

Replicas decide the numbers, devices only the time. The split is that of ``tf.distribute``: contiguous chunks of
``ceil(rows / replicas)`` rows, so the last replicas may hold fewer rows or none.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

__all__ = ["Layout", "rows_of_replicas"]


def rows_of_replicas(rows: int, replicas: int) -> tuple[int, ...]:
    """Number of rows of each replica: 7 rows on 2 replicas are (4, 3), 6 rows on 4 are (2, 2, 2, 0)."""
    chunk = -(-rows // replicas)
    return tuple(min(chunk, max(0, rows - replica * chunk)) for replica in range(replicas))


@dataclass(frozen=True)
class Layout:
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
        """Rows that every device has room for: arrays on several devices are cut into equal pieces."""
        return max(self.device_rows)

    @property
    def busy_replicas(self) -> tuple[int, ...]:
        """Rows of each replica that has some."""
        return tuple(rows for device in self.per_device for rows in device if rows)

    @property
    def is_full(self) -> bool:
        """True where no device has a free place, so that the rows need not be moved to be placed."""
        return self.capacity * self.devices == self.rows

    def row_index(self) -> np.ndarray:
        """The row at each place of the devices, shape ``(devices * capacity,)``.

        A free place repeats a row of the batch: nothing reads the result, but the arithmetic done on it meanwhile is
        as safe as that on real rows (zeros could turn a normalization into NaN).
        """
        starts = accumulate(self.device_rows[:-1], initial=0)
        return np.concatenate([(start + np.arange(self.capacity)) % self.rows for start in starts])
