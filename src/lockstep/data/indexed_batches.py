"""Batches of an input by number, for a worker that reads some of them while others read the rest (parameter servers)."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from lockstep._errors import InputError
from lockstep.data.random_state import restore_random_state
from lockstep.data.resumable_iterator import EpochHook
from lockstep.data.sources import InputSource, WrappedSource


def run_epoch_hook(source: InputSource, hook: EpochHook) -> None:
    """Repeat a hook that another process ran at the beginning or end of an epoch, with the same random state."""
    kind, state = hook
    restore_random_state(state)
    (source.begin_epoch if kind == "begin" else source.end_epoch)()


class UnreadBatchCounter(WrappedSource):
    """Repeats the first batch of an input with a known number of batches, which can be read by number, for a process that only counts them while
    other processes read them.
    """

    can_seek = has_reader = True

    def __init__(self, source: InputSource) -> None:
        super().__init__(source)
        self._first: Any = None

    def batches(self) -> Iterator[Any]:
        read = self._source.batch_reader()  # Also draws the order, as in the other processes.
        if self._first is None and read is not None:
            self._first = read(0)
        return itertools.repeat(self._first, self.num_batches or 0)


class IndexedBatches:
    """Reads an input as another process does, and returns batches by number.

    If a batch cannot be read without those before it, all are read, and kept as long as they may still be requested.
    """

    def __init__(self, source: InputSource) -> None:
        self._source = source
        self._batches: Iterator[Any] | None = None
        self._read_batch: Callable[[int], Any] | None = None
        self._position = self._offset = self._hooks_done = self._pass = 0
        self._kept: dict[int, Any] = {}

    def begin(self, metadata: dict[str, Any]) -> None:
        """Begin a new pass, or an epoch within a pass that continues.

        Args:
            metadata: see :meth:`lockstep.data.keras_adapter.KerasInput.pass_metadata`: the number of the pass; the random state with
                which it began in the other process, and the state of its order; the data's hooks that ran there; and how many batches were taken
                before it.
        """
        self.run_hooks(metadata["hooks"])
        if self._batches is None or (self._source.restarts and metadata["pass"] != self._pass):
            self._pass = metadata["pass"]
            self._offset = self._position = 0
            self._kept.clear()
            # If the source does not restart, its first batch was read already, to learn shapes.
            if metadata["at_begin"] and self._source.restarts:
                restore_random_state(metadata["at_begin"])
                self._source.restore_order(metadata["order"])
            self._read_batch = self._source.batch_reader()
            self._batches = self._source.batches() if self._read_batch is None else iter(())
        if not self._source.restarts:
            self._offset = metadata["taken_before"]

    def run_hooks(self, hooks: list[EpochHook]) -> None:
        """Run those of all ``hooks`` of the data in a call that the other process has run and this one has not."""
        for hook in hooks[self._hooks_done :]:
            run_epoch_hook(self._source, hook)
        self._hooks_done = max(self._hooks_done, len(hooks))

    def batch(self, number: int, lowest: int) -> Any:
        """Return one batch of the pass, on the host; no number below ``lowest`` will be requested from now on.

        Raises:
            InputError: there is no such batch.
        """
        if self._read_batch is not None:
            try:
                return self._read_batch(number)
            except StopIteration:
                raise self._too_short(number) from None
        wanted, lowest = number + self._offset, lowest + self._offset
        for old in [kept for kept in self._kept if kept < lowest]:
            del self._kept[old]
        while self._position <= wanted:
            self._read(keep=self._position >= lowest)
        return self._kept[wanted]

    def read_up_to(self, taken: int) -> None:
        """Read until so many batches were read, if the input continues from pass to pass."""
        while not self._source.restarts and self._batches is not None and self._position < taken:
            self._read(keep=False)

    def follow(self, hooks: list[EpochHook], taken: int) -> None:
        """Bring the input to where that of the other process is at the end of a call; one that continues from pass to pass reads ``taken``
        batches.
        """
        self.run_hooks(hooks)
        if not self._source.restarts:
            self.begin({"hooks": [], "pass": 0, "at_begin": {}, "taken_before": 0})
            self.read_up_to(taken)

    def _read(self, keep: bool) -> None:
        batch = next(self._batches, None) if self._batches is not None else None
        if batch is None:
            raise self._too_short(self._position)
        if keep:
            self._kept[self._position] = batch
        self._position += 1

    def _too_short(self, number: int) -> InputError:
        return InputError(
            f"The {self._source.name} ends before batch {number} here (counted from 0), and not at the chief. Fix: give every "
            "process the same data."
        )
