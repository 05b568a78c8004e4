"""The chief's arrays on every worker, without processes: tests of jobs have those."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from lockstep.distributed import process_group

ARRAYS = {
    "matrix": np.arange(35, dtype=np.float32).reshape(5, 7),
    "transposed": np.arange(6, dtype=np.int16).reshape(2, 3).T,
    "number": np.asarray(3, np.uint32),
    "empty": np.zeros((0, 4)),
    "odd": np.asarray([0.5, -1.5, 2], ml_dtypes.bfloat16),
    "flag": np.asarray([True]),
}


@pytest.mark.parametrize("numbers", [1, 3, 1000])
def test_broadcast_arrays_are_those_of_the_chief_in_chunks_of_any_size(numbers, monkeypatch):
    said, sent = [], []
    client = SimpleNamespace(
        group=SimpleNamespace(is_chief=True), broadcast=lambda topic, value: said.append(value) or value
    )
    monkeypatch.setattr(process_group, "_CHUNK", numbers)
    monkeypatch.setattr(process_group, "_sum", lambda placement, own: sent.append(own) or own)
    assert process_group._broadcast_arrays(client, None, ARRAYS).keys() == ARRAYS.keys()

    worker = SimpleNamespace(group=SimpleNamespace(is_chief=False), broadcast=lambda topic, value: said[0])
    chunks = iter(sent)
    monkeypatch.setattr(process_group, "_sum", lambda placement, own: next(chunks) + own)
    found = process_group._broadcast_arrays(worker, None, {})
    assert list(found) == list(ARRAYS)
    for name, array in found.items():
        assert (array.dtype, array.shape) == (ARRAYS[name].dtype, ARRAYS[name].shape), name
        np.testing.assert_array_equal(array, ARRAYS[name], name)
    assert next(chunks, None) is None
    assert all(len(chunk) <= numbers for chunk in sent)
