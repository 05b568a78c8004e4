"""What the workers say to each other over one pass of an input: each pass has a lane of its own.

A thread that reads ahead may wait there when nobody takes batches from the pass any more: the wait is given up then.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

from lockstep.data.iterator_state import digest_of_batch
from lockstep.distributed.control.control_client import ControlClient
from lockstep.distributed.control.wait_logger import CancelledError

__all__ = ["BatchComparison", "BatchGathering", "of_each_pass"]

_FIRST, _EVERY = 3, 100  # which batches are compared: the first ones, then one in a hundred


def of_each_pass(kind: Callable[..., Any], session: ControlClient, lane: str, *options: Any) -> Callable[[], Any]:
    """Makes a :class:`BatchComparison` or :class:`BatchGathering` for each pass over one input.

    Args:
        kind: of the two.
        session: the workers.
        lane: of the input.
        options: further arguments of ``kind``.
    """
    numbers = count(1)
    return lambda: kind(session, f"{lane}, pass {next(numbers)}", *options)


class BatchComparison:
    """Compares the batches that all workers should have read alike.

    Digests are compared now and then. That there is a batch at all is agreed on each time, unless the workers have agreed on the
    length: else one would begin a step into which the others cannot follow.

    Args:
        session: the workers.
        lane: of the pass.
        name: of the input.
        has_known_length: whether its length was agreed on.
    """

    def __init__(self, session: ControlClient, lane: str, name: str, has_known_length: bool) -> None:
        self._session, self._lane, self._name, self._has_known_length = session, lane, name, has_known_length

    def __call__(self, number: int, batch: Any) -> None:
        """Compare a batch; None: the end.

        Raises:
            ClusterError: a worker has read something else, or has come to another end.
        """
        is_compared = number < _FIRST or number % _EVERY == 0
        if self._has_known_length and not is_compared and batch is not None:
            return
        found = "the end" if batch is None else digest_of_batch(batch) if is_compared else "a batch"
        try:
            self._session.agree(f"batch {number + 1} of {self._name}", found, cure=_CURE, lane=self._lane)
        except CancelledError:
            return  # The batch is nobody's: it goes back to the input.

    def close(self) -> None:
        """The pass is over."""
        self._session.forget(self._lane)


class BatchGathering:
    """Brings values together that the workers have for the batches of one pass; to be called by one thread at a time.

    Args:
        session: the workers.
        lane: of the pass.
        name: of the input.
    """

    def __init__(self, session: ControlClient, lane: str, name: str) -> None:
        self._session, self._lane, self._name = session, lane, name

    def __call__(self, value: Any) -> list[Any]:
        """The values of all, which are of JSON.

        Raises:
            CancelledError: nobody takes batches any more.
        """
        return self._session.gather(f"the batches of {self._name}", value, lane=self._lane)

    def close(self) -> None:
        """The pass is over."""
        self._session.forget(self._lane)


_CURE = (
    "Every worker must read the same data in the same order and takes its own rows of them. Give shuffling a seed, or let each worker "
    "bring its own data with distribute_datasets_from_function."
)
