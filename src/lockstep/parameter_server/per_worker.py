"""What each worker has for itself, such as its own iterator over its own data: the same object stands for all of them in a script."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from lockstep._errors import OptionError, ScopeError

__all__ = ["PerWorkerDataset", "PerWorkerValues", "own_values"]


class PerWorkerValues:
    """A value of each worker's own; what :meth:`ClusterCoordinator.create_per_worker_resource` gives.

    Counterpart of ``tf.distribute.coordinator.PerWorkerValues``. As an argument of a scheduled function it becomes the value of the
    worker that runs the function, which makes it when it needs it first, and anew where it was lost and started again.

    Args:
        make: makes the value, on a worker.

    Example:
        >>> import lockstep
        >>> table = lockstep.PerWorkerValues(lambda: {"rows": 3})
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._made = make, list[Any]()

    def _own(self) -> Any:
        if not self._made:
            self._made.append(self._make())
        return self._made[0]

    def __iter__(self) -> Iterator[Any]:
        raise _refusal(self)

    def __next__(self) -> Any:
        raise _refusal(self)


class PerWorkerDataset:
    """Data that each worker reads for itself; what :meth:`ClusterCoordinator.create_per_worker_dataset` gives.

    ``iter()`` of it gives :class:`PerWorkerValues`, to be passed to ``schedule``: a scheduled function finds its worker's own iterator there.

    Args:
        dataset: an iterable of batches, or a function without arguments that makes one.

    Raises:
        OptionError: it is something else.

    Example:
        >>> import lockstep
        >>> type(iter(lockstep.PerWorkerDataset([1, 2]))).__name__
        'PerWorkerValues'
    """

    def __init__(self, dataset: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        if not callable(dataset) and not isinstance(dataset, Iterable):
            raise OptionError(
                "create_per_worker_dataset: expected an iterable of batches, or a function without arguments that makes one, got "
                f"{dataset!r}."
            )
        self._dataset = dataset

    def __iter__(self) -> PerWorkerValues:
        return PerWorkerValues(self._iterator)

    def _iterator(self) -> Iterator[Any]:
        return iter(self._dataset if isinstance(self._dataset, Iterable) else self._dataset())


def own_values(arguments: Any) -> Any:
    """The arguments of a scheduled function with this worker's own values in their places."""
    return keras.tree.map_structure(lambda leaf: leaf._own() if isinstance(leaf, PerWorkerValues) else leaf, arguments)


def _refusal(values: PerWorkerValues) -> ScopeError:
    return ScopeError(
        f"{type(values).__name__} stands for a value of each worker: pass it to ClusterCoordinator.schedule as an argument, and use it "
        "in the scheduled function."
    )
