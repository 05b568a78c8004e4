"""Which source reads what a user gives."""

from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import Any

import keras

from lockstep._errors import InputError
from lockstep._keras import trainer
from lockstep.data.sources import (
    AdapterSource,
    CallableSource,
    DatasetSource,
    GeneratorSource,
    InputSource,
    IterableSource,
    Pending,
)

__all__ = ["source_of", "source_of_trees"]


def source_of(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    shuffle: bool | str = False,
    class_weight: Any = None,
    pending: Callable[[Any], Pending],
    **options: Any,
) -> InputSource:
    """The source for what was given to ``fit``, ``evaluate`` or ``predict``.

    Args:
        x: inputs, or an object that yields whole batches; a source, such as a distributed data set, is one already.
        y: targets.
        sample_weight: a weight for each row.
        shuffle: whether epochs go through the rows in another order each time.
        class_weight: a weight for each class.
        pending: finds what earlier calls left over of a generator.
        **options: batch_size and steps_per_epoch.

    Raises:
        InputError: something was given besides a generator or a callable that has to come out of it.
        ValueError: from Keras, likewise for its kinds of input.
    """
    is_generator = isinstance(x, GeneratorType)
    if isinstance(x, InputSource):
        _refuse_besides(x, y=y, sample_weight=sample_weight, class_weight=class_weight)
        return x
    if is_generator or (callable(x) and not isinstance(x, (trainer.DataAdapter, keras.utils.PyDataset))):
        _refuse_besides(x, y=y, sample_weight=sample_weight, class_weight=class_weight)
        return GeneratorSource(x, pending(x)) if is_generator else CallableSource(x)
    adapter = trainer.adapter_of(x, y, sample_weight, shuffle=shuffle, class_weight=class_weight, **options)
    if isinstance(x, keras.utils.PyDataset) and not (x.use_multiprocessing and x.workers):
        return DatasetSource(x, adapter, bool(shuffle))
    return AdapterSource(adapter, type(x).__name__)


def source_of_trees(dataset: Any) -> InputSource:
    """The source for batches of any form: an iterable, a ``keras.utils.PyDataset``, or a function of the step.

    Raises:
        InputError: it is none of them.
    """
    if isinstance(dataset, InputSource):
        return dataset
    if isinstance(dataset, keras.utils.PyDataset):
        return DatasetSource(dataset)
    if isinstance(dataset, Iterable):
        return IterableSource(dataset)
    if callable(dataset):
        return CallableSource(dataset)
    raise InputError(
        f"A data set is expected: an iterable of batches, a keras.utils.PyDataset or a function step -> batch. Got {dataset!r}."
    )


def _refuse_besides(x: Any, **arguments: Any) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise InputError(
            f"{given[0]} was given besides a {type(x).__name__}: let it come out of the {type(x).__name__} itself, as "
            "(inputs, targets) or (inputs, targets, sample_weights)."
        )
