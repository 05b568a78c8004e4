"""Into how many shards variables are cut, and which rows each has, against the documented rules written out."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import OptionError
from lockstep._array_encoding import ArraySpec
from lockstep.parameter_server.sharding import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    plan_shards,
    shard_bounds,
)

SHAPES = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from(["float32", "float16", "int8"])


def bytes_of_shards(shape, dtype, count):
    """Sizes in bytes of the shards when rows are dealt as evenly as can be, larger shards first."""
    rows = [len(part) for part in np.array_split(np.arange(shape[0]), count)]
    return [number * int(np.prod(shape[1:], dtype=int)) * np.dtype(dtype).itemsize for number in rows]


@given(SHAPES, DTYPES, st.integers(1, 15))
def test_fixed_shards_are_that_many_or_one_a_row(shape, dtype, count):
    assert FixedShardsPartitioner(count)(shape, dtype) == [min(count, shape[0])] + [1] * (len(shape) - 1)


@given(SHAPES, DTYPES, st.integers(1, 200), st.integers(1, 15))
def test_shards_of_a_least_size_are_as_many_as_can_be(shape, dtype, least, most):
    allowed = [n for n in range(1, min(most, shape[0]) + 1) if min(bytes_of_shards(shape, dtype, n)) >= least]
    assert MinSizePartitioner(least, most)(shape, dtype)[0] == max(allowed, default=1)


@given(SHAPES, DTYPES, st.integers(1, 200), st.none() | st.integers(1, 15))
def test_shards_of_a_largest_size_are_as_few_as_can_be(shape, dtype, largest, most):
    enough = [n for n in range(1, shape[0] + 1) if max(bytes_of_shards(shape, dtype, n)) <= largest]
    expected = min(enough, default=shape[0])
    assert MaxSizePartitioner(largest, most)(shape, dtype)[0] == min(expected, most or expected)


@given(st.integers(0, 50), st.integers(1, 12))
def test_rows_fall_to_shards_as_evenly_as_can_be(rows, count):
    bounds = shard_bounds(rows, count)
    assert [end - begin for begin, end in itertools.pairwise(bounds)] == [
        len(part) for part in np.array_split(np.arange(rows), count)
    ]


def test_shards_go_to_one_server_after_the_other():
    specs = [ArraySpec("a", (5, 2), "float32"), ArraySpec("b", (), "float32"), ArraySpec("c", (4,), "float32")]
    made = plan_shards(specs, 3, FixedShardsPartitioner(2))
    assert [(s.spec.name, s.server) for shards in made.shards.values() for s in shards] == [
        ("a[0:3]", 0),
        ("a[3:5]", 1),
        ("b", 2),
        ("c[0:2]", 0),
        ("c[2:4]", 1),
    ]


def test_a_function_may_be_a_partitioner():
    made = plan_shards([ArraySpec("a", (5, 2), "float32")], 2, lambda shape, dtype: (9, 1))
    assert [shard.spec.shape for shard in made.shards["a"]] == [(1, 2)] * 5


@pytest.mark.parametrize("partitions", [[1, 2], [0, 1], [2], [], ["a", 1], [1.5, 1]])
def test_only_the_first_axis_can_be_cut(partitions):
    with pytest.raises(OptionError, match=r"variable_partitioner: a of shape \(5, 2\): expected 2 numbers"):
        plan_shards([ArraySpec("a", (5, 2), "float32")], 2, lambda shape, dtype: partitions)


def test_two_variables_of_one_name_are_refused():
    with pytest.raises(OptionError, match="Two variables have the name 'a'"):
        plan_shards([ArraySpec("a", (), "float32")] * 2, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedShardsPartitioner(0), "num_shards: expected a whole number of at least 1, got 0"),
        (lambda: MinSizePartitioner(min_shard_bytes=0), "min_shard_bytes: expected"),
        (lambda: MinSizePartitioner(max_shards=0), "max_shards: expected"),
        (lambda: MaxSizePartitioner(-1), "max_shard_bytes: expected"),
        (lambda: MaxSizePartitioner(1, max_shards=0), "max_shards: expected"),
        (lambda: FixedShardsPartitioner(1)((), "float32"), "axis: expected one of the 0"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(OptionError, match=message):
        make()
