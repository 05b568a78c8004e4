"""Cluster coordinator: custom training loops whose functions are scheduled on the workers of a job with servers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import keras
import numpy as np

from lockstep._errors import OptionError, ScopeError, check_depth, function, named_arguments, shown
from lockstep.parameter_server.function_scheduler_base import Outcome, SchedulerBase


class SchedulingStrategy(ABC):
    """Strategy whose workers run scheduled functions."""

    _coordinator: "ClusterCoordinator | None" = None

    @property
    @abstractmethod
    def _scheduler(self) -> SchedulerBase:
        """Scheduler of this process."""

    def pull(self, model: keras.Model) -> list[np.ndarray]:
        """Return the newest values of a model's trainable variables, in a function that is scheduled with :class:`lockstep.ClusterCoordinator`.

        Args:
            model: whose variables the servers hold.

        Returns:
            Arrays in the order of ``model.trainable_variables``. The model does not change.

        Raises:
            ClusterError: a server is lost.
            ModelError: the servers hold the variables of another model.
            ScopeError: the caller is not a scheduled function.
        """
        return self._scheduler.pull(model)

    def push(self, model: keras.Model, gradients: Sequence[Any]) -> None:
        """Have the servers apply gradients, in a function that is scheduled with :class:`lockstep.ClusterCoordinator`.

        The model's optimizer is applied to them. A push counts once, even if the function runs again after the loss of its worker.

        Args:
            model: whose variables the servers hold.
            gradients: arrays in the order and of the shapes of ``model.trainable_variables``.

        Raises:
            ClusterError: a server is lost.
            ModelError: gradients are missing or have other shapes, nothing was pulled before, or the servers hold the variables of another model.
            ScopeError: the caller is not a scheduled function.
        """
        self._scheduler.push(model, gradients)


class PerWorkerValues:
    """Value that each worker makes for itself; what :meth:`ClusterCoordinator.create_per_worker_resource` gives.

    Counterpart of ``tf.distribute.coordinator.PerWorkerValues``. As an argument of a scheduled function it becomes the value of the
    worker that runs the function. A worker makes its value at the first use, and again after it was lost and restarted.

    Args:
        make: makes the value, on a worker.

    Raises:
        OptionError: it cannot be called.

    Example:
        >>> import lockstep
        >>> table = lockstep.PerWorkerValues(lambda: {"rows": 3})
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = function("make", make, "a function without arguments")

    @cached_property
    def _value(self) -> Any:
        return self._make()

    def __iter__(self) -> Iterator[Any]:
        raise _value_of_each_worker()

    def __next__(self) -> Any:
        raise _value_of_each_worker()


class PerWorkerDataset:
    """Data that each worker reads for itself; what :meth:`ClusterCoordinator.create_per_worker_dataset` gives.

    ``iter()`` of it gives :class:`PerWorkerValues`, to be passed to ``schedule``: the scheduled function gets the iterator of its worker.

    Args:
        dataset: an iterable of batches, or a function without arguments that makes one.

    Raises:
        OptionError: ``dataset`` is something else.

    Example:
        >>> import lockstep
        >>> type(iter(lockstep.PerWorkerDataset([1, 2]))).__name__
        'PerWorkerValues'
    """

    def __init__(self, dataset: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        if not callable(dataset) and not isinstance(dataset, Iterable):
            raise OptionError(
                "dataset: expected an iterable of batches, or a function without arguments that makes one, got "
                f"{shown(dataset)}. Fix: pass an iterable, such as a list of batches."
            )
        self._dataset = dataset

    def __iter__(self) -> PerWorkerValues:
        return PerWorkerValues(self._iterator)

    def _iterator(self) -> Iterator[Any]:
        return iter(self._dataset if isinstance(self._dataset, Iterable) else self._dataset())


class RemoteValue:
    """Result of a scheduled function, which may not be done yet. Counterpart of ``tf.distribute.coordinator.RemoteValue``.

    Args:
        scheduler: waits for the function.
        outcome: what it knows of the function; None: another process runs it.
    """

    def __init__(self, scheduler: SchedulerBase, outcome: Outcome | None) -> None:
        self._scheduler, self._outcome = scheduler, outcome

    def fetch(self) -> Any:
        """Wait until the function is done.

        Returns:
            The result of the function, on every process; arrays are NumPy's.

        Raises:
            ClusterError: this or another function has failed.
        """
        return self._scheduler.fetch([self._outcome])[0]

    def get(self) -> Any:
        """Wait until the function is done: :meth:`fetch` under its name in ``tf.distribute``.

        Returns:
            The result of the function, on every process.
        """
        return self.fetch()


class ClusterCoordinator:
    """Schedules functions on the workers of a :class:`lockstep.ParameterServerStrategy`, for custom training loops.

    Counterpart of ``tf.distribute.coordinator.ClusterCoordinator``. All processes run the same script, and each comes to the same calls of
    ``schedule``, ``join``, ``done`` and ``fetch``, in the same order: a worker knows a scheduled function from its own script, so neither
    code nor arguments are transferred. In a scheduled function ``model.train_on_batch`` pulls the variables from the servers, computes a
    gradient and pushes it; ``strategy.pull`` and ``strategy.push`` are for gradients that the function computes itself. The model must be
    built and compiled before a function is scheduled; of several models, the servers hold the variables of the newest.

    Args:
        strategy: has the workers. There is one coordinator for each strategy: a second call returns the same.

    Raises:
        OptionError: the strategy is not a ParameterServerStrategy.

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

    def __new__(cls, strategy: SchedulingStrategy) -> "ClusterCoordinator":
        """Return the coordinator of this strategy."""
        if not isinstance(strategy, SchedulingStrategy):
            raise OptionError(
                f"ClusterCoordinator: strategy: expected a ParameterServerStrategy, got {shown(strategy)}. Fix: with other "
                "strategies, which train in step, use fit, or strategy.run in a loop."
            )
        if strategy._coordinator is None:
            strategy._coordinator = super().__new__(cls)
        return strategy._coordinator

    def __init__(self, strategy: SchedulingStrategy) -> None:
        self._strategy = strategy

    @property
    def strategy(self) -> SchedulingStrategy:
        """The strategy whose workers run the functions."""
        return self._strategy

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> RemoteValue:
        """Schedule a function for the next free worker; does not wait.

        It runs at least once, and again on another worker if its worker is lost; its pushes and its result count once.

        Args:
            fn: runs on a worker. It may return None, numbers, strings and arrays, in dicts, lists and tuples.
            args: positional arguments of ``fn``, as the worker's own script has computed them; per-worker values become those of the worker.
            kwargs: keyword arguments of ``fn``, as ``args``.

        Returns:
            Its result, to be fetched later.

        Raises:
            ClusterError: a function that was scheduled before has failed.
            ModelError: the strategy has no model that is built and compiled.
            OptionError: ``fn`` cannot be called, an argument is a RemoteValue or a PerWorkerDataset, or ``max_staleness`` is 0.
        """
        function("schedule: fn", fn)
        if args is not None and not isinstance(args, (tuple, list)):
            raise OptionError(
                f"schedule: args: expected a tuple or a list, got {shown(args)}. Fix: write args=(value,)."
            )
        given = tuple(args or ()), named_arguments("schedule: kwargs", kwargs)
        check_depth("schedule: args and kwargs", list(given))
        leaves = keras.tree.flatten(given)
        if any(isinstance(leaf, RemoteValue) for leaf in leaves):
            raise OptionError("schedule: a RemoteValue cannot be an argument. Fix: fetch it before.")
        if any(isinstance(leaf, PerWorkerDataset) for leaf in leaves):
            raise OptionError(
                "schedule: a PerWorkerDataset cannot be an argument. Fix: pass its iterator, iter(dataset)."
            )
        scheduler = self._strategy._scheduler
        return RemoteValue(scheduler, scheduler.schedule(fn, given))

    def join(self) -> None:
        """Wait until all scheduled functions are done; then the model has the servers' weights on every process.

        Raises:
            ClusterError: a function has failed, or no worker comes; the message names the worker and the error. The job cannot continue.
        """
        self._strategy._scheduler.join()

    def done(self) -> bool:
        """Return whether all scheduled functions are done.

        Returns:
            The chief's answer, on all processes.

        Raises:
            ClusterError: as for :meth:`join`.
        """
        return self._strategy._scheduler.done()

    def fetch(self, val: Any) -> Any:
        """Wait for results, which every process gets.

        Args:
            val: a RemoteValue, or several in dicts, lists and tuples.

        Returns:
            The same structure with the results of the functions; arrays are NumPy's.

        Raises:
            ClusterError: a function has failed; or this worker was restarted, and the chief no longer keeps the results (it keeps
                those of the last fetches, up to 64 MiB).
        """
        check_depth("fetch: val", val)
        leaves = keras.tree.flatten(val)
        remote_values = [leaf for leaf in leaves if isinstance(leaf, RemoteValue)]
        found = iter(self._strategy._scheduler.fetch([value._outcome for value in remote_values]))
        replaced = [next(found) if isinstance(leaf, RemoteValue) else leaf for leaf in leaves]
        return keras.tree.pack_sequence_as(val, replaced)

    def create_per_worker_dataset(self, dataset: Iterable[Any] | Callable[[], Iterable[Any]]) -> PerWorkerDataset:
        """Return data that each worker reads for itself.

        Args:
            dataset: an iterable of batches, or a function without arguments that makes one, which is called on each worker.

        Returns:
            An iterable. Its iterator is to be passed to :meth:`schedule`, and becomes the worker's own in the function. A restarted
            worker begins at the first batch.

        Raises:
            OptionError: ``dataset`` is something else.
        """
        return PerWorkerDataset(dataset)

    def create_per_worker_resource(self, fn: Callable[[], Any]) -> PerWorkerValues:
        """Return a value that each worker makes for itself, once, at the first use: a table, an open file.

        Args:
            fn: a function without arguments that makes the value.

        Returns:
            An argument for :meth:`schedule`.

        Raises:
            OptionError: ``fn`` cannot be called.
        """
        return PerWorkerValues(fn)


def resolve_per_worker(arguments: Any) -> Any:
    """Return the arguments of a scheduled function, with this worker's values in place of per-worker values."""
    return keras.tree.map_structure(lambda leaf: leaf._value if isinstance(leaf, PerWorkerValues) else leaf, arguments)


def _value_of_each_worker() -> ScopeError:
    return ScopeError(
        "PerWorkerValues stands for a value of each worker. Fix: pass it to ClusterCoordinator.schedule as an argument, and use it in the "
        "scheduled function."
    )
