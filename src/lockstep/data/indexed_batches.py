"""Batches of an input by their numbers, for a process that takes some of them, while others take the rest."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from lockstep._errors import InputError
from lockstep.data.iterator_state import restore_random_state
from lockstep.data.sources import InputSource

__all__ = ["IndexedBatches", "UnreadBatchCounter"]


class UnreadBatchCounter(InputSource):
    """An input of which this process counts the batches, while others read them: each is the first one.

    Args:
        source: the input, of a known number of batches that can be had by their numbers.
    """

    can_seek = True

    def __init__(self, source: InputSource) -> None:
        super().__init__(source.name)
        self._source, self.has_hooks = source, source.has_hooks
        self._first: Any = None

    @property
    def num_batches(self) -> int | None:
        """See :class:`InputSource`."""
        return self._source.num_batches

    def batches(self) -> Iterator[Any]:
        """See :class:`InputSource`."""
        pick = self._source.picker()  # Draws the order, as elsewhere.
        if self._first is None and pick is not None:
            self._first = pick(0)
        return itertools.repeat(self._first, self.num_batches or 0)

    def begin_epoch(self) -> None:
        """See :class:`InputSource`."""
        self._source.begin_epoch()

    def end_epoch(self) -> None:
        """See :class:`InputSource`."""
        self._source.end_epoch()

    def close(self) -> None:
        """See :class:`InputSource`."""
        self._source.close()


class IndexedBatches:
    """Reads an input as another process does, and gives the batches that are asked for.

    Where a batch cannot be read without those before it, all are read, and kept as long as they may still be asked for.

    Args:
        source: the input.
    """

    def __init__(self, source: InputSource) -> None:
        self._source = source
        self._batches: Iterator[Any] | None = None
        self._pick: Callable[[int], Any] | None = None
        self._position = self._offset = self._hooks_done = self._pass = 0
        self._kept: dict[int, Any] = {}

    def begin(self, facts: dict[str, Any]) -> None:
        """A new pass begins, or an epoch within one that goes on.

        Args:
            facts: the number of the pass; the random state with which it began elsewhere; what the data's own code did where epochs
                began and ended, with its random states; and how many batches were taken before it.
        """
        self.catch_up(facts["hooks"])
        if self._batches is None or (self._source.restarts and facts["pass"] != self._pass):
            self._pass = facts["pass"]
            self._offset = self._position = 0
            self._kept.clear()
            # Of what does not restart, the first batch was read already, to see shapes.
            if facts["at_begin"] and self._source.restarts:
                restore_random_state(facts["at_begin"])
            self._pick = self._source.picker()
            self._batches = self._source.batches() if self._pick is None else iter(())
        if not self._source.restarts:
            self._offset = facts["taken_before"]

    def catch_up(self, hooks: list[Any]) -> None:
        """Do what the data's own code did elsewhere where epochs began and ended, and what was not done here yet.

        Args:
            hooks: all of the call, each with its random state: see :attr:`lockstep.data.keras_adapter.KerasInput.epoch_hooks`.
        """
        for kind, state in hooks[self._hooks_done :]:
            restore_random_state(state)
            (self._source.begin_epoch if kind == "begin" else self._source.end_epoch)()
        self._hooks_done = max(self._hooks_done, len(hooks))

    def batch(self, number: int, lowest: int) -> Any:
        """One batch of the pass, on the host.

        Args:
            number: of the batch.
            lowest: no smaller one will be asked for any more.

        Raises:
            InputError: there is no such batch.
        """
        if self._pick is not None:
            try:
                return self._pick(number)
            except StopIteration:
                raise self._too_short(number) from None
        wanted, lowest = number + self._offset, lowest + self._offset
        for old in [kept for kept in self._kept if kept < lowest]:
            del self._kept[old]
        while self._position <= wanted:
            self._read(keep=self._position >= lowest)
        return self._kept[wanted]

    def read_up_to(self, taken: int) -> None:
        """Read until so many batches were read of an input that goes on from pass to pass."""
        while not self._source.restarts and self._batches is not None and self._position < taken:
            self._read(keep=False)

    def _read(self, keep: bool) -> None:
        batch = next(self._batches, None) if self._batches is not None else None
        if batch is None:
            raise self._too_short(self._position)
        if keep:
            self._kept[self._position] = batch
        self._position += 1

    def _too_short(self, batches: int) -> InputError:
        return InputError(
            f"The {self._source.name} has {batches} batches here, and more at the chief. Every process must read the same data in the "
            "same order: give shuffling a seed."
        )
