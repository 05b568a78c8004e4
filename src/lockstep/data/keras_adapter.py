"""The input of one call of ``fit``, ``evaluate`` or ``predict``: a data adapter for Keras's loop and for the step.

Keras's loop asks :class:`KerasInput` for an iterator and passes that to the step, which takes placed batches from it. Keras itself
reads at most the first batch, to learn shapes.
"""

import enum
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from lockstep._errors import InputError
from lockstep._keras import trainer
from lockstep.data.indexed_batches import IndexedBatches, UnreadBatchCounter, run_epoch_hook
from lockstep.data.input_bound import WaitMeter
from lockstep.data.random_state import capture_random_state, restore_random_state
from lockstep.data.resumable_iterator import (
    BatchCheck,
    EpochHook,
    InputState,
    IteratorState,
    PlaceBatch,
    ResumableIterator,
    read_on,
)
from lockstep.data.sources import DatasetSource, InputSource
from lockstep.devices.placement import is_rows


@dataclass(frozen=True)
class _Settings:
    """How batches are read; see :class:`KerasInput`."""

    place: PlaceBatch
    depth: int
    steps: float  # infinite: all batches
    report: Callable[[str], None]
    make_check: Callable[[], BatchCheck] | None
    argument: str


class _Tracking(enum.Enum):
    """Whether :meth:`KerasInput.get_state` will be called, for checkpoints."""

    OFF = enum.auto()
    ON = enum.auto()
    AWAITING_STATE = enum.auto()  # set_state follows when training begins; until then Keras reads only shapes.
    RESUMED = enum.auto()


@dataclass(frozen=True)
class _Resume:
    """What is left to do for a resumed run.

    Args:
        start: state of the pass that begins next, in an earlier process; None: it begins with its first batch.
        steps: number of steps of the current epoch that an earlier process has done.
        is_mid_pass: whether this process began in the middle of a pass that lasts several epochs.
    """

    start: IteratorState | None = None
    steps: int = 0
    is_mid_pass: bool = False


class KerasInput(trainer.DataAdapter):
    """Data adapter that Keras gets in place of the user's input.

    ``depth`` batches are placed ahead; an epoch has ``steps`` batches, or all of them. ``on_first_batch`` gets the first one on the host;
    messages name the ``argument`` of Keras's method.

    Attributes:
        source: reads the batches.
        meter: measures the waits for batches.
        rows: the largest number of rows of a batch that was read; None before.
        epoch_hooks: the hooks of the data at the beginning and end of epochs, in the order in which they ran; only if states are tracked.
    """

    def __init__(
        self,
        source: InputSource,
        place: PlaceBatch,
        depth: int,
        steps: int | None,
        report: Callable[[str], None],
        on_first_batch: Callable[[Any], None] | None = None,
        make_check: Callable[[], BatchCheck] | None = None,
        argument: str = "x",
    ) -> None:
        self.source, self._on_first_batch = source, on_first_batch
        self._settings = _Settings(place, depth, math.inf if steps is None else steps, report, make_check, argument)
        self._tracking, self._resume = _Tracking.OFF, _Resume()
        self._pass_number = 0  # of the current pass, from 1
        self._taken_before = 0  # batches that were taken in earlier passes
        self._pass: ResumableIterator | None = None
        self._keras_pass: ResumableIterator | None = None  # the pass that Keras has; it forwards to its successors
        self._resumed_pass: ResumableIterator | None = None  # the pass that Keras gets next
        self.meter = WaitMeter()
        self.rows: int | None = None
        self._taken_at_begin = 0  # batches that were taken before this epoch
        self.epoch_hooks: list[EpochHook] = []
        self._earlier_hooks: tuple[EpochHook, ...] = ()  # of the run that is resumed, as far as they were not repeated
        self._skips_hooks = False  # whether hooks that come before training begins have run in this process
        # Hooks of the data and batches before this call, in this process or in the one that is resumed.
        self._before = source.progress.hooks, source.progress.batches
        self._read_before = 0  # number of batches of the resumed call that this process has read before

    # What Keras calls.

    def get_jax_iterator(self, super_batch: int | None = None) -> ResumableIterator:
        """Begin a new pass; batches that the earlier one has not used are given back to the source.

        Args:
            super_batch: number of batches for Keras 3.16 to stack; a step of a strategy takes them one by one.
        """
        resumed, self._resumed_pass = self._resumed_pass, None
        self._keras_pass = resumed or self._begin_pass()
        if resumed and resumed.start:
            before = capture_random_state()
            resumed.seek()  # Now, as on_epoch_begin of a callback may have set the order of the epoch.
            # What has run in this epoch so far ran there before.
            restore_random_state(resumed.start.after if self._resume.steps else before)
            # The end of data of unknown length was not found before the checkpoint, and Keras cannot begin with an epoch without steps.
            if not self._resume.steps and self.source.restarts and resumed.peek() is None:
                self._keras_pass = self._begin_pass()
        return self._keras_pass

    @property
    def num_batches(self) -> int | None:
        """Number of batches, or None if it is not known.

        Keras begins a new pass after so many batches. A pass that was resumed in its middle has fewer; it reports no end to
        Keras and ends itself.
        """
        return sys.maxsize if self._resume.is_mid_pass else self.source.num_batches

    def on_epoch_begin(self) -> None:
        """Begin an epoch, which may use ``steps`` batches."""
        if self._tracking is _Tracking.AWAITING_STATE and self._earlier_hooks:
            self._repeat_first_hook()
        elif not self._ran_before_resume("begin", "end") and not self._skips_hooks:
            self._run_hook("begin")
        if self._pass:
            self._limit_pass(self._pass)
        self._taken_at_begin = self.total_taken

    def on_epoch_end(self) -> None:
        """End an epoch.

        Raises:
            InputError: it had no batch, as those of a generator were used up before: Keras would log results of no step.
        """
        has_ended = self._pass is not None and self._pass.has_ended  # else Keras has only looked at the first batch
        is_empty = self._taken_at_begin == self.total_taken and not self._resume.steps
        # As in Keras, a validation may have no batch at all.
        may_be_empty = self._settings.argument != "x" and self.source.restarts and not self.total_taken
        if has_ended and is_empty and not may_be_empty and self.source.num_batches is None:
            raise InputError(
                f"{self._settings.argument}: the {self.source.name} has no batch, or has been used up: a generator can be gone through once. "
                "Fix: make a new one, pass steps_per_epoch to share it among epochs, or write a keras.utils.PyDataset."
            )
        ran_before = self._ran_before_resume("end")
        self._resume = replace(self._resume, steps=0)
        if self._tracking is not _Tracking.AWAITING_STATE and not ran_before:
            self._run_hook("end")
        if self._resume.is_mid_pass and self._keras_pass and self.is_at_end:
            self._keras_pass.successor = self._begin_pass()

    # Properties of the input.

    @property
    def steps(self) -> int | None:
        """Number of steps of an epoch, or None if it is not known."""
        return self.source.num_batches if self._settings.steps == math.inf else int(self._settings.steps)

    @property
    def depth(self) -> int:
        """Number of batches that are placed ahead."""
        return self._settings.depth

    # Batches outside of the loop.

    def indexed_batches(self) -> IndexedBatches:
        """Return the batches by pass and number, for a process that reads only some; this object is not iterated then."""
        return IndexedBatches(self.source)

    def count_without_reading(self) -> None:
        """Count batches from now on without reading them, if the source can do so."""
        if isinstance(self.source, DatasetSource) and self.source.num_batches is not None:
            self.source = UnreadBatchCounter(self.source)

    def peek(self) -> Any:
        """Return the first batch, on the host; if it cannot be read again, it comes first in the next pass."""
        first = next(self.preview(), None)
        if self._pass:
            self._pass.close()
        return first

    def preview(self) -> Iterator[Any]:
        """Return the batches of a pass outside of an epoch, on the host. Data that only their hook at its beginning makes get that hook."""
        batches = self.get_jax_iterator()
        try:
            first = next(batches, None)
        except Exception:
            if not self.source.has_hooks:
                raise
            self._run_hook("begin")
            batches = self.get_jax_iterator()
            first = next(batches, None)
        return iter(()) if first is None else itertools.chain([first], batches)

    def first_rows(self) -> int | None:
        """Return the number of rows of the first batch; None if there is no batch. To be called in ``fit``, from the first step on.

        If Keras has not read the first batch, it is read now, as Keras would do it: the step still takes it.
        """
        if self.rows is None and self._keras_pass:
            self.rows = _count_rows(self._keras_pass.peek())
        return self.rows

    # Position.

    @property
    def last_taken(self) -> tuple[int, int]:
        """Number of the current pass, and number of its batch that was taken last."""
        return self._pass_number, (self._pass.position if self._pass else 0) - 1

    @property
    def total_taken(self) -> int:
        """Number of batches that were taken, in all passes."""
        return self._taken_before + (self._pass.position if self._pass else 0)

    def pass_metadata(self) -> dict[str, Any]:
        """Return what another process needs to read the batches of this pass: see :class:`IndexedBatches`."""
        return {
            "pass": self._pass_number,
            "at_begin": self._pass.at_begin if self._pass else {},
            "hooks": list(self.epoch_hooks),  # Those of the end of this epoch are not among them.
            "taken_before": self._taken_before,
            "order": self._pass.order if self._pass else None,
        }

    @property
    def is_mid_pass(self) -> bool:
        """Whether this process began in the middle of a pass that lasts several epochs."""
        return self._resume.is_mid_pass

    @property
    def is_at_end(self) -> bool:
        """Whether steps have taken all batches of the pass; False if their number is unknown."""
        return self._pass is not None and self._pass.position == self.source.num_batches

    @property
    def resumed(self) -> bool:
        """Whether training resumed from the state of another process."""
        return self._tracking is _Tracking.RESUMED

    @property
    def resumed_steps(self) -> int:
        """Number of steps of this epoch that another process has done."""
        return self._resume.steps

    def track_state(self, earlier: InputState | None) -> None:
        """Track the state from now on, for :meth:`get_state`; with ``earlier``, :meth:`set_state` will be called when training begins."""
        self._tracking = _Tracking.ON if earlier is None else _Tracking.AWAITING_STATE
        self.source.track_cache(earlier.cache if earlier else None)
        self._earlier_hooks = earlier.hooks if earlier else ()
        if earlier and earlier.before:
            self._skip_hooks(self.source.progress.hooks - earlier.before[0])
            self._read_before = self.source.progress.batches - earlier.before[1]
            self._before = earlier.before
        iterator = earlier.iterator if earlier else None
        spans_epochs = self._settings.steps < math.inf
        self._resume = replace(self._resume, is_mid_pass=iterator is not None and spans_epochs)
        if iterator and not self.source.restarts:
            restore_random_state(iterator.at_begin)  # Keras's first look is the beginning of the pass.

    def set_state(self, state: InputState, steps: int) -> None:
        """Resume from a state of :meth:`get_state` in another process, after ``steps`` steps of the epoch. If it is in a pass, the random state
        is then that of its last batch.
        """
        self._tracking, self._skips_hooks = _Tracking.RESUMED, False
        self._resume = replace(self._resume, start=state.iterator, steps=steps)
        self._repeat_hooks()
        self.epoch_hooks = list(state.hooks)
        if state.iterator:
            self._count(state.iterator.batches)
            if self._pass is None:
                restore_random_state(state.iterator.at_begin)
            self._resumed_pass = self._begin_pass(seeks=not self.source.restarts or not steps)
            restore_random_state(state.iterator.after)
        else:
            self.source.restore_order(state.order)

    def leave_as(self, state: InputState) -> None:
        """Leave the data as a finished call of ``fit`` has left them in another process; the random state changes.

        Batches that it has taken are read when the next pass over the same data begins, if there is one.
        """
        if state.iterator and not self.source.restarts:
            left = state.iterator.batches - self._read_before
            if left > 0:
                # Keras may have had a first look, which has drawn the first batch.
                at_begin = capture_random_state() if self._pass else state.iterator.at_begin
                self.source.progress.unread.append(replace(state.iterator, batches=left, at_begin=at_begin))
                self._count(state.iterator.batches)
        self._repeat_hooks()
        self.source.restore_order(state.order)

    def get_state(self, is_epoch_over: bool) -> InputState:
        """Return the state after the batch that was taken last; ``is_epoch_over``: all steps of the epoch are done."""
        order = self.source.order_state()
        iterator, hooks = self._pass_state(is_epoch_over), tuple(self.epoch_hooks)
        if self.source.has_hooks and self.source.progress.hooks - self._before[0] > len(hooks):
            self._settings.report(
                f"{self.source.name}: its hooks at the beginning and end of epochs also run for another use, in evaluate or as validation data. A run "
                "that is resumed repeats only those of one use, and may then read other batches. Fix: make an object of its own for each use"
            )
        return InputState(iterator, hooks, self.source.cache_state(), order, self._before)

    def state_between_calls(self) -> InputState:
        """Return the state between two calls of ``evaluate`` in ``fit``, each of which begins a new pass if the source restarts."""
        state = self.get_state(is_epoch_over=True)
        return replace(state, iterator=None) if self.source.restarts else state

    def random_before_reset(self) -> dict[str, Any] | None:
        """Return the random state before Keras's reset at the beginning of an evaluation, which has run the data's hook; None if they have none."""
        return self.epoch_hooks[-1][1] if self.source.has_hooks and self.epoch_hooks else None

    def _pass_state(self, is_epoch_over: bool) -> IteratorState | None:
        if self._pass is None:
            return None
        is_new_pass_next = self._settings.steps == math.inf or (self.source.restarts and self._pass.has_ended)
        if is_epoch_over and is_new_pass_next:
            return None
        found = self._pass.get_state()
        if found and not self.source.restarts:
            found = replace(found, batches=self.total_taken)
        if found is None or not is_epoch_over:
            return found
        # No batch is read ahead of an epoch's end, but the data's end hook may have drawn random numbers and changed the batches.
        return replace(found, after=capture_random_state(), digest=None if self.source.has_hooks else found.digest)

    def close(self, failed: bool = False) -> None:
        """End all work; if an exception is under way (``failed``), no thread is waited for."""
        if self._pass:
            self._pass.close(failed)
        self._count(self.total_taken)
        self.source.close()
        advice = self.meter.advice()
        if advice:
            self._settings.report(advice)

    def _begin_pass(self, seeks: bool = True) -> ResumableIterator:
        settings, before, start = self._settings, self._pass, self._resume.start
        self._read_unread()
        self._pass_number += 1
        if before:
            before.close()
            self._taken_before += before.position
        self._resume = replace(self._resume, start=None)
        self._pass = ResumableIterator(
            self.source,
            self._place,
            settings.depth,
            self.meter,
            settings.make_check() if settings.make_check else None,
            start,
            tracks_state=self._tracking is not _Tracking.OFF,
            read_before=0 if self.source.restarts else self._read_before,
        )
        if before and not self.source.restarts:
            self._pass.at_begin = before.at_begin  # Batches that were only read are still part of this pass.
        if start and seeks:
            self.source.set_limit(0)  # Hooks at the beginning of an epoch may follow.
            self._pass.seek()
        self._limit_pass(self._pass)
        return self._pass

    def _limit_pass(self, of_pass: ResumableIterator) -> None:
        """Have a pass read no batch that no step of this epoch takes: the user's code after its last batch may change what follows."""
        known = self.source.num_batches
        left = math.inf if known is None else max(0, known - of_pass.position)
        more = min(left, self._settings.steps - self._resume.steps)
        of_pass.set_limit(more)
        self.source.set_limit(of_pass.position + more)

    def _place(self, batch: Any) -> Any:
        self.rows = max(self.rows or 0, _count_rows(batch) or 0) or None
        on_first_batch, self._on_first_batch = self._on_first_batch, None
        if on_first_batch is not None:
            on_first_batch(batch)
        return self._settings.place(batch)

    def _run_hook(self, kind: str) -> None:
        if self._tracking is not _Tracking.OFF and self.source.has_hooks:
            self.epoch_hooks.append([kind, capture_random_state()])
        (self.source.begin_epoch if kind == "begin" else self.source.end_epoch)()
        self.source.progress.hooks += 1

    def _skip_hooks(self, count: int) -> None:
        """Leave out hooks of the run that is resumed that have run on these data in this process; if more have run, repeat all."""
        more = count - len(self._earlier_hooks)
        # Hooks that depend on the global generators alone set what they had set.
        if more > 0 and self.source.has_hooks:
            self._settings.report(
                f"{self.source.name}: its hooks at the beginning and end of epochs have run {more} times more in this process than before the "
                "checkpoint, so its batches may be other ones. Fix: make a new one"
            )
        elif count > 0:
            self._skips_hooks, self._earlier_hooks = True, self._earlier_hooks[count:]

    def _repeat_hooks(self) -> None:
        for hook in self._earlier_hooks:
            run_epoch_hook(self.source, hook)
        self.source.progress.hooks += len(self._earlier_hooks)
        self._earlier_hooks = ()

    def _count(self, taken: int) -> None:
        """Note how many batches were taken since ``self._before``."""
        progress = self.source.progress
        progress.batches = max(progress.batches, self._before[1] + taken)

    def _read_unread(self) -> None:
        """Read what finished runs of an earlier process have taken of these data; the random state is left as it is."""
        unread = self.source.progress.unread
        if not unread:
            return
        present = capture_random_state()
        while unread:
            state = unread.popleft()
            restore_random_state(state.at_begin)
            read_on(self.source, state, state.batches)
        restore_random_state(present)

    def _repeat_first_hook(self) -> None:
        """Begin the epoch in which Keras only reads shapes as the earlier process began its first one; set_state repeats the other hooks."""
        before = capture_random_state()
        first, *rest = self._earlier_hooks
        run_epoch_hook(self.source, first)
        self.source.progress.hooks += 1
        self._earlier_hooks = tuple(rest)
        restore_random_state(before)

    def _ran_before_resume(self, *kinds: str) -> bool:
        """Return whether an earlier process has run such a hook last in the resumed epoch; :meth:`set_state` has repeated it."""
        return bool(self._resume.steps and self.epoch_hooks and self.epoch_hooks[-1][0] in kinds)


def next_batch(iterator: Any, after: Any) -> Any:
    """Return the next batch for a step after the one with the result ``after``: placed ahead of it, or as a plain iterator yields it.

    Raises:
        StopIteration: there is none.
    """
    batches = trainer.unwrap_iterator(iterator)
    return batches.take(after) if isinstance(batches, ResumableIterator) else next(iterator)


def _count_rows(batch: Any) -> int | None:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch, is_leaf=is_rows)]
    return int(shapes[0][0]) if shapes and shapes[0] else None
