"""One call of ``fit``, ``evaluate`` or ``predict`` on all workers: they agree on it first, and the chief alone prints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import keras

from lockstep.data import fit_entry
from lockstep.data.device_placement import Placement
from lockstep.distributed.broadcast_arrays import shared_arrays
from lockstep.distributed.chief_only_io import leave_printing_to_the_chief, refuse_backup
from lockstep.distributed.consistency_checks import described_model
from lockstep.distributed.control.control_client import ControlClient
from lockstep.distributed.control.failure_detector import WorkerStatus
from lockstep.distributed.input_agreement import BatchComparison, BatchGathering, of_each_pass

__all__ = ["WorkerProcessGroup"]

_PLAIN = (int, float, str, bool, type(None))


class WorkerProcessGroup(fit_entry.ProcessGroup):
    """What the workers do together besides the steps.

    Args:
        session: the workers.
        placement: their devices.
    """

    def __init__(self, session: ControlClient, placement: Placement) -> None:
        self._session, self._placement, self._inputs = session, placement, count(1)
        self.processes, self.process = session.group.workers, session.group.index

    @contextmanager
    def surround_call(
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
        if call == "fit":
            meter = arguments["x"].meter
            self._session.facts = lambda: {"waited": meter.waited, "read": meter.read}
        yield

    def make_batch_check(self, name: str, has_known_length: bool) -> Callable[[], BatchComparison]:
        """See the base class."""
        return of_each_pass(BatchComparison, self._session, f"input {next(self._inputs)}", name, has_known_length)

    def broadcast_from_chief(self, found: Any) -> Any:
        """See the base class: a checkpoint, which the chief has read, or None."""
        step, arrays, facts = found or (None, {}, None)
        step, facts = self._session.broadcast("the checkpoint", [step, facts])
        return None if step is None else (step, shared_arrays(self._session, self._placement, arrays), facts)

    def all_gather(self, topic: str, value: Any) -> list[Any]:
        """See the base class."""
        return self._session.gather(topic, value)

    def worker_statuses(self) -> list[WorkerStatus]:
        """See the base class."""
        return self._session.beats()

    def make_batch_gather(self, name: str) -> Callable[[], BatchGathering]:
        """See the base class."""
        return of_each_pass(BatchGathering, self._session, f"own input {next(self._inputs)}", name)
