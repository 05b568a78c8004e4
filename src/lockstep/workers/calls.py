"""One call of ``fit``, ``evaluate`` or ``predict`` on all workers: they agree on it first, and the chief alone prints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import keras

from lockstep.cluster.session import Session
from lockstep.data import calls
from lockstep.data.placement import Placement
from lockstep.data.position import digest_of_batch
from lockstep.workers.alike import described_model
from lockstep.workers.chief import leave_printing_to_the_chief, refuse_backup
from lockstep.workers.sharing import shared_arrays

__all__ = ["Together"]

_FIRST, _EVERY = 3, 100  # which batches are compared: the first ones, then one in a hundred
_PLAIN = (int, float, str, bool, type(None))


class Together(calls.Together):
    """What the workers do together besides the steps.

    Args:
        session: the workers.
        placement: their devices.
    """

    def __init__(self, session: Session, placement: Placement) -> None:
        self._session, self._placement, self._inputs = session, placement, count(1)
        self.processes, self.process = session.group.workers, session.group.index

    @contextmanager
    def during(
        self, model: keras.Model, call: str, arguments: dict[str, Any], batch_size: int | None
    ) -> Iterator[None]:
        """Agree on a call, and see to it that only the chief prints; the arguments may be changed.

        Raises:
            ClusterError: another worker calls something else, with other arguments or another model.
        """
        refuse_backup(arguments)
        given = {name: value for name, value in arguments.items() if isinstance(value, _PLAIN) and name != "verbose"}
        given |= {"batches of x": arguments["x"].num_batches, "batch_size": batch_size}
        self._session.agree("the call", call)
        self._session.agree(f"{call}()", {"arguments": given, "model": described_model(model)})
        if not self._session.group.is_chief:
            leave_printing_to_the_chief(arguments)
        yield

    def checking(self, name: str, has_known_length: bool) -> Callable[[int, Any], None] | None:
        """What compares the batches of one input; to be called with the number of each batch.

        Digests are compared now and then. That there is a batch at all is agreed on each time, unless the workers have agreed on
        the length: else one would begin a step into which the others cannot follow.

        Raises:
            ClusterError: a worker has read something else, or has come to another end.
        """
        lane = f"input {next(self._inputs)}"

        def check(number: int, batch: Any) -> None:
            is_compared = number < _FIRST or number % _EVERY == 0
            if has_known_length and not is_compared and batch is not None:
                return
            found = "the end" if batch is None else digest_of_batch(batch) if is_compared else "a batch"
            self._session.agree(f"batch {number + 1} of {name}", found, cure=_CURE, lane=lane)

        return check

    def shared(self, found: Any) -> Any:
        """See the base class: a checkpoint, which the chief has read, or None."""
        step, arrays, facts = found or (None, {}, None)
        step, facts = self._session.broadcast("the checkpoint", [step, facts])
        return None if step is None else (step, shared_arrays(self._session, self._placement, arrays), facts)

    def gathering(self, name: str) -> Callable[[Any], list[Any]] | None:
        """See the base class; to be called by one thread at a time."""
        lane = f"own input {next(self._inputs)}"
        return lambda value: self._session.gather(f"the batches of {name}", value, lane=lane)


_CURE = (
    "Every worker must read the same data in the same order and takes its own rows of them. Give shuffling a seed, or let each worker "
    "bring its own data with distribute_datasets_from_function."
)
