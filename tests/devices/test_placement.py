"""Where batches are: on the host until each device gets its rows, in one transfer for a batch, ahead of the step."""

import jax
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.devices.placement import PlacedRows, Placement, placement_on

DEVICES, ROWS, BATCH = ("cpu:1", "cpu:2"), 22, 8  # Neither is JAX's default device.


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, number):
        part = slice(number * BATCH, (number + 1) * BATCH)
        return x[part], y[part]


x, y = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32"), np.arange(ROWS) % 2
INPUTS = {"arrays": lambda: (x, y), "PyDataset": lambda: (Batches(),), "generator": lambda: (iter(Batches()),)}


GUARD = "jax_transfer_guard_device_to_device"


@pytest.fixture
def refused_copies():
    """A function after which copies between devices, in any thread, are errors."""
    yield lambda: jax.config.update(GUARD, "disallow_explicit")
    jax.config.update(GUARD, "allow")


@pytest.fixture
def placed(monkeypatch):
    """For each call of ``jax.device_put`` with a batch: the types of its arrays."""
    found, put = [], jax.device_put

    def recorded(tree, *args, **kwargs):
        if any(
            isinstance(leaf, PlacedRows)
            for leaf in jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, PlacedRows))
        ):
            found.append({type(leaf) for leaf in jax.tree.leaves(tree)})
        return put(tree, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", recorded)
    return found


def test_copies_between_devices_are_noticed(refused_copies):
    refused_copies()
    array = jax.device_put(np.zeros(3), jax.devices()[1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="device-to-device"):
        jax.device_put(array, jax.devices()[2])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"shard": "optimizer"}], ids=str)
@pytest.mark.parametrize("kind", INPUTS)
def test_rows_go_from_the_host_to_their_devices_in_one_transfer_ahead_of_the_step(
    kind, options, placed, refused_copies
):
    with lockstep.MirroredStrategy(DEVICES, **options).scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "relu"), layers.Dense(2)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    steps = -(-ROWS // BATCH)
    batch_size = {"batch_size": BATCH} if kind == "arrays" else {}
    # The first step also moves the new model's variables to the devices.
    after_first = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: refused_copies())
    model.fit(*INPUTS[kind](), steps_per_epoch=steps, callbacks=[after_first], verbose=0, **batch_size)
    assert placed == [{np.ndarray}] * steps


def test_a_shard_of_a_job_with_several_processes_is_not_a_view_of_the_whole_value(monkeypatch):
    monkeypatch.setattr(Placement, "is_local", False)
    placement = placement_on(jax.devices("cpu")[:4], 4)
    whole = jax.numpy.ones((4096, 8)) + 1
    sharded = placement.put(whole, placement.row_sharding)
    begin = whole.unsafe_buffer_pointer()
    addresses = [shard.data.unsafe_buffer_pointer() for shard in sharded.addressable_shards]
    assert len(addresses) == 4
    assert not any(begin <= address < begin + whole.nbytes for address in addresses)
