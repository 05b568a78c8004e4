"""The contract of every cross-device operation, run over the registry: it equals the naive sum."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import lockstep
from lockstep.collectives import ALGORITHMS, resolve_cross_device_ops


def reduced(ops, pieces, devices):
    """Each device holds one of ``pieces``; returns what every device holds afterwards."""
    chosen = jax.local_devices()[:devices]
    mesh = Mesh(np.asarray(chosen), ("device",))
    cut = PartitionSpec("device")

    def meet(values):
        return [value[None] for value in ops.all_reduce([value[0] for value in values], "device", chosen)]

    stacked = [jax.device_put(np.stack(leaf), NamedSharding(mesh, cut)) for leaf in zip(*pieces, strict=True)]
    run = jax.jit(jax.shard_map(meet, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))
    return [np.asarray(value) for value in run(stacked)]


LEAVES = {
    "float32": [(), (0,), (1,), (7,), (3, 5), (100_003,)],
    "bfloat16": [(), (9,)],
    "float16": [(9,)],
    "int32": [(), (4, 2)],
    "uint8": [(5,)],
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", LEAVES)
def test_equals_the_naive_sum_on_every_device(name, devices, dtype):
    rng = np.random.default_rng(devices)
    number = np.dtype(getattr(ml_dtypes, dtype, dtype))
    pieces = [[(rng.normal(size=shape) * 10).astype(number) for shape in LEAVES[dtype]] for _ in range(devices)]
    found = reduced(ALGORITHMS[name](), pieces, devices)
    for position, (copies, leaf) in enumerate(zip(found, zip(*pieces, strict=True), strict=True)):
        exact = np.sum([piece.astype("float64") for piece in leaf], axis=0)
        assert copies.dtype == number
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0], err_msg=f"leaf {position}: devices differ")
        if np.issubdtype(number, np.integer):
            np.testing.assert_array_equal(copies[0], sum(leaf[1:], start=leaf[0]))
        else:
            step = float(jnp.finfo(number).eps) * devices
            bound = step * np.sum([np.abs(piece.astype("float64")) for piece in leaf], axis=0)
            assert (np.abs(copies[0].astype("float64") - exact) <= bound + 1e-30).all()


@pytest.mark.parametrize("root", [0, 1, 2])
def test_reduction_to_one_device_adds_there_in_order(root):
    order = []

    def note(values):
        order.append(len(values))
        return values[0] - values[1] * 10 + values[2] * 100

    ops = lockstep.ReductionToOneDevice(f"/device:CPU:{root}", note)
    found = reduced(ops, [[np.float32(1)], [np.float32(2)], [np.float32(3)]], 3)
    np.testing.assert_array_equal(found[0], [281.0, 281.0, 281.0])
    assert order == [3]


def test_reduction_to_a_device_of_nobody_is_an_error():
    with pytest.raises(lockstep.DeviceError, match="'cpu:3' is not one of the strategy's devices: cpu:0, cpu:1"):
        lockstep.MirroredStrategy(["cpu:0", "cpu:1"], lockstep.ReductionToOneDevice("cpu:3"))
    with pytest.raises(lockstep.DeviceError, match="Unknown device name 'first'"):
        lockstep.ReductionToOneDevice("first")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_class_is_as_good_as_an_instance(name):
    algorithm = ALGORITHMS[name]
    instance = algorithm()
    assert resolve_cross_device_ops(instance) is instance
    assert type(resolve_cross_device_ops(algorithm)) is algorithm
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], algorithm)
    assert isinstance(strategy.cross_device_ops, algorithm)


def test_the_default_is_the_platforms_own():
    assert isinstance(lockstep.MirroredStrategy(["cpu:0"]).cross_device_ops, lockstep.AutoAllReduce)
