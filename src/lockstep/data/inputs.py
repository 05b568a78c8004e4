"""The input of one call of ``fit``, ``evaluate`` or ``predict``, as Keras's loop and the step see it.

Keras takes an :class:`Input` for a data adapter of its own kind. Its loop asks it for an iterator and hands that on to the
step, which takes placed batches from it; Keras itself looks at no more than the first batch, to learn shapes.
"""

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lockstep import _keras
from lockstep.data.advice import Meter
from lockstep.data.feed import Direct, Feed, Reader
from lockstep.data.placement import Rows
from lockstep.data.position import Position, digest_of_batch, refuse_other_batch
from lockstep.data.random_state import captured_random_state, restore_random_state
from lockstep.data.sources import Source

__all__ = ["Check", "Epoch", "Input", "next_batch"]

Place = Callable[[Any], Any]
Check = Callable[[int, Any], None]  # given the number of a batch and the batch on the host; None at the end


@dataclass(frozen=True)
class _Read:
    placed: Any
    host: Any  # None where nobody will ask for it
    after: dict[str, Any] | None = None  # the random state after it was read, where a thread reads ahead


class Epoch:
    """Iterator over the batches of one pass, which may last several epochs where those have a number of steps.

    ``next`` looks at the next batch on the host, and what was looked at is not taken yet; :meth:`take` takes a placed one.

    Args:
        source: where the batches come from.
        place: puts a batch on the devices.
        depth: number of batches that are placed ahead; 0 for none.
        meter: measures the waits.
        check: looks at each batch before it is placed.
        start: where an earlier process stood in this pass.
        is_kept: whether :meth:`where` will be asked.
    """

    def __init__(
        self,
        source: Source,
        place: Place,
        depth: int,
        meter: Meter,
        check: Check | None = None,
        start: Position | None = None,
        is_kept: bool = False,
    ) -> None:
        self._source, self._place, self._depth, self._meter = source, place, depth, meter
        self._check, self._start, self._is_kept = check, start, is_kept
        self._number = start.batches if start else 0
        self.at_begin: dict[str, Any] = {}  # the random state
        self._last: _Read | None = None
        self._batches: Iterator[Any] | None = None
        self._looked: deque[Any] = deque()
        self._allowance: float | None = None
        self._running: deque[Any] = deque()
        self._closed = False
        self._reader: Reader = (
            Feed(self._read, self._finish, depth, source.name) if depth else Direct(self._read, self._finish)
        )

    def __iter__(self) -> "Epoch":
        return self

    def __next__(self) -> Any:
        batch = self._next()
        self._looked.append(batch)
        return batch

    @property
    def position(self) -> int:
        """Number of batches of this pass that steps have taken: the number of the next one."""
        return self._reader.taken + (self._start.batches if self._start else 0)

    @property
    def has_begun(self) -> bool:
        """Whether a step has taken a batch from here."""
        return self._reader.taken > 0

    def where(self) -> Position | None:
        """Where the pass stands; None before its first batch was taken."""
        if self._last is None:
            return self._start
        after = self._last.after or captured_random_state()
        return Position(self.position, self.at_begin, after, digest_of_batch(self._last.host))

    def allow(self, batches: float) -> None:
        """Let ``batches`` more batches be read than were taken, from the next :meth:`take` on."""
        self._allowance = batches

    def take(self, after: Any) -> Any:
        """The next batch, on the devices.

        Args:
            after: what the last step gave. No more than the steps of ``depth + 1`` batches are ever under way, so that
                memory is bounded where steps are started faster than they run.
        """
        if self._allowance is not None:
            self._reader.allow(self._allowance)
            self._allowance = None
        self._running.append(after)
        if len(self._running) > max(self._depth, 1):
            jax.block_until_ready(self._running.popleft())
        if self._reader.is_waiting():
            jax.block_until_ready(after)  # Until here devices were at work, and nobody waited for data.
            with self._meter.waiting():
                batch = self._reader.take()
        else:
            batch = self._reader.take()
        self._meter.step()
        if self._is_kept:
            self._last = batch
        return batch.placed

    def close(self, failed: bool = False) -> None:
        """End the reading ahead; batches that were not taken go back to a source that cannot yield them again."""
        if self._closed:
            return
        self._closed = True
        left = [read.host for read in self._reader.close(failed)]
        self._last = None
        if not self._source.restarts:
            self._source.give_back([*left, *self._looked])

    def _next(self) -> Any:
        if self._batches is None:
            self._batches = self._begin()
        return next(self._batches)

    def _begin(self) -> Iterator[Any]:
        start = self._start
        if start is None:
            if self._is_kept:
                self.at_begin = self.at_begin or captured_random_state()
            return self._source.batches()
        self.at_begin = start.at_begin
        if self._source.restarts:
            restore_random_state(start.at_begin)
        batches = self._source.batches_from(start.batches - 1)
        refuse_other_batch(self._source.name, start, next(batches, None))
        restore_random_state(start.after)
        return batches

    def _read(self) -> _Read:
        try:
            host = self._looked.popleft() if self._looked else self._next()
        except StopIteration:
            if self._check:
                self._check(self._number, None)
            raise
        if self._check:
            self._check(self._number, host)
        self._number += 1
        placed = self._place(host)
        if self._depth:
            jax.block_until_ready(placed)
        is_ahead = self._is_kept and self._depth > 0
        kept = host if self._is_kept or not self._source.restarts else None
        return _Read(placed, kept, captured_random_state() if is_ahead else None)

    def _finish(self) -> None:
        if inspect.isgenerator(self._batches):
            self._batches.close()


Hook = list[Any]  # "begin" or "end" of an epoch, and the random state then; where the source has code for these


class Input(_keras.DataAdapter):
    """What Keras gets in place of the user's input.

    Args:
        source: where the batches come from.
        place: puts a batch on the devices.
        depth: number of batches that are placed ahead.
        steps: number of batches of an epoch, or None for all of them.
        tell: is given a sentence where something could be done better.
        advise: what to say about a batch of so many rows.
        check: looks at each batch before it is placed.
    """

    def __init__(
        self,
        source: Source,
        place: Place,
        depth: int,
        steps: int | None,
        tell: Callable[[str], None],
        advise: Callable[[int], str | None] = lambda rows: None,
        check: Check | None = None,
    ) -> None:
        self._source, self._place, self._depth = source, place, depth
        self._steps = math.inf if steps is None else steps
        self._tell, self._advise, self._check = tell, advise, check
        self._start: Position | None = None
        self._done, self._is_kept = 0, False
        self._is_expecting = False
        self.hooks: list[Hook] = []
        self._meter = Meter()
        self._epoch: Epoch | None = None
        self._within = self._seen = False

    def get_jax_iterator(self) -> Epoch:
        """A new pass; what an earlier one has left goes back to the source."""
        if self._epoch:
            self._epoch.close()
            if self._epoch.has_begun:
                self._start = None
        before = self._epoch
        self._epoch = Epoch(
            self._source,
            self._placed,
            self._depth,
            self._meter,
            self._check,
            self._start,
            is_kept=self._is_kept,
        )
        if before and not self._source.restarts:
            self._epoch.at_begin = before.at_begin  # What was looked at is still part of this pass.
        self._epoch.allow(self._steps - self._done)
        return self._epoch

    @property
    def name(self) -> str:
        """What it is, for messages."""
        return self._source.name

    @property
    def can_seek(self) -> bool:
        """Whether a pass can begin in the middle, without reading what comes before."""
        return self._source.can_seek

    def keep_position(self, earlier: Position | None, is_expecting: bool) -> None:
        """From now on :meth:`where` will be asked.

        Args:
            earlier: where another process stood.
            is_expecting: :meth:`go_on_from` will follow when training begins. Until then Keras looks at shapes only.
        """
        self._is_kept, self._is_expecting = True, is_expecting
        if earlier and not self._source.restarts:
            restore_random_state(earlier.at_begin)  # The first look is the begin of the pass.

    def go_on_from(self, position: Position | None, steps: int, hooks: list[Hook]) -> None:
        """Begin where another process stood.

        Args:
            position: in the pass; None: a new pass begins.
            steps: number of steps of the epoch that are done.
            hooks: what :attr:`hooks` was there.
        """
        self._start, self._done, self._is_expecting = position, steps, False
        for kind, state in hooks:
            restore_random_state(state)
            (self._source.begin_epoch if kind == "begin" else self._source.end_epoch)()
        self.hooks = list(hooks)

    def where(self, is_epoch_over: bool) -> Position | None:
        """Where the pass stands; None where a new one begins next.

        Args:
            is_epoch_over: whether all steps of the epoch are done.
        """
        if self._epoch is None or (is_epoch_over and self._steps == math.inf):
            return None
        return self._epoch.where()

    def _placed(self, batch: Any) -> Any:
        if not self._seen:
            self._seen = True
            leaves = jax.tree.leaves(batch, is_leaf=lambda leaf: isinstance(leaf, Rows))
            shapes = [np.shape(leaf) for leaf in leaves]
            advice = self._advise(shapes[0][0]) if shapes and shapes[0] else None
            if advice:
                self._tell(advice)
        return self._place(batch)

    @property
    def num_batches(self) -> int | None:
        """Number of batches, where it is known."""
        return self._source.num_batches

    @property
    def batch_size(self) -> None:
        """Not needed by Keras's loop."""
        return

    def on_epoch_begin(self) -> None:
        """Keras says that an epoch begins: it may use ``steps`` batches."""
        self._within = True
        if not (self._done and self.hooks):  # Else this epoch had begun before, and its beginning was done again.
            self._note_hook("begin")
            self._source.begin_epoch()
        if self._epoch:
            self._epoch.allow(self._steps - self._done)

    def on_epoch_end(self) -> None:
        """Keras says that an epoch has ended."""
        self._within, self._done = False, 0
        if not self._is_expecting:
            self._note_hook("end")
            self._source.end_epoch()

    def _note_hook(self, kind: str) -> None:
        if self._is_kept and self._source.has_hooks:
            self.hooks.append([kind, captured_random_state()])

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
        sentence = self._meter.sentence()
        if sentence:
            self._tell(sentence)


def next_batch(iterator: Any, after: Any) -> Any:
    """The next batch for a step: placed ahead of it, or as a plain iterator yields it.

    Args:
        iterator: what Keras gave to the function that runs the step.
        after: what the last step gave, or None.

    Raises:
        StopIteration: there is none.
    """
    own = _keras.on_its_way(iterator)
    return own.take(after) if isinstance(own, Epoch) else next(iterator)
