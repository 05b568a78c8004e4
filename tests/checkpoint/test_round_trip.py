"""What is written comes back, of every kind; what cannot come back is refused before anything is written."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from lockstep import OptionError
from lockstep._array_encoding import DTYPES
from lockstep.checkpoint.manifest import VERSION
from lockstep.checkpoint.serialization import Snapshot, widened
from lockstep.checkpoint.store import CheckpointStore

from .cases import assert_equal, silent, small, store_in, traced_memory

DATA = Path(__file__).parent / "data"


def there_and_back(directory, snapshot):
    store = CheckpointStore(directory, log=silent)
    path = store.write(1, snapshot)
    assert store.verify(path) == []
    return store.read(path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(dtype, tmp_path):
    bits = np.random.default_rng(0).integers(0, 256, (5, 3, DTYPES[dtype].itemsize), np.uint8)
    array = bits.view(DTYPES[dtype])[..., 0] if dtype != "bool" else (bits[..., 0] > 100)
    given_ = {"whole": array, "turned": array.T, "every other": array[::-2, ::2], "one": array[0, 0], "none": array[:0]}
    found = there_and_back(tmp_path, Snapshot(given_))
    assert_equal(found, Snapshot(given_))
    assert found.arrays["one"].shape == ()
    assert all(array.flags.writeable for array in found.arrays.values())


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i2", ">u8", ">c16"])
def test_what_was_big_endian_comes_back_in_the_order_of_this_machine(dtype, tmp_path):
    array = np.arange(12).reshape(3, 4).astype(dtype)
    found = there_and_back(tmp_path, Snapshot({"a": array, "b": array[:, ::2].T})).arrays
    assert found["a"].dtype.isnative
    np.testing.assert_array_equal(found["a"], array)
    np.testing.assert_array_equal(found["b"], array[:, ::2].T)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
FACTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda facts: st.lists(facts, max_size=3) | st.dictionaries(st.text(max_size=5), facts, max_size=3),
    max_leaves=10,
)
PLAIN = [dtype for dtype in DTYPES.values() if dtype.isbuiltin == 1]
ARRAYS = st.sampled_from(PLAIN).flatmap(
    lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(arrays=st.dictionaries(TEXT, ARRAYS, max_size=4), facts=st.dictionaries(st.text(), FACTS, max_size=3))
def test_any_names_arrays_and_facts_come_back(tmp_path_factory, arrays, facts):
    snapshot = Snapshot(arrays, facts)
    assert repr(snapshot.metadata) == repr(facts)
    assert_equal(there_and_back(tmp_path_factory.mktemp("store"), snapshot), snapshot)


def test_numpy_reads_the_arrays_without_us(tmp_path):
    path = store_in(tmp_path, 3).paths()[0]
    with np.load(path / "arrays.npz", allow_pickle=False) as found:
        assert set(found) == set(small(3).arrays)
        for name in ("model/dense/kernel", "seed/Zufall «ω»", "metrics/empty"):
            np.testing.assert_array_equal(found[name], small(3).arrays[name], strict=True)
        assert found["optimizer/dense/kernel/momentum"].dtype == np.uint16
    assert json.loads((path / "manifest.json").read_text())["step"] == 3


def test_the_same_state_gives_the_same_bytes(tmp_path):
    (one,), (other,) = store_in(tmp_path / "a", 5).paths(), store_in(tmp_path / "b", 5).paths()
    for name in ("arrays.npz", "manifest.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_a_checkpoint_without_arrays_is_one(tmp_path):
    assert_equal(there_and_back(tmp_path, Snapshot({})), Snapshot({}))


@pytest.mark.parametrize(
    ("arrays", "facts", "message"),
    [
        ({"a": np.asarray([object()])}, {}, r"arrays\['a'\] cannot be stored: its dtype is object"),
        ({"a": np.asarray(["text"])}, {}, "its dtype is <U4"),
        ({"a": np.zeros(1, "datetime64[s]")}, {}, "dtype is datetime64"),
        ({"a": np.zeros(1, [("x", "f4")])}, {}, "its dtype is "),
        ({"a\0b": np.zeros(1)}, {}, "without NUL"),
        ({3: np.zeros(1)}, {}, "names of type str without NUL, got 3"),
        ({"\ud800": np.zeros(1)}, {}, "no Unicode text"),
        ({"ω" * 40_000: np.zeros(1)}, {}, "names of at most 65000 bytes, got one of 80000"),
        ({}, {"a": {"b": [1, (2,)]}}, r"metadata\['a'\]\['b'\]\[1\]: expected None, bool, .* got \(2,\) \(tuple\)"),
        ({}, {"a": {1: 2}}, r"metadata\['a'\]: expected keys of type str, got 1"),
        ({}, {"a": np.float32(1)}, "Fix: put numbers of NumPy into the arrays"),
    ],
)
def test_what_would_not_come_back_is_refused(arrays, facts, message):
    with pytest.raises(OptionError, match=message):
        Snapshot(arrays, facts)


def test_a_snapshot_keeps_its_facts_whatever_becomes_of_them():
    facts = {"history": {"loss": [1.0]}}
    snapshot = Snapshot({}, facts)
    facts["history"]["loss"].append(2.0)
    assert snapshot.metadata == {"history": {"loss": [1.0]}}


@pytest.mark.parametrize("kind", ["plain", "turned", "big-endian"])
def test_writing_takes_a_few_megabytes_whatever_the_size_and_reading_takes_the_arrays_once(kind, tmp_path):
    plain = np.arange(5_000_000.0).reshape(1000, 5000)  # 40 MB
    array = {"plain": plain, "turned": plain.T, "big-endian": plain.astype(">f8")}[kind]
    snapshot, store = Snapshot({"a": array}), CheckpointStore(tmp_path)
    with traced_memory() as peak:
        path = store.write(1, snapshot)
    assert peak() < 4e6
    with traced_memory() as peak:
        store.read(path)
    assert peak() < 44e6


@pytest.mark.parametrize("version", range(1, VERSION + 1))
def test_a_checkpoint_of_every_format_version_loads(version):
    loaded = CheckpointStore(DATA / f"version_{version}", log=silent).newest()
    assert loaded.step == 12
    arrays = {name: loaded.arrays[name] for name in small().arrays}  # Those in shards are read last.
    assert_equal(Snapshot(arrays, loaded.metadata), small(12))


@pytest.mark.parametrize("name", [name for name in DTYPES if DTYPES[name].isbuiltin != 1])
def test_widened_numbers_are_the_same(name):
    array = (
        np.arange(256, dtype=np.uint8).view(DTYPES[name]) if DTYPES[name].itemsize == 1 else np.ones(3, DTYPES[name])
    )
    wide = widened(array)
    assert wide.dtype in (np.float32, np.int8, np.uint8)
    assert wide.astype(DTYPES[name]).astype(np.float64).tolist() == pytest.approx(
        array.astype(np.float64).tolist(), abs=0, rel=0, nan_ok=True
    )


def test_neither_jax_nor_keras_is_needed():
    code = "import sys, lockstep.checkpoint.async_writer; print({'jax', 'keras'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr
