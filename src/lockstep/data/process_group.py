"""What a call of ``fit`` and its input ask of the other processes of a job; this base class is a job of one process.

For several processes: :class:`lockstep.distributed.worker_process_group.WorkerProcessGroup`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from lockstep.data.resumable_iterator import BatchCheck, BatchGather


class ProcessGroup:
    """All processes of a job, as seen by a call of ``fit`` and by its input. This base class is a group of one process.

    Attributes:
        processes: number of processes.
        process: number of this process.
    """

    processes, process = 1, 0

    def surround_call(
        self, model: keras.Model, call: str, arguments: dict[str, Any], batch_size: int | None
    ) -> AbstractContextManager[None]:
        """Return a context that is open during ``call`` ("fit", "evaluate" or "predict") and may change its arguments; x is a KerasInput."""
        return nullcontext()

    def end_steps(self) -> None:
        """Note that the results of all steps so far are there, and that code of the user follows."""

    def saving(self) -> AbstractContextManager[None]:
        """Return a context in which this process writes or reads files: the others wait for it as long as for compiling."""
        return nullcontext()

    def end_together(self) -> None:
        """Have this process, at its end, wait for the end of all others."""

    def run_call(self, model: keras.Model, call: str, arguments: dict[str, Any], proceed: Callable[[], Any]) -> Any:
        """Run the call and return its result; ``proceed()`` is Keras's method with the arguments as they are then."""
        return proceed()

    def make_batch_check(self, name: str, num_batches: Callable[[], int | None]) -> Callable[[], BatchCheck] | None:
        """Return a factory of checks: one for each pass over an input, called in the thread that reads the batches; None: no checks."""
        return None

    def broadcast_from_chief(self, found: Any) -> Any:
        """Return the chief's value on every process."""
        return found

    def all_gather(
        self, topic: str, value: Any, *, channel: str | None = None, timeout_seconds: float | None = None
    ) -> list[Any]:
        """Return the values of all processes, each of which calls this method with the same topic.

        Args:
            topic: what is gathered, for messages.
            value: a value of JSON.
            channel: the sequence of calls that this one belongs to, for calls in a thread of its own.
            timeout_seconds: limit of the wait; None: that of the cluster.
        """
        return [value]

    def agree(self, topic: str, value: Any) -> None:
        """Check that all processes call this method with the same topic and an equal value.

        Raises:
            ClusterError: one does not.
        """

    def compare_batch(self, call: str, number: int, batch: Any) -> None:
        """Check that all processes give a method such as ``train_on_batch`` the same batch; ``number`` counts its calls from 0.

        Raises:
            ClusterError: one does not.
        """

    def worker_statuses(self) -> list[Any]:
        """Return the statuses in the newest heartbeats of all processes; an empty list on workers, and for one process."""
        return []

    def make_batch_gather(self, name: str) -> Callable[[], BatchGather] | None:
        """Return a factory of gathers of values of all processes: one for each pass over an input; None for one process."""
        return None
