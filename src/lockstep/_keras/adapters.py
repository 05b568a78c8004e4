"""Keras's data adapters: how ``fit`` reads its input.

Undocumented parts, as of Keras 3.15: the adapters and their functions, the form that ``PyDatasetAdapter`` gives to a batch, and the
generator that puts batches on the default device.
"""

import inspect
from typing import Any

from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import get_jax_iterator, unpack_x_y_sample_weight

__all__ = [
    "DataAdapter",
    "adapter_of",
    "get_jax_iterator",
    "is_array_adapter",
    "is_tf_dataset",
    "standardize_batch",
    "train_validation_split",
    "unpack_x_y_sample_weight",
    "unwrap_iterator",
]

adapter_of = data_adapters.get_data_adapter  # x, y, sample_weight, batch_size, … as given to ``fit``
is_tf_dataset = data_adapters.is_tf_dataset
standardize_batch = data_adapters.PyDatasetAdapter._standardize_batch  # what a PyDataset returned, as a tuple


def is_array_adapter(adapter: DataAdapter) -> bool:
    """Return whether an input is arrays in memory."""
    return isinstance(adapter, data_adapters.ArrayDataAdapter)


def unwrap_iterator(iterator: Any) -> Any:
    """Return the adapter's iterator inside the one that Keras passes to a step function.

    On accelerators Keras wraps it in a generator that first copies each batch to the default device.
    """
    if inspect.isgenerator(iterator) and iterator.gi_code.co_name == "_one_batch_ahead_iterator":
        return inspect.getgeneratorlocals(iterator).get("numpy_iterator", iterator)
    return iterator
