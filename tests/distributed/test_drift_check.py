"""Checksums of variables, wherever a step has left them."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lockstep.devices.placement import placement_on
from lockstep.distributed.process_group import _DriftCheck

KERNEL, BIAS = np.arange(12, dtype=np.float32).reshape(3, 4), np.asarray([True, False])


def told(arrays, placement):
    said = []
    check = _DriftCheck(SimpleNamespace(agree=lambda topic, value: said.append(value)), placement)
    check(1, ["kernel", "bias"], arrays)
    return said


@pytest.mark.parametrize("devices", [1, 2])
def test_an_eager_step_leaves_its_values_on_one_device_and_they_are_compared(devices):
    placement = placement_on(jax.devices()[:devices], devices)
    expected = told(placement.put([KERNEL, BIAS]), placement)
    assert list(expected[0]) == ["kernel", "bias"]
    assert told([jax.device_put(array, jax.devices()[0]) for array in (KERNEL, BIAS)], placement) == expected
    assert told(placement.put([KERNEL + 1, BIAS]), placement) != expected


def test_both_parts_of_complex_numbers_are_compared():
    placement = placement_on(jax.devices()[:2], 2)
    first, *others = (
        told(placement.put([KERNEL.astype("complex64") + change, BIAS]), placement) for change in (0, 1, 1j)
    )
    assert first not in others
