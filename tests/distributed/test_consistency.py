"""What workers compare, without processes."""

import random
import sys
from types import SimpleNamespace

import jax
import keras
import numpy as np
import pytest

from lockstep.devices.placement import placement_on
from lockstep.distributed.consistency import DriftCheck, agree_on_random_state, describe_model

KERNEL, BIAS = np.arange(12, dtype=np.float32).reshape(3, 4), np.asarray([True, False])


def told(arrays, placement):
    said = []
    check = DriftCheck(SimpleNamespace(agree=lambda topic, value: said.append(value)), placement)
    check("after step 1", [SimpleNamespace(path=path) for path in ("kernel", "bias")], arrays)
    return said


@pytest.mark.parametrize("devices", [1, 2])
def test_an_eager_step_leaves_its_values_on_one_device_and_they_are_compared(devices):
    placement = placement_on(jax.devices()[:devices], devices)
    expected = told(placement.put([KERNEL, BIAS]), placement)
    assert list(expected[0]) == ["0 kernel", "1 bias"]
    assert told([jax.device_put(array, jax.devices()[0]) for array in (KERNEL, BIAS)], placement) == expected
    assert told(placement.put([KERNEL + 1, BIAS]), placement) != expected


def test_both_parts_of_complex_numbers_are_compared():
    placement = placement_on(jax.devices()[:2], 2)
    first, *others = (
        told(placement.put([KERNEL.astype("complex64") + change, BIAS]), placement) for change in (0, 1, 1j)
    )
    assert first not in others


def test_a_generator_that_is_alike_on_all_workers_keeps_its_state():
    """A program that gives only NumPy a seed has its numbers, whatever the other generators have drawn."""

    def gather(topic, own):
        return [own, own | {"random": "other"}] if topic == "random numbers" else [own, own]

    agrees = SimpleNamespace(agree=lambda *_: None, gather=gather, broadcast=lambda topic, seed: seed)
    state, said = random.getstate(), []
    try:
        np.random.seed(7)
        random.seed(7)
        expected = [random.random(), np.random.normal()]
        np.random.seed(7)
        random.seed(7)
        agree_on_random_state(agrees, said.append)
        drawn = [random.random(), np.random.normal()]
    finally:
        random.setstate(state)
    assert drawn[1] == expected[1]
    assert drawn[0] != expected[0]
    assert said == ["no seed was set before the strategy (random); all workers get one from worker 0"]


class _Torch:
    """A generator whose state is its seed."""

    def __init__(self, seed):
        self.seed = seed

    def get_rng_state(self):
        return SimpleNamespace(numpy=lambda: np.asarray([self.seed]))

    def manual_seed(self, seed):
        self.seed = seed


def test_torch_gets_one_seed_if_its_numbers_differ(monkeypatch):
    chief, other, told, said = _Torch(1), _Torch(2), [], []

    def agree(torch, of_torch):
        monkeypatch.setitem(sys.modules, "torch", torch)
        gathered = {"random numbers": lambda own: [own, own], "random numbers of torch": of_torch}
        client = SimpleNamespace(agree=lambda topic, value: None, gather=lambda topic, own: gathered[topic](own))
        agree_on_random_state(client, said.append)

    for torch in (chief, other):
        agree(torch, lambda own: told.append(own) or [own, own])
    assert (chief.seed, other.seed, said) == (1, 2, [])
    for torch in (chief, other):
        agree(torch, lambda own: told)
    assert chief.seed == other.seed
    assert said == ["torch has no seed, or another one on each worker; all workers give it one now"] * 2


def test_a_model_that_was_never_compiled_is_described_by_its_layers_and_variables():
    """``predict`` needs no optimizer; in a scope, parts of a compiled model are such models."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    assert list(describe_model(model)["variables"]) == [variable.path for variable in model.variables]
