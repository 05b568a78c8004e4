"""The fixed order of addition: its arithmetic by property, and its bits on devices against a naive sum in that order."""

from itertools import pairwise

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.collectives.fixed_tree_sum import branches, tree_sum
from lockstep.devices.batch_layout import BatchLayout
from lockstep.devices.placement import DEVICE_AXIS, Placement
from lockstep.execution.deterministic_replicas import TreeAdder, reduction_schedule, replica_rounds
from lockstep.execution.spmd import PerDevice

layouts = st.builds(BatchLayout, st.integers(1, 200), st.integers(1, 20), st.integers(1, 9))


def in_order(pieces):
    """The sum as it is defined: the pieces of the largest power of two below their number, plus the rest."""
    if len(pieces) == 1:
        return pieces[0]
    half = 1
    while 2 * half < len(pieces):
        half *= 2
    return in_order(pieces[:half]) + in_order(pieces[half:])


class Sum(str):
    """Addition that shows its order."""

    def __add__(self, other):
        return Sum(f"({self!s}+{other!s})")


@given(st.integers(1, 40), st.data())
def test_branches_are_whole_disjoint_and_as_few_as_can_be(total, data):
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    found = branches(start, stop, total)
    assert [piece for low, high in found for piece in range(low, high)] == list(range(start, stop))
    whole = in_order([Sum(piece) for piece in range(total)])
    own = [in_order([Sum(piece) for piece in range(low, high)]) for low, high in found]
    assert all(part in whole for part in own)
    for left, right in pairwise(own):
        assert f"({left}+{right})" not in whole


@given(layouts)
def test_each_busy_replica_runs_once_and_in_order_on_its_device(layout):
    seen = []
    for device in range(layout.devices):
        own = [one.replicas[device] for one in replica_rounds(layout) if one.replicas[device] is not None]
        assert own == sorted(own)
        seen += own
    assert seen == list(range(len(layout.busy_replicas)))
    for one in replica_rounds(layout):
        replica, local, first = one.offsets(layout)
        for device, chosen in enumerate(one.replicas):
            if chosen is not None:
                assert (replica[device], layout.busy_replicas[chosen]) == (chosen, one.rows)
                assert first[device] == sum(layout.busy_replicas[:chosen])
                assert local[device] == first[device] - sum(layout.device_rows[:device])
            assert 0 <= local[device] <= layout.capacity - one.rows


@given(layouts)
def test_adding_replica_by_replica_gives_the_sum_in_order(layout):
    merges, where = reduction_schedule(layout)
    stacks = [[] for _ in range(layout.devices)]
    highest = [0] * layout.devices
    for one, turn in zip(replica_rounds(layout), merges, strict=True):
        for place in one.places:
            value = Sum(one.replicas[place])
            for _ in range(turn[place]):
                value = stacks[place].pop() + value
            stacks[place].append(value)
            highest[place] = max(highest[place], len(stacks[place]))
    found = {(branch.start, branch.stop): stacks[branch.device][branch.slot] for branch in where}
    assert len(found) == sum(map(len, stacks))
    for (low, high), value in found.items():
        assert value == in_order([Sum(piece) for piece in range(low, high)])
    assert sorted(piece for low, high in found for piece in range(low, high)) == list(range(len(layout.busy_replicas)))
    for own, most in zip(layout.per_device, highest, strict=True):
        assert most <= 1 + 2 * len(own).bit_length()


@pytest.mark.optimized
@pytest.mark.parametrize(("replicas", "devices"), [(8, 2), (8, 3), (7, 4), (5, 5), (13, 3), (2, 4), (6, 1)])
@settings(deadline=None, max_examples=1)
@given(st.integers(0, 1000))
def test_the_bits_are_those_of_the_naive_sum_in_order(replicas, devices, seed):
    layout = BatchLayout(replicas * 2 - 1, replicas, devices)
    placement = Placement(Mesh(np.asarray(jax.local_devices()[:devices]), (DEVICE_AXIS,)), replicas)
    rng = np.random.default_rng(seed)
    shapes = [(), (3,), (5000,), (70, 101)]  # Short ones travel together, long ones in slices that need padding.
    pieces = [
        [(rng.normal(size=shape) * 10 ** rng.uniform(-3, 3)).astype("float32") for shape in shapes]
        for _ in layout.busy_replicas
    ]

    def values_of_rounds():
        for one in replica_rounds(layout):
            by_device = [
                None if chosen is None else [jax.device_put(leaf[None], device) for leaf in pieces[chosen]]
                for chosen, device in zip(one.replicas, placement.devices, strict=True)
            ]
            yield [PerDevice(own and own[i] for own in by_device) for i in range(len(shapes))]

    found = TreeAdder(layout, placement)(values_of_rounds())
    for total, leaf in zip(found, zip(*pieces, strict=True), strict=True):
        for shard in total.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), in_order(list(leaf)))


def test_values_of_several_dtypes_keep_them():
    mesh = Mesh(np.asarray(jax.local_devices()[:2]), (DEVICE_AXIS,))
    _, where = reduction_schedule(BatchLayout(4, 2, 2))
    values = [np.arange(2, dtype=dtype) for dtype in ("float32", "int32", "float16", "bool")]
    cut = PartitionSpec(DEVICE_AXIS)
    add = jax.shard_map(
        lambda values: tree_sum(values, where, DEVICE_AXIS),
        mesh=mesh,
        in_specs=cut,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    found = jax.jit(add)([jax.device_put(value, NamedSharding(mesh, cut)) for value in values])
    assert [(str(total.dtype), total.item()) for total in found] == [
        ("float32", 1.0),
        ("int32", 1),
        ("float16", 1.0),
        ("bool", True),
    ]
