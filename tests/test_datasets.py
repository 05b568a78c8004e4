"""The readers, on files made here and on the real ones."""

import gzip
import lzma

import keras
import numpy as np
import pytest

import lockstep
from lockstep import datasets


def test_mnist_files_are_read(tmp_path):
    (tmp_path / "mnist").mkdir()
    pictures = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    for name in ("train", "t10k"):
        header = bytes([0, 0, 8, 3]) + np.array(pictures.shape, ">i4").tobytes()
        (tmp_path / "mnist" / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + pictures.tobytes()))
        header = bytes([0, 0, 8, 1]) + np.array([2], ">i4").tobytes()
        (tmp_path / "mnist" / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + bytes([7, 9])))
    (x, y), (x_test, _) = datasets.mnist({"LOCKSTEP_DATA": str(tmp_path)})
    np.testing.assert_array_equal(x, pictures)
    np.testing.assert_array_equal(x_test, pictures)
    assert y.tolist() == [7, 9]


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"PNG....."))
    with pytest.raises(ValueError, match="is not an IDX file of bytes"):
        datasets.mnist({"LOCKSTEP_DATA": str(tmp_path)})


def test_a_missing_folder_is_named():
    with pytest.raises(FileNotFoundError, match="has no folder 'reuters'"):
        datasets.reuters(10, {"LOCKSTEP_DATA": "/nowhere"})


def test_cifar_files_are_read(tmp_path):
    (tmp_path / "cifar10").mkdir()
    record = bytes([3]) + bytes([10] * 1024 + [20] * 1024 + [30] * 1024)
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        (tmp_path / "cifar10" / f"{name}.bin.xz").write_bytes(lzma.compress(record))
    (x, y), (x_test, _) = datasets.cifar10({"LOCKSTEP_DATA": str(tmp_path)})
    assert x.shape == (2, 32, 32, 3)
    assert x_test.shape == (1, 32, 32, 3)
    assert x[0, 5, 7].tolist() == [10, 20, 30]
    assert y.tolist() == [3, 3]


def test_without_a_folder_keras_fetches(monkeypatch):
    split = (np.zeros((2, 28, 28)), np.array([[1], [2]]))
    monkeypatch.setattr(keras.datasets.mnist, "load_data", lambda: (split, split))
    (_, y), _ = datasets.mnist({})
    assert y.tolist() == [1, 2]


def test_what_cannot_be_fetched_is_said_with_the_way_round(monkeypatch):
    def fails(*_, **__):
        raise Exception("URL fetch failure on https://…/mnist.npz: None -- Name or service not known")  # As Keras does.

    for module, read in (
        (keras.datasets.mnist, datasets.mnist),
        (keras.datasets.cifar10, datasets.cifar10),
        (keras.datasets.reuters, lambda environment: datasets.reuters(10, environment)),
    ):
        monkeypatch.setattr(module, "load_data", fails)
        with pytest.raises(lockstep.InputError, match=r"Keras could not fetch it: URL fetch failure .* LOCKSTEP_DATA"):
            read({})


@pytest.mark.slow
@pytest.mark.data
def test_the_real_files_have_the_numbers_of_keras(data_folder):
    (x, y), (x_test, y_test) = datasets.mnist()
    assert (x.shape, y.shape, x_test.shape, y_test.shape) == ((60_000, 28, 28), (60_000,), (10_000, 28, 28), (10_000,))
    (x, y), (x_test, y_test) = datasets.reuters(300)
    assert (x.shape, x_test.shape) == ((8_982, 300), (2_246, 300))
    assert max(x.max(), x_test.max()) == 30_981
    assert len(np.unique(y)) == 46
    (x, y), (x_test, y_test) = datasets.cifar10()
    assert (x.shape, x_test.shape) == ((10_000, 32, 32, 3), (10_000, 32, 32, 3))
    assert set(y.tolist()) == set(range(10))
