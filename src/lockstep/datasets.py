"""Readers of the data sets of the examples: from a folder, else through ``keras.datasets``, which downloads.

``$LOCKSTEP_DATA`` may name a folder with ``mnist/`` (the four IDX files, gzipped), ``cifar10/`` (the binary version,
xz-compressed) and ``reuters/`` (token ranks in one ``.npz``). The data are not part of Lockstep.
"""

import gzip
import lzma
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep._errors import InputError, instance_of
from lockstep._keras import keras

__all__ = ["cifar10", "mnist", "reuters"]

Split = tuple[np.ndarray, np.ndarray]


def mnist(environment: Mapping[str, str] = os.environ) -> tuple[Split, Split]:
    """Handwritten digits: MNIST.

    Source: LeCun, Cortes and Burges; the IDX format is described with the data set.

    Args:
        environment: environment variables; ``LOCKSTEP_DATA`` may be among them.

    Returns:
        Pictures ``uint8 (60000, 28, 28)`` and labels ``(60000,)`` for training, then 10,000 for testing.

    Raises:
        FileNotFoundError: ``LOCKSTEP_DATA`` names a folder without this data set.
        InputError: ``LOCKSTEP_DATA`` is not set, and Keras could not fetch the data.
        ValueError: a file there has another format.
    """
    folder = _folder("mnist", environment)
    if folder is None:
        return _from_keras(keras.datasets.mnist)
    return _idx_split(folder, "train"), _idx_split(folder, "t10k")


def cifar10(environment: Mapping[str, str] = os.environ) -> tuple[Split, Split]:
    """Small photographs: CIFAR-10.

    The folder may hold only the first of the five training files: n is 10,000 then, else 50,000.
    Source: Krizhevsky, "Learning multiple layers of features from tiny images" (2009).

    Args:
        environment: environment variables; ``LOCKSTEP_DATA`` may be among them.

    Returns:
        Pictures ``uint8 (n, 32, 32, 3)`` and labels ``(n,)`` for training, then 10,000 for testing.

    Raises:
        FileNotFoundError: ``LOCKSTEP_DATA`` names a folder without this data set.
        InputError: ``LOCKSTEP_DATA`` is not set, and Keras could not fetch the data.
    """
    folder = _folder("cifar10", environment)
    if folder is None:
        return _from_keras(keras.datasets.cifar10)
    parts = [_cifar_file(path) for path in sorted(folder.glob("data_batch_*.bin.xz"))]
    train = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    return train, _cifar_file(folder / "test_batch.bin.xz")


def reuters(length: int, environment: Mapping[str, str] = os.environ) -> tuple[Split, Split]:
    """Newswires as word indices: Reuters.

    Indices, order and split are those of ``keras.datasets.reuters.load_data()``; texts are truncated and padded at their
    beginning, as ``keras.utils.pad_sequences`` does.

    Args:
        length: number of words of each text.
        environment: environment variables; ``LOCKSTEP_DATA`` may be among them.

    Returns:
        Texts ``int32 (8982, length)`` and topics ``(8982,)`` for training, then 2,246 for testing.

    Raises:
        FileNotFoundError: ``LOCKSTEP_DATA`` names a folder without this data set.
        InputError: ``LOCKSTEP_DATA`` is not set, and Keras could not fetch the data.
    """
    folder = _folder("reuters", environment)
    if folder is None:
        splits = _fetched(keras.datasets.reuters)
        return tuple((keras.utils.pad_sequences(x, length), y) for x, y in splits)  # type: ignore[return-value]
    with np.load(folder / "reuters_flat.npz") as archive:
        tokens, offsets, labels = (archive[name] for name in ("tokens", "offsets", "labels"))
    order = np.arange(len(labels))
    np.random.RandomState(113).shuffle(order)
    # Keras numbers words from 4 on: 0 is padding, 1 begins a text, 2 stands for unknown words, to which the rarest belongs.
    words = tokens.astype(np.int32) + 3
    words[words == words.max()] = 2
    texts = [np.concatenate([[1], words[offsets[row] : offsets[row + 1]]]) for row in order]
    x, y = keras.utils.pad_sequences(texts, length), labels[order].astype(np.int64)
    training = int(len(x) * 0.8)
    return (x[:training], y[:training]), (x[training:], y[training:])


def _folder(name: str, environment: Mapping[str, str]) -> Path | None:
    """Return the folder of a data set, or None if ``LOCKSTEP_DATA`` is not set and Keras must fetch it."""
    instance_of(Mapping, "environment", environment, "a dict of environment variables")
    root = environment.get("LOCKSTEP_DATA")
    folder = Path(root) / name if root else None
    if folder and not folder.is_dir():
        raise FileNotFoundError(
            f"LOCKSTEP_DATA={root} has no folder {name!r}. Fix: put the files there, or unset LOCKSTEP_DATA to have Keras fetch them."
        )
    return folder


def _from_keras(module: Any) -> tuple[Split, Split]:
    (x, y), (x_test, y_test) = _fetched(module)
    return (x, y.reshape(-1)), (x_test, y_test.reshape(-1))


def _fetched(module: Any) -> Any:
    name = module.__name__.rpartition(".")[2]
    try:
        return module.load_data()
    except Exception as error:  # Keras raises a plain Exception.
        raise InputError(
            f"{name}: Keras could not fetch it: {error}. Fix: set LOCKSTEP_DATA to a folder in which there is {name}/, as "
            "lockstep.datasets says, or try again with a network."
        ) from error


def _idx_split(folder: Path, name: str) -> Split:
    return _idx(folder / f"{name}-images-idx3-ubyte.gz"), _idx(folder / f"{name}-labels-idx1-ubyte.gz")


def _idx(path: Path) -> np.ndarray:
    """Read an IDX file of bytes: 2 zero bytes, type 8, number of axes, the lengths as big-endian int32, the bytes."""
    content = gzip.decompress(path.read_bytes())
    axes = content[3]
    if content[:3] != b"\x00\x00\x08":
        raise ValueError(
            f"{path} is not an IDX file of bytes: it begins with {content[:3].hex()}, expected 000008. Fix: download it again."
        )
    shape = np.frombuffer(content, ">i4", axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _cifar_file(path: Path) -> Split:
    """Read 10,000 records of 1 byte label and 3 × 1,024 bytes of red, green and blue."""
    records = np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8).reshape(-1, 3073)
    pictures = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pictures), records[:, 0]
