"""The contract of every cross-device operation, run over the registry: it equals the naive sum."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import lockstep
from lockstep.collectives import ALGORITHMS, ops_from_argument
from lockstep.collectives.base import pack, plan_packs, unpack
from lockstep.collectives.xla_all_reduce import platform_sum_bucketed
from lockstep.testing import check_cross_device_ops, count_traffic

OPTIONS = {  # Beside the defaults.
    "auto in packs": lockstep.AutoAllReduce(bytes_per_pack=2000),
    "half_precision in float16": lockstep.HalfPrecisionAllReduce("float16", num_packs=2),
    "halving_doubling in packs": lockstep.HalvingDoublingAllReduce(bytes_per_pack=3000),
    "hierarchical_copy, one by one": lockstep.HierarchicalCopyAllReduce(num_packs=0),
    "nccl in three packs": lockstep.NcclAllReduce(3),
    "ring in three packs": lockstep.RingAllReduce(3),
}
EVERY_DAY = ("auto", "half_precision")  # In every dtype.
FIVE = [f"cpu:{number}" for number in range(5)]


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


@pytest.mark.parametrize(
    "ops",
    [pytest.param(ops, marks=[] if ops in ("auto", "tree") else [pytest.mark.slow]) for ops in (*ALGORITHMS, *OPTIONS)],
)
def test_equals_the_naive_sum_on_every_device(ops):
    # How arrays are packed depends neither on the number of devices nor on the dtype's kind: for options, five devices and
    # two dtypes are enough. Other dtypes take the same way as float32; all of them on all devices are in the nightly set.
    if ops in OPTIONS:
        check_cross_device_ops(OPTIONS[ops], FIVE, dtypes=["float32", "int32"])
    else:
        check_cross_device_ops(ops, dtypes=["float32"])
        check_cross_device_ops(ops, FIVE, dtypes=["bfloat16", "int32", "bool"], shapes=[(), (3, 0, 2), (1001,)])


def operations_and_devices():
    """Two operations on three devices; in the nightly set all, with all devices but where it is how arrays are packed."""
    for ops in EVERY_DAY:
        yield pytest.param(ops, FIVE[:3], id=f"{ops}-three devices", marks=pytest.mark.slow)
    for ops in (*ALGORITHMS, *OPTIONS):
        yield pytest.param(ops, FIVE if ops in OPTIONS else None, id=ops, marks=pytest.mark.nightly)


@pytest.mark.parametrize(("ops", "devices"), list(operations_and_devices()))
def test_equals_the_naive_sum_in_every_dtype(ops, devices):
    check_cross_device_ops(OPTIONS.get(ops, ops), devices)


@pytest.mark.parametrize(
    "shape",
    [pytest.param((2_500_000,), marks=pytest.mark.slow), pytest.param((1250, 2, 999), marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_equals_the_naive_sum_of_ten_megabytes(name, shape):
    check_cross_device_ops(name, FIVE[:3], dtypes=["float32"], shapes=[shape])


def forgets_a_device(array, axis):
    return lax.psum(jnp.where(lax.axis_index(axis) == 2, jnp.zeros_like(array), array), axis)


def differs_between_devices(array, axis):
    total = lax.psum(array, axis)
    return total + (lax.axis_index(axis) == 1).astype(total.dtype)


def has_a_sign_of_its_own(array, axis):
    zero = jnp.where(lax.axis_index(axis) == 1, -0.0, 0.0) * jnp.ones_like(array)
    return array if lax.psum(1, axis) == 1 else zero


def counts_bools(array, axis):
    return lax.psum(array.astype("int32"), axis) > 1 if array.dtype == bool else lax.psum(array, axis)


def adds_in_eight_bits(array, axis):
    return lax.psum(array.astype("float8_e4m3fn").astype(array.dtype), axis)


@pytest.mark.parametrize(
    ("ops", "dtype", "message"),
    [
        (forgets_a_device, "float32", r"float32 of shape \(\) on 3 devices: expected .*, the sum of .*; got "),
        (forgets_a_device, "int32", r"int32 of shape \(\) on 3 devices: expected .* within 0 at index \(\)"),
        (
            differs_between_devices,
            "float32",
            r"float32 of shape \(\) on 2 devices: expected the same bits on every device, but device 0 has .* and "
            r"device 1 has .* at index \(\)\.",
        ),
        (
            has_a_sign_of_its_own,
            "float32",
            r"float32 of shape \(\) on 2 devices: .* device 0 has 0\.0 and device 1 has -0\.0 at index \(\)\.",
        ),
        (
            counts_bools,
            "bool",
            r"bool of shape \(9,\) on 1 device: expected True within 0 at index \(8,\), the sum of True; got False",
        ),
        (adds_in_eight_bits, "bfloat16", r"bfloat16 of shape .* on 1 device: expected .*; got "),
    ],
)
def test_a_wrong_operation_is_caught(ops, dtype, message):
    with pytest.raises(lockstep.ContractError, match=message):
        check_cross_device_ops(ops, dtypes=[dtype], shapes=[(), (1,), (9,)])


class Careless(lockstep.CrossDeviceOps):
    def __init__(self, change):
        self.change = change

    def all_reduce(self, values, axis, devices):
        return self.change(lockstep.AutoAllReduce().all_reduce(values, axis, devices))

    def describe(self, devices):
        return "carelessly"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sums: sums[:-1], "Expected one sum for each of 2 arrays, got 1"),
        (
            lambda sums: [total[None] for total in sums],
            r"expected a sum of the same dtype and shape, got int32 of shape",
        ),
        (
            lambda sums: [total.astype("float32") for total in sums],
            r"int32 of shape \(3,\) on 1 device: .* got float32",
        ),
    ],
)
def test_a_careless_operation_is_caught(change, message):
    with pytest.raises(lockstep.ContractError, match=message):
        check_cross_device_ops(Careless(change), ["cpu:0"], dtypes=["int32"], shapes=[(3,), ()])


def test_an_operation_that_changes_its_mind_is_caught():
    calls = itertools.count()

    def moody(array, axis):
        return array + jax.pure_callback(lambda: np.float32(next(calls)), jax.ShapeDtypeStruct((), "float32"))

    with pytest.raises(lockstep.ContractError, match="expected the same bits when the operation runs again"):
        check_cross_device_ops(moody, ["cpu:0"], dtypes=["float32"], shapes=[(3,)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtypes": "float32"}, "expected a list of names"),
        ({"dtypes": ["float33"]}, "float33"),
        ({"dtypes": [","]}, "got .,."),
        ({"dtypes": []}, "dtypes: .* got an empty one, which checks nothing. Fix: leave it out"),
        ({"shapes": ()}, "shapes: .* got an empty one, which checks nothing. Fix: leave it out"),
    ],
)
def test_unknown_or_no_dtypes_and_shapes_are_refused(arguments, message):
    with pytest.raises(lockstep.OptionError, match=message):
        check_cross_device_ops("auto", ["cpu:0"], **arguments)


def test_a_function_of_another_shape_is_refused():
    with pytest.raises(
        lockstep.OptionError, match=r"<lambda> was given an array of shape \(7,\) .* returned shape \(1,\)"
    ):
        check_cross_device_ops(lambda array, axis: array[:1], ["cpu:0"], shapes=[(7,)])
    with pytest.raises(lockstep.OptionError, match="it returned None"):
        check_cross_device_ops(lambda array, axis: None, ["cpu:0"])


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


def test_an_accumulation_returns_the_type_and_the_shape_of_what_it_adds():
    values = [[np.int8([number])] for number in (1, 2, 3)]
    found = reduced(lockstep.ReductionToOneDevice(None, lambda arrays: jnp.stack(arrays).sum(0)), values, 3)
    assert [array.dtype for array in found[0]] == ["int8"] * 3
    assert np.ravel(found[0]).tolist() == [6, 6, 6]
    with pytest.raises(lockstep.OptionError, match=r"accumulation_fn was given arrays of shape \(1,\).*shape \(\)\."):
        reduced(lockstep.ReductionToOneDevice(None, lambda arrays: jnp.stack(arrays).sum()), values, 3)


def test_reduction_to_a_device_of_nobody_is_an_error():
    with pytest.raises(lockstep.DeviceError, match="'cpu:3' is not one of the strategy's devices: cpu:0, cpu:1"):
        lockstep.MirroredStrategy(["cpu:0", "cpu:1"], lockstep.ReductionToOneDevice("cpu:3"))
    with pytest.raises(lockstep.DeviceError, match="reduce_to_device: unknown device name 'first'"):
        lockstep.ReductionToOneDevice("first")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_class_or_a_name_is_as_good_as_an_instance(name):
    algorithm = ALGORITHMS[name]
    instance = algorithm()
    assert ops_from_argument(instance) is instance
    assert type(ops_from_argument(name)) is algorithm
    strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], algorithm)
    assert isinstance(strategy.cross_device_ops, algorithm)


def test_the_default_is_the_platforms_own():
    assert isinstance(lockstep.MirroredStrategy(["cpu:0"]).cross_device_ops, lockstep.AutoAllReduce)


def test_nccl_on_cpus_says_what_it_is(caplog):
    with caplog.at_level("INFO", logger="lockstep"):
        lockstep.MirroredStrategy(["cpu:0", "cpu:1"], "nccl")
    line = "all-reduce by XLA (NcclAllReduce was asked for; there is no NCCL between devices of type cpu)"
    assert caplog.text.count(line) == 1


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ("halving_doubling", "all-reduce by recursive halving and doubling"),
        ("hierarchical_copy", "copies in groups of 2, added by their leaders, then by the first"),
        ("half_precision", "all-reduce in bfloat16, added in float32"),
        ("ring", "all-reduce in a ring of 4"),
        (differs_between_devices, "all-reduce by differs_between_devices"),
    ],
)
def test_an_operation_says_what_it_is(ops, words):
    assert ops_from_argument(ops).describe(jax.local_devices()[:4]) == words


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lockstep.NcclAllReduce(-1), "NcclAllReduce: num_packs: expected a whole number of at least 0, got -1"),
        (lambda: lockstep.RingAllReduce(1.5), "RingAllReduce: num_packs: .* got 1.5"),
        (lambda: lockstep.AutoAllReduce(bytes_per_pack=-8), "AutoAllReduce: bytes_per_pack: .* got -8"),
        (lambda: lockstep.HalfPrecisionAllReduce("float8"), "dtype: expected one of bfloat16, float16, got 'float8'"),
    ],
)
def test_options_out_of_range_are_refused(make, message):
    with pytest.raises(lockstep.OptionError, match=message):
        make()


# Packing


def arrays(*shapes_and_dtypes):
    return [jnp.arange(np.prod(shape), dtype=dtype).reshape(shape) for shape, dtype in shapes_and_dtypes]


MIXED = [((2, 3), "float32"), ((4,), "int32"), ((), "float32"), ((0,), "float32"), ((5,), "float32"), ((3,), "int32")]


@pytest.mark.parametrize(
    ("num_packs", "bytes_per_pack", "lengths"),
    [
        (1, 0, [12, 7]),
        (3, 0, [4, 4, 4, 3, 3, 1]),
        (0, 0, [6, 4, 1, 5, 3]),
        (1, 20, [5, 5, 2, 5, 2]),
        (0, 12, [3, 3, 3, 1, 1, 3, 2, 3]),
        (2, 12, [3, 3, 3, 3, 3, 3, 1]),
        (1, 1, [1] * 19),
    ],
)
def test_packs_have_one_dtype_a_limit_and_the_order_of_the_arrays(num_packs, bytes_per_pack, lengths):
    values = arrays(*MIXED)
    plan = plan_packs(values, num_packs, bytes_per_pack)
    vectors = pack(values, plan)
    assert [len(vector) for vector in vectors] == lengths
    assert all(vector.nbytes <= max(4, bytes_per_pack or vector.nbytes) for vector in vectors)
    if num_packs:
        for dtype in ("float32", "int32"):
            joined = np.concatenate([vector for vector in vectors if vector.dtype == dtype])
            in_order = np.concatenate([value.reshape(-1) for value in values if value.dtype == dtype])
            np.testing.assert_array_equal(joined, in_order)
    for value, back in zip(values, unpack(vectors, plan, values), strict=True):
        assert back.dtype == value.dtype
        np.testing.assert_array_equal(back, value)


def test_each_pack_is_one_collective():
    def collectives(ops):
        return len(count_traffic(ops, [jax.ShapeDtypeStruct((16,), "float32")] * 6, devices=4).rounds) / 6

    assert collectives(lockstep.NcclAllReduce()) == 1
    assert collectives(lockstep.NcclAllReduce(3)) == 3
    assert collectives(lockstep.NcclAllReduce(0)) == 6
    assert collectives(lockstep.AutoAllReduce(bytes_per_pack=128)) == 3


# Half precision


def test_half_precision_rounds_twice_and_adds_in_float32():
    pieces = [[np.float32([1.0, 1e-3, 3e38, 300.0])], [np.float32([2.0**-8, 1e-3, -3e38, -299.0])]]
    (found,) = reduced(lockstep.HalfPrecisionAllReduce(), pieces, 2)
    rounded = [np.asarray(jnp.asarray(piece, "bfloat16").astype("float32")) for (piece,) in pieces]
    expected = jnp.asarray(rounded[0] + rounded[1], "bfloat16").astype("float32")
    np.testing.assert_array_equal(found[0], expected)


def test_half_precision_needs_the_bound_that_it_states(monkeypatch):
    monkeypatch.setattr(lockstep.HalfPrecisionAllReduce, "error_bound", lockstep.CrossDeviceOps.error_bound)
    with pytest.raises(lockstep.ContractError, match=r"float32 of shape \(7,\) on 2 devices: expected .* within "):
        check_cross_device_ops("half_precision", dtypes=["float32"], shapes=[(7,)])


def test_float16_overflows_where_the_sum_leaves_its_range():
    pieces = [[np.float32([65504.0, 65504.0, 70000.0])], [np.float32([-1.0, 65504.0, -70000.0])]]
    (found,) = reduced(lockstep.HalfPrecisionAllReduce("float16"), pieces, 2)
    np.testing.assert_array_equal(found[0], [65504.0, np.inf, np.nan])


# Communication options


@pytest.mark.parametrize(
    ("implementation", "algorithm"),
    [
        (lockstep.CommunicationImplementation.AUTO, lockstep.AutoAllReduce),
        ("ring", lockstep.RingAllReduce),
        ("NCCL", lockstep.NcclAllReduce),
    ],
)
def test_communication_options_choose_the_operation(implementation, algorithm):
    options = lockstep.CommunicationOptions(bytes_per_pack=1000, implementation=implementation)
    ops = lockstep.MirroredStrategy(["cpu:0"], communication_options=options).cross_device_ops
    assert type(ops) is algorithm
    assert ops.bytes_per_pack == 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack: expected a whole number of at least 0, got -1"),
        ({"timeout_seconds": 0}, "timeout_seconds: expected a number of seconds, more than 0, got 0"),
        ({"timeout_seconds": "5"}, "timeout_seconds: expected a number of seconds, more than 0, got '5'"),
        ({"implementation": "MPI"}, "implementation: expected one of AUTO, RING, NCCL, got 'MPI'"),
    ],
)
def test_communication_options_are_checked_when_they_are_made(arguments, message):
    with pytest.raises(lockstep.OptionError, match=message):
        lockstep.CommunicationOptions(**arguments)


def test_a_strategy_refuses_options_that_it_cannot_keep():
    options = lockstep.CommunicationOptions()
    with pytest.raises(lockstep.OptionError, match="both say how gradients travel"):
        lockstep.MirroredStrategy(["cpu:0"], "ring", communication_options=options)
    with pytest.raises(lockstep.OptionError, match=r"timeout_seconds=5\.0 is for collectives between processes"):
        lockstep.MirroredStrategy(["cpu:0"], communication_options=lockstep.CommunicationOptions(timeout_seconds=5.0))
    with pytest.raises(lockstep.OptionError, match=r"expected lockstep\.CommunicationOptions"):
        lockstep.MirroredStrategy(["cpu:0"], communication_options={"bytes_per_pack": 0})


# In training


@functools.cache
def trained_embedding(devices, ops=None):
    keras.utils.set_random_seed(0)
    with lockstep.MirroredStrategy(devices, ops, replicas=3).scope():
        model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(1000, 5)])
        model.add(keras.layers.GlobalAveragePooling1D())
        model.compile(keras.optimizers.SGD(1.0), "mse")
    rows = np.random.default_rng(0).integers(0, 40, size=(10, 4))
    before = np.asarray(model.get_weights()[0])
    model.fit(rows, np.ones((10, 5)), batch_size=10, epochs=1, verbose=0)
    return rows, np.asarray(model.get_weights()[0]) - before


@pytest.mark.parametrize("ops", [*ALGORITHMS, lambda array, axis: lax.psum(array, axis)])
def test_the_mostly_zero_gradient_of_an_embedding_is_added_exactly_where_it_is_not_zero(ops):
    rows, expected = trained_embedding(("cpu:0",))
    _, found = trained_embedding(("cpu:0", "cpu:1", "cpu:2"), ops)
    used = np.isin(np.arange(1000), rows)
    assert used.sum() < 40
    assert np.abs(expected[used]).max(axis=1).min() > 0
    np.testing.assert_array_equal(found[~used], 0)
    rounding = 2.0**-7 * np.abs(expected).max() if ops == "half_precision" else 0  # Two roundings to bfloat16.
    np.testing.assert_allclose(found[used], expected[used], rtol=0, atol=1e-6 + rounding)


@pytest.mark.slow
def test_between_processes_on_cpus_small_arrays_travel_together():
    devices = [SimpleNamespace(process_index=process, platform="cpu") for process in range(2)]
    shapes = {"float32": [(2,), (3, 4), (600, 500), (0,), ()], "int32": [(5,)]}
    values = [jnp.ones((2, *shape), dtype) for dtype, some in shapes.items() for shape in some]

    def add(one):
        return platform_sum_bucketed(one, "d", devices)

    assert all((total == 2).all() for total in jax.vmap(add, axis_name="d")(values))
    traced = jax.make_jaxpr(add, axis_env=[("d", 2)])([value[0] for value in values])
    carried = [x.aval.shape for equation in traced.eqns if "psum" in equation.primitive.name for x in equation.invars]
    assert sorted(carried) == [(5,), (15,), (600, 500)]
