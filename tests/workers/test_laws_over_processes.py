"""Laws 1 and 2 over processes: how devices are cut into workers changes no number, and no bit where that is asked for."""

import functools

import numpy as np
import pytest

from tests.laws.compare import RELATIVE, assert_close
from tests.workers.jobs import PROGRAMS

pytestmark = pytest.mark.xdist_group("processes")

NUMBERS = (["mlp", False], ["cnn", False])
BITS = (["cnn_normalized", True],)
REPLICAS = 8

# Workers, and devices of each.
SHAPES = [(2, 2), *(pytest.param(*shape, marks=pytest.mark.full) for shape in ((4, 1), (3, 1), (1, 4)))]


def arrays(folder):
    """By net the arrays that a process has left."""
    return {path.stem: dict(np.load(path)) for path in sorted(folder.glob("*.npz"))}


@pytest.fixture(scope="module")
def alone(forks, tmp_path_factory):
    """What one process leaves, made once: on plain Keras, or on so many devices."""

    @functools.cache
    def found(devices=None):
        folder = tmp_path_factory.mktemp("alone")
        config = {"folder": str(folder), "nets": BITS if devices else NUMBERS, "plain": not devices}
        config |= {"devices": devices, "replicas": REPLICAS}
        process = forks[0].start(folder, "alone", PROGRAMS / "laws.py", config, {})
        assert process.end() == 0, process.said
        return arrays(folder)

    return found


@pytest.mark.parametrize(("workers", "devices"), SHAPES)
def test_numbers_and_bits_are_those_of_one_process(job, alone, workers, devices):
    run = job(workers)
    folders = [run.folder / str(index) for index in range(workers)]
    for folder in folders:
        folder.mkdir()
    each = lambda index: {"folder": str(folders[index])}  # noqa: E731
    # The deterministic one comes first, because it settles the thread pool.
    run.run("laws", each, nets=BITS + NUMBERS, devices=devices, replicas=REPLICAS)
    found, *others = map(arrays, folders)
    for other in others:
        assert_same_bits(other, found)
    plain = alone()
    assert_same_bits({"cnn_normalized_deterministic": found.pop("cnn_normalized_deterministic")}, alone(devices=1))
    assert found.keys() == plain.keys() == {"mlp", "cnn"}
    for net, ours in found.items():
        assert ours.keys() == plain[net].keys()
        for name, value in plain[net].items():
            assert_close(ours[name], value, RELATIVE, f"{net}: {name}")


def assert_same_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for net, values in theirs.items():
        assert ours[net].keys() == values.keys()
        for name, value in values.items():
            assert ours[net][name].tobytes() == value.tobytes(), f"{net}: {name}"
