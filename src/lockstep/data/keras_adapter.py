"""The input of one call of ``fit``, ``evaluate`` or ``predict``, as Keras's loop and the step see it.

Keras takes an :class:`KerasInput` for a data adapter of its own kind. Its loop asks it for an iterator and hands that on to the
step, which takes placed batches from it; Keras itself looks at no more than the first batch, to learn shapes.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from lockstep._keras import adapters
from lockstep.data.device_placement import PlacedRows
from lockstep.data.indexed_batches import IndexedBatches, UnreadBatchCounter
from lockstep.data.iterator_state import IteratorState, capture_random_state, restore_random_state
from lockstep.data.pass_iterator import BatchCheck, PassIterator, Place
from lockstep.data.sources import DatasetSource, InputSource
from lockstep.data.wait_meter import WaitMeter

__all__ = ["Hook", "KerasInput", "next_batch"]

Hook = list[Any]  # "begin" or "end" of an epoch, and the random state then; where the source has code for these


class KerasInput(adapters.DataAdapter):
    """What Keras gets in place of the user's input.

    Args:
        source: where the batches come from.
        place: puts a batch on the devices.
        depth: number of batches that are placed ahead.
        steps: number of batches of an epoch, or None for all of them.
        report: is given a sentence where something could be done better.
        look: is shown the first batch on the host.
        new_check: gives what looks at the batches of a pass; None: nobody does.

    Attributes:
        meter: measures the waits for batches.
        resumed: whether training goes on where another process stood.
    """

    def __init__(
        self,
        source: InputSource,
        place: Place,
        depth: int,
        steps: int | None,
        report: Callable[[str], None],
        look: Callable[[Any], None] | None = None,
        new_check: Callable[[], BatchCheck] | None = None,
    ) -> None:
        self._source, self._place, self._depth = source, place, depth
        self._steps = math.inf if steps is None else steps
        self._report, self._look, self._new_check = report, look, new_check
        self._start: IteratorState | None = None
        self._done, self._is_kept = 0, False
        self._is_expecting = self.resumed = False
        self.epoch_hooks: list[Hook] = []
        self.meter = WaitMeter()
        self._epoch: PassIterator | None = None
        self._passes = self._taken_before = 0
        self._handed_out: PassIterator | None = None  # the pass that Keras has
        self._is_resumed_mid_pass = False  # whether this process began in the middle of a pass of several epochs
        self._within = False
        self.rows: int | None = None  # of the first batch that was taken

    def get_jax_iterator(self) -> PassIterator:
        """A new pass; what an earlier one has left goes back to the source."""
        self._handed_out = self._new_pass()
        return self._handed_out

    def _new_pass(self) -> PassIterator:
        if self._epoch:
            self._epoch.close()
            self._taken_before += self._epoch.position
        self._passes += 1
        before, start, self._start = self._epoch, self._start, None
        self._epoch = PassIterator(
            self._source,
            self._placed,
            self._depth,
            self.meter,
            self._new_check() if self._new_check else None,
            start,
            is_kept=self._is_kept,
        )
        if before and not self._source.restarts:
            self._epoch.at_begin = before.at_begin  # What was looked at is still part of this pass.
        if start:
            self._epoch.seek()  # Now, as the random state is that of the checkpoint from here on.
        self._epoch.allow(self._steps - self._done)
        return self._epoch

    @property
    def name(self) -> str:
        """What it is, for messages."""
        return self._source.name

    @property
    def steps(self) -> int | None:
        """Number of steps of an epoch, where it is known."""
        return self._source.num_batches if self._steps == math.inf else int(self._steps)

    @property
    def restarts(self) -> bool:
        """Whether a new pass begins with the first batch again."""
        return self._source.restarts

    @property
    def depth(self) -> int:
        """Number of batches that are placed ahead."""
        return self._depth

    def indexed_batches(self) -> IndexedBatches:
        """The batches by pass and number, for a process that takes some of them; this object gives none then."""
        return IndexedBatches(self._source)

    def count_without_reading(self) -> None:
        """Count batches from now on, where they need not be read for that."""
        if isinstance(self._source, DatasetSource) and self._source.num_batches is not None:
            self._source = UnreadBatchCounter(self._source)

    def peek(self) -> Any:
        """The first batch, on the host; where it cannot be read again, it comes first in the next pass."""
        first = next(self.get_jax_iterator(), None)
        if self._epoch:
            self._epoch.close()
        return first

    def first_rows(self) -> int | None:
        """Rows of the first batch; None where there is none. Asked for in ``fit``, from the begin of the first step on.

        Where Keras has not looked at it, it is looked at now, as Keras would: the step still takes it.
        """
        if self.rows is None and self._handed_out:
            self.rows = _rows_of(next(self._handed_out, None))
        return self.rows

    @property
    def last_taken(self) -> tuple[int, int]:
        """Number of the pass, and in it that of the batch, which was taken last."""
        return self._passes, (self._epoch.position if self._epoch else 0) - 1

    @property
    def total_taken(self) -> int:
        """Number of batches that were taken, in all passes."""
        return self._taken_before + (self._epoch.position if self._epoch else 0)

    def pass_metadata(self) -> dict[str, Any]:
        """What another process needs to know of the pass, to read the same batches: see :class:`IndexedBatches`."""
        begun_with = self._epoch.at_begin if self._epoch else {}
        return {
            "pass": self._passes,
            "at_begin": begun_with,
            "hooks": self.epoch_hooks,
            "taken_before": self._taken_before,
        }

    @property
    def resumed_steps(self) -> int:
        """Number of steps of this epoch that another process has done."""
        return self._done

    @property
    def can_seek(self) -> bool:
        """Whether a pass can begin in the middle, without reading what comes before."""
        return self._source.can_seek

    def track_position(self, earlier: IteratorState | None, is_expecting: bool) -> None:
        """From now on :meth:`get_state` will be asked.

        Args:
            earlier: where another process stood.
            is_expecting: :meth:`set_state` will follow when training begins. Until then Keras looks at shapes only.
        """
        self._is_kept, self._is_expecting = True, is_expecting
        self._is_resumed_mid_pass = bool(earlier and self._steps < math.inf and self._source.num_batches)
        if earlier and not self._source.restarts:
            restore_random_state(earlier.at_begin)  # The first look is the begin of the pass.

    def set_state(self, position: IteratorState | None, steps: int, hooks: list[Hook]) -> None:
        """Begin where another process stood.

        Args:
            position: in the pass; None: a new pass begins.
            steps: number of steps of the epoch that are done.
            hooks: what :attr:`hooks` was there.
        """
        self._start, self._done, self._is_expecting, self.resumed = position, steps, False, True
        for kind, state in hooks:
            restore_random_state(state)
            (self._source.begin_epoch if kind == "begin" else self._source.end_epoch)()
        self.epoch_hooks = list(hooks)

    def get_state(self, is_epoch_over: bool) -> IteratorState | None:
        """Where the pass stands; None where a new one begins next.

        Args:
            is_epoch_over: whether all steps of the epoch are done.
        """
        if self._epoch is None or (is_epoch_over and self._steps == math.inf):
            return None
        found = self._epoch.get_state()
        if found is None or not is_epoch_over:
            return found
        # Nothing is read ahead of an epoch's end, but the data's own code may have drawn numbers there, and changed the batches.
        return replace(found, after=capture_random_state(), digest=None if self._source.has_hooks else found.digest)

    def _placed(self, batch: Any) -> Any:
        self.rows = self.rows or _rows_of(batch)
        if self._look is not None:
            look, self._look = self._look, None
            look(batch)
        return self._place(batch)

    @property
    def num_batches(self) -> int | None:
        """Number of batches, where it is known.

        Keras begins a new pass when it has counted so many, and of one that goes on it has not seen the beginning. That one has
        no end for Keras: it ends by itself.
        """
        return sys.maxsize if self._is_resumed_mid_pass else self._source.num_batches

    @property
    def batch_size(self) -> None:
        """Not needed by Keras's loop."""
        return

    def on_epoch_begin(self) -> None:
        """Keras says that an epoch begins: it may use ``steps`` batches."""
        self._within = True
        if not self._was_done("begin", "end"):
            self._note_hook("begin")
            self._source.begin_epoch()
        if self._epoch:
            self._epoch.allow(self._steps - self._done)

    def on_epoch_end(self) -> None:
        """Keras says that an epoch has ended."""
        was_done = self._was_done("end")
        self._within, self._done = False, 0
        if not (self._is_expecting or was_done):
            self._note_hook("end")
            self._source.end_epoch()
        if (
            self._is_resumed_mid_pass
            and self._handed_out
            and self._epoch
            and self._epoch.position == self._source.num_batches
        ):
            self._handed_out.successor = self._new_pass()

    def _was_done(self, *kinds: str) -> bool:
        """Whether an earlier process has come so far in the epoch that goes on; it was done again in :meth:`set_state`."""
        return bool(self._done and self.epoch_hooks and self.epoch_hooks[-1][0] in kinds)

    def _note_hook(self, kind: str) -> None:
        if self._is_kept and self._source.has_hooks:
            self.epoch_hooks.append([kind, capture_random_state()])

    def close(self, failed: bool = False) -> None:
        """End all work.

        Args:
            failed: an exception is under way, so wait for nobody.
        """
        if self._epoch:
            self._epoch.close(failed)
        if self._within:  # Keras does not say so where a callback ends the training within an epoch.
            self.on_epoch_end()
        self._source.close()
        sentence = self.meter.sentence()
        if sentence:
            self._report(sentence)


def _rows_of(batch: Any) -> int | None:
    leaves = jax.tree.leaves(batch, is_leaf=lambda leaf: isinstance(leaf, PlacedRows))
    shapes = [leaf.shape if isinstance(leaf, PlacedRows) else np.shape(leaf) for leaf in leaves]
    return int(shapes[0][0]) if shapes and shapes[0] else None


def next_batch(iterator: Any, after: Any) -> Any:
    """The next batch for a step: placed ahead of it, or as a plain iterator yields it.

    Args:
        iterator: what Keras gave to the function that runs the step.
        after: what the last step gave, or None.

    Raises:
        StopIteration: there is none.
    """
    own = adapters.unwrap_iterator(iterator)
    return own.take(after) if isinstance(own, PassIterator) else next(iterator)
