"""Claim: the images of examples/cats_vs_dogs are read at least as fast as ``tf.data`` reads them.

The same JPEGs, listed 80 times to have as many rows as the whole data set; batches of 64 as uint8. All variants take turns in one process,
1,200 shuffled rows each, several times; the result is the median. If other programs use the machine, rows per second depend on the cores
that a variant gets, which is also shown; the processor time per row hardly depends on it. Needs the environment of ./scripts/test-inputs
and LOCKSTEP_DATA.

"tf.data" decodes whole images, and for a random crop only the crop; "smaller" decodes at a half, a quarter or an eighth if that is
enough, as Lockstep does; "antialias" smooths before downscaling, as Pillow always does. "Pillow" is Lockstep's reader with Pillow instead
of simplejpeg and OpenCV.
"""

import os
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "cats_vs_dogs"))

import grain
import keras
import numpy as np
import pictures
import tensorflow as tf
from PIL import Image
from results_file import write

SIZES, BATCH, LISTED, ROWS, ROUNDS = (96, 224), 64, 80, 1200, 9
FOLDER = Path(os.environ["LOCKSTEP_DATA"]) / "cats_vs_dogs" / "train"
THREADS = os.cpu_count()
PACKAGES = ("grain", "simplejpeg", "opencv-python-headless", "pillow", "tensorflow")


# --- tf.data --------------------------------------------------------------------------------------------------------------


def tf_data(files, size, augment, smaller=False, antialias=False):
    paths, labels = zip(*files, strict=True)

    def read(path, label):
        content = tf.io.read_file(path)
        if smaller:
            picture = tf_smaller(content, size)
        elif augment:
            picture = tf.io.decode_and_crop_jpeg(content, tf_crop(tf.io.extract_jpeg_shape(content)), channels=3)
        else:
            picture = tf.io.decode_jpeg(content, channels=3)
        if smaller and augment:
            top, left, height, width = tf.unstack(tf_crop(tf.shape(picture)))
            picture = picture[top : top + height, left : left + width]
        picture = tf.cast(tf.image.resize(picture, (size, size), antialias=antialias), tf.uint8)
        return (tf.image.random_flip_left_right(picture) if augment else picture), label

    rows = tf.data.Dataset.from_tensor_slices((list(paths), list(labels))).shuffle(len(files)).take(ROWS)
    rows = rows.map(read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
    return rows.batch(BATCH).prefetch(tf.data.AUTOTUNE).as_numpy_iterator


def tf_crop(shape):
    """Top, left, height and width of a random crop."""
    sides = tf.cast(shape[:2], tf.float32)
    kept = tf.math.round(sides * tf.random.uniform((), pictures.SMALLEST_CROP, 1))
    return tf.cast(tf.concat([tf.random.uniform((2,)) * (sides - kept + 1), kept], 0), tf.int32)


def tf_smaller(content, size):
    shape = tf.io.extract_jpeg_shape(content)
    times = tf.searchsorted([2, 4, 8], [tf.minimum(shape[0], shape[1]) // size], side="right")[0]
    return tf.switch_case(times, [lambda r=r: tf.io.decode_jpeg(content, channels=3, ratio=r) for r in (1, 2, 4, 8)])


# --- ours, with two libraries ---------------------------------------------------------------------------------------------


def ours(files, size, augment):
    if not augment:  # In another order each epoch, as tf.data does.
        return stream(files, lambda row, generator: (pictures.resized(pictures.decoded(row[0], size), size), row[1]))
    return stream(files, lambda row, generator: (pictures.augmented(row[0], size, generator), row[1]))


def pillow(files, size, augment):
    def read(row, generator):
        with Image.open(row[0]) as picture:
            share = generator.uniform(pictures.SMALLEST_CROP, 1) if augment else 1
            picture.draft("RGB", (round(size / share), round(size / share)))
            kept = [share * side for side in picture.size]
            left, top = (generator.uniform(0, side - part) for side, part in zip(picture.size, kept, strict=True))
            box = (left, top, left + kept[0], top + kept[1])
            result = np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR, box))
        return (result[:, ::-1] if augment and generator.random() < 0.5 else result), row[1]

    return stream(files, read)


def stream(files, read):
    """The first rows of what ``pictures.batches`` makes."""
    rows = grain.MapDataset.source(files).seed(0).random_map(read).shuffle()[:ROWS].batch(BATCH)
    read_options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=THREADS + 2)
    return rows.to_iter_dataset(read_options).__iter__


# --- measuring ------------------------------------------------------------------------------------------------------------


def measure(files, size, augment):
    """Rows of the table for one size."""
    ways = {
        "tf.data": tf_data(files, size, augment),
        "tf.data, smaller": tf_data(files, size, augment, smaller=True),
        "tf.data, antialias": tf_data(files, size, augment, antialias=True),
        "ours": ours(files, size, augment),
        "Pillow": pillow(files, size, augment),
    }
    rates, costs = ({name: [] for name in ways} for _ in range(2))
    for number in range(ROUNDS + 1):
        for name, begin in ways.items():
            rate, cost = once(begin)
            if number:  # The first round warms up.
                rates[name].append(rate)
                costs[name].append(cost)
    return [
        (
            size,
            "crop, flip" if augment else "none",
            name,
            round(statistics.median(rates[name])),
            f"{statistics.median(rate * cost for rate, cost in zip(rates[name], costs[name], strict=True)):.1f}",
            round(1e6 * statistics.median(costs[name])),
            f"{ratio(rates[name], rates['tf.data']):.2f}",
            f"{ratio(costs['tf.data'], costs[name]):.2f}",
        )
        for name in ways
    ]


def once(begin):
    """Rows a second and seconds of processor time a row."""
    clock, processor = time.perf_counter(), time.process_time()
    rows = sum(len(labels) for _, labels in begin())
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    if rows != ROWS:
        raise SystemExit(f"{rows} rows came, expected {ROWS}")
    return rows / clock, processor / rows


def ratio(above, below):
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def parts(files, size):
    """Microseconds of one thread that a picture takes: to read and decode, and with resizing; in the best of some passes."""
    steps = pictures.decoded, lambda path, size: pictures.resized(pictures.decoded(path, size), size)
    times = [[], []]
    for _ in range(5):
        for step, found in zip(steps, times, strict=True):
            start = time.thread_time()
            for path, _ in files:
                step(path, size)
            found.append(time.thread_time() - start)
    return [round(1e6 * min(found) / len(files)) for found in times]


def of_keras():
    """Rows a second of the first and of the second pass of Keras's own data set, and whether the order was the same."""
    dataset = keras.utils.image_dataset_from_directory(
        FOLDER, image_size=(96, 96), batch_size=BATCH, seed=0, format="grain", verbose=False
    )
    found = []
    for _ in range(2):
        start = time.perf_counter()
        labels = np.concatenate([np.asarray(labels) for _, labels in dataset])
        found.append((len(labels) / (time.perf_counter() - start), labels))
    return [round(rate) for rate, _ in found], np.array_equal(found[0][1], found[1][1])


def note(files):
    read, whole = zip(*(parts(files, size) for size in SIZES), strict=True)
    rates, same = of_keras()
    order = "the same order in both" if same else "another order in each"
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (
        "Ratios are medians of the rounds; above 1 is faster than tf.data. "
        f"Of ours, one thread takes {read[0]} µs a picture to read and decode it for {SIZES[0]} pixels and {whole[0]} µs with "
        f"resizing; for {SIZES[1]} pixels {read[1]} and {whole[1]} µs; the rest is Grain's. "
        f'`keras.utils.image_dataset_from_directory(format="grain")` at 96 pixels: {rates[0]} rows/s in its first '
        f"pass, in which XLA compiles the resizing for each shape of a picture, {rates[1]} in the second; {order}.\n\n{versions}."
    )


def main():
    once = pictures.find(FOLDER)
    rows = [line for size in SIZES for augment in (False, True) for line in measure(once * LISTED, size, augment)]
    columns = ("pixels", "augmentation", "way", "rows/s", "busy cores", "µs of processor a row")
    columns += ("rows/s against tf.data", "by processor time")
    write("pictures", "Reading pictures", columns, rows, note(once))


main()
