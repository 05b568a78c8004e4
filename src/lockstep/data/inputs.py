"""The input of one call of ``fit``, ``evaluate`` or ``predict``, as Keras's loop and the step see it.

Keras takes an :class:`Input` for a data adapter of its own kind. Its loop asks it for an iterator and hands that on to the
step, which takes placed batches from it; Keras itself looks at no more than the first batch, to learn shapes.
"""

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from lockstep import _keras
from lockstep.data.advice import Meter
from lockstep.data.feed import Direct, Feed, Reader
from lockstep.data.placement import Rows
from lockstep.data.sources import Source

__all__ = ["Check", "Epoch", "Gather", "Input", "next_batch"]

Place = Callable[[Any], Any]


class Check(Protocol):
    """Looks at the batches of one pass before they are placed."""

    def __call__(self, number: int, batch: Any) -> None:
        """Look at a batch on the host, which is the one of that number; None: the pass has come to its end."""

    def close(self) -> None:
        """The pass is over."""


@dataclass(frozen=True)
class _Read:
    placed: Any
    host: Any  # None where the source can be asked again


class Gather(Protocol):
    """Brings values together that the processes have for the batches of one pass."""

    def __call__(self, value: Any) -> list[Any]:
        """The values of all, which are of JSON."""

    def close(self) -> None:
        """The pass is over."""


class Epoch:
    """Iterator over the batches of one pass, which may last several epochs where those have a number of steps.

    ``next`` looks at the next batch on the host, and what was looked at is not taken yet; :meth:`take` takes a placed one.

    Args:
        source: where the batches come from.
        place: puts a batch on the devices.
        depth: number of batches that are placed ahead; 0 for none.
        meter: measures the waits.
        check: looks at each batch before it is placed.
    """

    def __init__(self, source: Source, place: Place, depth: int, meter: Meter, check: Check | None = None) -> None:
        self._source, self._place, self._depth, self._meter = source, place, depth, meter
        self._check, self._number = check, 0
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
        return self._reader.taken

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
        return batch.placed

    def close(self, failed: bool = False) -> None:
        """End the reading ahead; batches that were not taken go back to a source that cannot yield them again."""
        if self._closed:
            return
        self._closed = True
        left = [read.host for read in self._reader.close(failed)]
        if self._check:
            self._check.close()
        if not self._source.restarts:
            self._source.give_back([*left, *self._looked])

    def _next(self) -> Any:
        if self._batches is None:
            self._batches = self._source.batches()
        return next(self._batches)

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
        return _Read(placed, None if self._source.restarts else host)

    def _finish(self) -> None:
        if inspect.isgenerator(self._batches):
            self._batches.close()


class Input(_keras.DataAdapter):
    """What Keras gets in place of the user's input.

    Args:
        source: where the batches come from.
        place: puts a batch on the devices.
        depth: number of batches that are placed ahead.
        steps: number of batches of an epoch, or None for all of them.
        tell: is given a sentence where something could be done better.
        advise: what to say about a batch of so many rows.
        new_check: gives what looks at the batches of a pass; None: nobody does.
    """

    def __init__(
        self,
        source: Source,
        place: Place,
        depth: int,
        steps: int | None,
        tell: Callable[[str], None],
        advise: Callable[[int], str | None] = lambda rows: None,
        new_check: Callable[[], Check] | None = None,
    ) -> None:
        self._source, self._place, self._depth = source, place, depth
        self._steps = math.inf if steps is None else steps
        self._tell, self._advise, self._new_check = tell, advise, new_check
        self._meter = Meter()
        self._epoch: Epoch | None = None
        self._within = self._seen = False

    def get_jax_iterator(self) -> Epoch:
        """A new pass; what an earlier one has left goes back to the source."""
        if self._epoch:
            self._epoch.close()
        check = self._new_check() if self._new_check else None
        self._epoch = Epoch(self._source, self._placed, self._depth, self._meter, check)
        self._epoch.allow(self._steps)
        return self._epoch

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
        self._source.begin_epoch()
        if self._epoch:
            self._epoch.allow(self._steps)

    def on_epoch_end(self) -> None:
        """Keras says that an epoch has ended."""
        self._within = False
        self._source.end_epoch()

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
