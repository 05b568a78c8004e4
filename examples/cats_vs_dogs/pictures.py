"""Folders of JPEGs as batches of ``uint8`` pictures, read by threads with Grain, simplejpeg and OpenCV.

Order and augmentation depend on the seed, the epoch and the row alone: threads decide neither. The place in the stream is
one integer, which the iterator gives and takes (``get_state``, ``set_state``).
"""

import math
import os
from pathlib import Path

import cv2
import grain
import simplejpeg

SMALLEST_CROP = 0.7  # of each side


def find(folder):
    """Paths and labels of the JPEGs in a folder with one folder for each class, in the order of their names."""
    names = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    return [(str(path), label) for label, name in enumerate(names) for path in sorted(Path(folder, name).glob("*.jpg"))]


def batches(files, size, batch_size, *, seed=None, threads=None):
    """Batches of ``uint8 (rows, size, size, 3)`` and labels ``(rows,)``; the last of an epoch may be smaller.

    With a seed they never end: each epoch has another order, and each picture is cropped and flipped at random. Without one
    they are the pictures as they are, in order, once.
    """
    threads = threads or os.cpu_count()
    rows = grain.MapDataset.source(files)
    if seed is None:
        whole = rows.map(lambda row: (resized(decoded(row[0], size), size), row[1])).batch(batch_size)
    else:
        # The shuffle comes last, so that the generator of a row belongs to (seed, epoch, row) and not to a place in the order.
        rows = rows.seed(seed).random_map(lambda row, generator: (augmented(row[0], size, generator), row[1]))
        whole = rows.shuffle().batch(batch_size).repeat()
    # A thread makes a batch at a time. A MapDataset would be read with Grain's default, 500 batches ahead.
    return whole.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads + 2))


def augmented(path, size, generator):
    """A crop of at least ``SMALLEST_CROP`` of each side, at random flipped."""
    share = generator.uniform(SMALLEST_CROP, 1)
    picture = decoded(path, math.ceil(size / share))
    height, width = (round(share * side) for side in picture.shape[:2])
    top = generator.integers(picture.shape[0] - height + 1)
    left = generator.integers(picture.shape[1] - width + 1)
    picture = resized(picture[top : top + height, left : left + width], size)
    return cv2.flip(picture, 1) if generator.random() < 0.5 else picture


def decoded(path, size):
    """The picture, at a half of its size or less where both sides keep ``size`` pixels: that takes less time."""
    try:
        return simplejpeg.decode_jpeg(Path(path).read_bytes(), min_height=size, min_width=size, min_factor=2)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as a JPEG: {error}") from error


def resized(picture, size):
    """Bilinear, both sides to ``size``."""
    return cv2.resize(picture, (size, size), interpolation=cv2.INTER_LINEAR)
