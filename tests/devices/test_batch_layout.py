"""Which rows belong to which replica and device: arithmetic, against TensorFlow's documented examples and by property."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.devices.batch_layout import BatchLayout, rows_of_replicas


@pytest.mark.parametrize(
    ("rows", "replicas", "expected"),
    [
        (7, 2, (4, 3)),
        (7, 3, (3, 3, 1)),
        (8, 3, (3, 3, 2)),
        (6, 4, (2, 2, 2, 0)),
        (1, 2, (1, 0)),
        (2, 3, (1, 1, 0)),
        (80, 3, (27, 27, 26)),
        (32, 1, (32,)),
    ],
)
def test_rows_are_split_as_tf_distribute_splits_them(rows, replicas, expected):
    assert rows_of_replicas(rows, replicas) == expected


layouts = st.builds(BatchLayout, st.integers(1, 300), st.integers(1, 20), st.integers(1, 12))


@given(layouts)
def test_every_row_has_one_place_in_order(layout):
    index = layout.row_index().reshape(layout.devices, layout.capacity)
    placed = [index[device, :count] for device, count in enumerate(layout.device_rows)]
    np.testing.assert_array_equal(np.concatenate(placed), np.arange(layout.rows))
    assert ((index >= 0) & (index < layout.rows)).all()


@given(layouts)
def test_every_replica_has_one_device_in_order(layout):
    flat = tuple(rows for device in layout.per_device for rows in device)
    assert flat == rows_of_replicas(layout.rows, layout.replicas)
    assert layout.first_replica == tuple(np.cumsum([0, *map(len, layout.per_device)])[:-1])
    assert max(map(len, layout.per_device)) - min(map(len, layout.per_device)) <= 1


@given(layouts)
def test_a_full_layout_moves_no_row(layout):
    if layout.is_full:
        np.testing.assert_array_equal(layout.row_index(), np.arange(layout.rows))


@given(layouts)
def test_only_trailing_padding_is_dropped_by_a_slice(layout):
    places = np.flatnonzero(
        np.concatenate([np.arange(layout.capacity) < rows for rows in layout.device_rows])
    )  # that hold a row
    assert layout.has_trailing_padding == np.array_equal(places, np.arange(layout.rows))
    if layout.replicas % layout.devices == 0:
        assert layout.has_trailing_padding


@given(layouts)
def test_rows_are_sharded_like_the_places_if_devices_hold_the_same_ones(layout):
    part = -(-layout.rows // layout.devices)
    sharded = tuple(np.clip(layout.rows - part * np.arange(layout.devices), 0, part))
    assert layout.is_sharded_like_rows == (layout.device_rows == sharded)
