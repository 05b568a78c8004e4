"""Loops of one's own where variables are on servers: functions are scheduled, and any worker does them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from lockstep._errors import OptionError
from lockstep.parameter_server.per_worker import PerWorkerDataset, PerWorkerValues
from lockstep.parameter_server.scheduler_base import Outcome, SchedulerBase

__all__ = ["ClusterCoordinator", "RemoteValue", "SchedulingStrategy"]


class SchedulingStrategy(ABC):
    """A strategy whose workers do scheduled functions."""

    _coordinator: "ClusterCoordinator | None" = None

    @property
    @abstractmethod
    def _coordination(self) -> SchedulerBase:
        """What this process does in such loops."""

    def pull(self, model: keras.Model) -> list[np.ndarray]:
        """The newest values of a model's trainable variables, in a function that is scheduled with :class:`lockstep.ClusterCoordinator`.

        Args:
            model: whose variables the servers hold.

        Returns:
            Arrays in the order of ``model.trainable_variables``. The model itself stays as it is.

        Raises:
            ClusterError: a server is lost.
            ModelError: the servers hold the variables of another model.
            ScopeError: this is no scheduled function.
        """
        return self._coordination.pull(model)

    def push(self, model: keras.Model, gradients: Sequence[Any]) -> None:
        """Have the servers apply gradients, in a function that is scheduled with :class:`lockstep.ClusterCoordinator`.

        The model's optimizer decides what that means. A push counts once, also where the function is done again after a loss.

        Args:
            model: whose variables the servers hold.
            gradients: arrays in the order and of the shapes of ``model.trainable_variables``.

        Raises:
            ClusterError: a server is lost.
            ModelError: gradients are missing or have other shapes, nothing was pulled before, or the model is another one.
            ScopeError: this is no scheduled function.
        """
        self._coordination.push(model, gradients)


class RemoteValue:
    """What a scheduled function will have returned. Counterpart of ``tf.distribute.coordinator.RemoteValue``."""

    def __init__(self, coordination: SchedulerBase, outcome: Outcome | None) -> None:
        self._coordination, self._outcome = coordination, outcome

    def fetch(self) -> Any:
        """Wait until the function is done.

        Returns:
            What it has returned, on every process; arrays are NumPy's.

        Raises:
            ClusterError: it has failed, or another function.
        """
        return self._coordination.fetch([self._outcome])[0]

    def get(self) -> Any:
        """Wait until the function is done: :meth:`fetch` by the name that ``tf.distribute`` has for it.

        Returns:
            What it has returned, on every process.
        """
        return self.fetch()


class ClusterCoordinator:
    """Has functions done by the workers of a :class:`lockstep.ParameterServerStrategy`, for training loops of one's own.

    Counterpart of ``tf.distribute.coordinator.ClusterCoordinator``. All processes run the same script, and each comes to the same calls of
    ``schedule``, ``join``, ``done`` and ``fetch``, in the same order: a worker knows a scheduled function from its own script, and no
    code and no arguments travel. In a scheduled function ``model.train_on_batch`` pulls the variables from the servers, computes a
    gradient and pushes it; ``strategy.pull`` and ``strategy.push`` do so for gradients of one's own. The model must be built
    and compiled before something is scheduled; of several, the servers hold the variables of the newest.

    Args:
        strategy: whose workers they are. For one strategy there is one coordinator: the second time this gives the same.

    Raises:
        OptionError: the strategy has no such workers.

    Example:
        >>> import json, lockstep, os
        >>> cluster = {job: [f"localhost:{port}"] for job, port in [("chief", 12434), ("worker", 12435), ("ps", 12436)]}
        >>> os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
        >>> strategy = lockstep.ParameterServerStrategy()
        >>> del os.environ["TF_CONFIG"]
        >>> coordinator = lockstep.ClusterCoordinator(strategy)
        >>> coordinator is lockstep.ClusterCoordinator(strategy), coordinator.done()
        (True, True)
        >>> table = coordinator.create_per_worker_resource(lambda: {"rows": 3})  # For the arguments of schedule.
        >>> strategy.close()
    """

    def __new__(cls, strategy: Any) -> "ClusterCoordinator":
        """The one of this strategy."""
        if not isinstance(strategy, SchedulingStrategy):
            raise OptionError(
                f"ClusterCoordinator: expected a ParameterServerStrategy, got {strategy!r}. Other strategies train in step: use fit, or "
                "strategy.run in a loop."
            )
        if strategy._coordinator is None:
            strategy._coordinator = super().__new__(cls)
        return strategy._coordinator

    def __init__(self, strategy: Any) -> None:
        self._strategy: SchedulingStrategy = strategy

    @property
    def strategy(self) -> Any:
        """The strategy whose workers these are."""
        return self._strategy

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> RemoteValue:
        """Have a function done by the next worker that is free; does not wait.

        It is done at least once, again by another one where a worker is lost; its pushes and its result count once.

        Args:
            fn: is run on a worker. What it returns travels: None, numbers, texts and arrays, in dicts, lists and tuples.
            args: its arguments, as the worker's own script has computed them; per-worker values become the worker's own.
            kwargs: likewise, by name.

        Returns:
            What stands for its result until that is fetched.

        Raises:
            ClusterError: something that was scheduled before has failed.
            ModelError: the strategy has no model that is built and compiled.
            OptionError: ``fn`` cannot be called, or an argument is a RemoteValue; or ``max_staleness`` is 0.
        """
        given = tuple(args or ()), dict(kwargs or {})
        if not callable(fn):
            raise OptionError(f"schedule: fn: expected a function, got {fn!r}.")
        if any(isinstance(leaf, RemoteValue) for leaf in keras.tree.flatten(given)):
            raise OptionError("schedule: a RemoteValue cannot be an argument. Fetch it before.")
        coordination = self._strategy._coordination
        return RemoteValue(coordination, coordination.schedule(fn, given))

    def join(self) -> None:
        """Wait until all that was scheduled is done; then every process's model has the servers' weights.

        Raises:
            ClusterError: a function has failed, which names the worker and the error, or no worker comes. Then the job is over.
        """
        self._strategy._coordination.join()

    def done(self) -> bool:
        """Whether all that was scheduled is done.

        Returns:
            As the chief sees it; all processes hear the same.

        Raises:
            ClusterError: as for :meth:`join`.
        """
        return self._strategy._coordination.done()

    def fetch(self, val: Any) -> Any:
        """Wait for results; every process gets them.

        Args:
            val: a RemoteValue, or several in dicts, lists and tuples.

        Returns:
            The same with what the functions have returned in their places; arrays are NumPy's.

        Raises:
            ClusterError: a function has failed; or this worker was started again and comes too late for results that are no
                longer kept (those of the last fetches are, up to 64 MiB).
        """
        leaves = keras.tree.flatten(val)
        values = [leaf for leaf in leaves if isinstance(leaf, RemoteValue)]
        found = iter(self._strategy._coordination.fetch([value._outcome for value in values]))
        replaced = [next(found) if isinstance(leaf, RemoteValue) else leaf for leaf in leaves]
        return keras.tree.pack_sequence_as(val, replaced)

    def create_per_worker_dataset(self, dataset: Iterable[Any] | Callable[[], Iterable[Any]]) -> PerWorkerDataset:
        """Data that each worker reads for itself.

        Args:
            dataset: an iterable of batches, or a function without arguments that makes one, which is called on each worker.

        Returns:
            What ``iter()`` may be called of; the iterator is to be passed to :meth:`schedule`, and becomes the worker's own in the function. A
            worker that was lost and started again begins anew.

        Raises:
            OptionError: ``dataset`` is something else.
        """
        return PerWorkerDataset(dataset)

    def create_per_worker_resource(self, fn: Callable[[], Any]) -> PerWorkerValues:
        """A value that each worker makes for itself, once, when it needs it first: a table, an open file.

        Args:
            fn: a function without arguments that makes it.

        Returns:
            What stands for it among the arguments of :meth:`schedule`.
        """
        return PerWorkerValues(fn)
