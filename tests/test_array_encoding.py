"""Arrays and trees of arrays come back bit for bit, and what cannot be encoded is refused."""

import json

import ml_dtypes
import numpy as np
import pytest

from lockstep import InputError
from lockstep._array_encoding import (
    DTYPES,
    ML_DTYPES,
    ArraySpec,
    array_bytes,
    arrays_from_bytes,
    decode_tree,
    describe_arrays,
    encode_tree,
    parse_description,
)
from lockstep.custom_loops.distributed_dataset import gather_trees
from lockstep.distributed.control.transport import MAX_BYTES
from tests.distributed.threaded_job import ThreadedJob

ARRAYS = {name: np.arange(6).reshape(2, 3).astype(dtype) for name, dtype in DTYPES.items()} | {
    "a number": np.asarray(2.5),
    "no rows": np.zeros((0, 3), np.float32),
    "turned": np.arange(6).reshape(2, 3).T,
}


def assert_same(one, other):
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert one.tobytes() == other.tobytes()


def test_arrays_of_all_dtypes_come_back_from_their_bytes():
    specs = parse_description(json.loads(json.dumps(describe_arrays(ARRAYS))))
    data = b"".join(array_bytes(array) for array in ARRAYS.values())
    assert sum(spec.nbytes for spec in specs) == len(data)
    found = arrays_from_bytes(specs, data)
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert_same(found[name], array)


def test_arrays_of_the_other_byte_order_keep_their_numbers():
    arrays = {}
    tree = encode_tree({"x": np.arange(3, dtype=">i4")}, "value/", arrays)
    specs = parse_description(describe_arrays(arrays))
    data = b"".join(array_bytes(arrays[spec.name]) for spec in specs)
    assert decode_tree(tree, arrays_from_bytes(specs, data))["x"].tolist() == [0, 1, 2]


def test_tree_comes_back_with_its_types():
    tree = {"a": [np.float32([1, 2]), (None, True, 3, "x")], 7: np.int64(5), "none": ()}
    arrays = {}
    found = decode_tree(json.loads(json.dumps(encode_tree(tree, "tree/", arrays))), arrays)
    assert list(arrays) == ["tree/0", "tree/1"]
    assert_same(found["a"][0], tree["a"][0])
    assert found["a"][1] == (None, True, 3, "x")
    assert (type(found[7]), found[7], found["none"]) == (np.int64, 5, ())


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({1, 2}, "a set"),
        (np.array(["text"]), "an array of <U4"),
        ([{(1, 2): 3}], "the key"),
        (np.array([object()]), "an array of object"),
    ],
)
def test_other_values_are_refused(value, what):
    with pytest.raises(TypeError, match=what):
        encode_tree(value, "", {})


def test_array_spec_has_the_bytes_of_its_array():
    assert ArraySpec("x", (2, 3), "float32").nbytes == 24
    assert ArraySpec("x", (), "bfloat16").nbytes == 2
    assert all(ArraySpec("x", (5,), name).nbytes == 5 * DTYPES[name].itemsize for name in ML_DTYPES)


def test_each_process_gets_the_batches_of_all():
    drawn = [[({"x": np.ones((2, 3), ml_dtypes.bfloat16)}, np.arange(2))], []]
    sent = [[], []]
    for process in (0, 1):  # What each process sends, where the other has as many messages.
        gather_trees(drawn[process], lambda value, own=sent[process]: own.append(value) or [value])
    rounds = [[one, sent[1][number] if number < len(sent[1]) else ""] for number, one in enumerate(sent[0])]
    messages = iter(rounds)
    found = gather_trees(drawn[0], lambda value: next(messages))
    assert found[1] == []
    (batch,) = found[0]
    assert_same(batch[0]["x"], drawn[0][0][0]["x"])
    assert_same(batch[1], drawn[0][0][1])


@pytest.mark.slow
def test_large_batches_of_many_processes_fit_into_messages():
    size = MAX_BYTES // 16  # As text it is a third larger, and four of them are more than a message takes.

    def gather_all(session):
        own = np.full(size, session.group.index, "float32")
        return gather_trees(own, lambda value: session.gather("the batches", value))

    with ThreadedJob(4) as job:
        for found in job.everyone(gather_all):
            assert [(len(array), array[-1]) for array in found] == [(size, worker) for worker in range(4)]


def test_a_batch_keeps_what_is_not_there_and_its_keys():
    ((found,),) = gather_trees([{0: (np.ones(2), None)}], lambda value: [value])
    assert list(found) == [0]
    assert found[0][1] is None


def test_batch_of_objects_is_refused():
    with pytest.raises(InputError, match="sent to other workers must hold numbers, got an array of object"):
        gather_trees([np.array([object()])], lambda value: [value])
