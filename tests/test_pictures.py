"""Law 4 for the pictures of examples/cats_vs_dogs: each row once an epoch, and threads decide nothing."""

import importlib.util
import itertools
import os
from pathlib import Path

import cv2
import keras
import numpy as np
import pytest
import simplejpeg

import lockstep
from tests.data.programs import Order

PATH = Path(__file__).parents[1] / "examples" / "cats_vs_dogs" / "pictures.py"
# Not by the name that the example gives it: other examples have modules of the same names.
specification = importlib.util.spec_from_file_location("pictures_of_the_example", PATH)
pictures = importlib.util.module_from_spec(specification)
specification.loader.exec_module(pictures)

ROWS, SIZE = 23, 16


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """JPEGs of many shapes, some smaller than what is asked for; the number of the row is its label."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    made = []
    for row in range(ROWS):
        coarse = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
        made.append((str(folder / f"{row}.jpg"), row))
        smooth = cv2.resize(coarse, (10 + 7 * row, 90 - 3 * row))
        Path(made[-1][0]).write_bytes(simplejpeg.encode_jpeg(smooth, quality=95))
    return made


def epochs(batches, number, batch_size):
    """The first epochs as lists of batches."""
    steps = -(-ROWS // batch_size)
    taken = iter(batches)
    return [list(itertools.islice(taken, steps)) for _ in range(number)]


def order(epoch):
    return [int(row) for _, labels in epoch for row in labels]


@pytest.mark.parametrize("batch_size", [1, 5, 23, 40])
def test_each_row_comes_once_an_epoch_whatever_remains(files, batch_size):
    found = epochs(pictures.batches(files, SIZE, batch_size, seed=3, threads=2), 3, batch_size)
    assert all(sorted(order(epoch)) == list(range(ROWS)) for epoch in found)
    assert len({tuple(order(epoch)) for epoch in found}) == 3
    assert [len(x) for x, _ in found[0]] == [min(batch_size, ROWS - at) for at in range(0, ROWS, batch_size)]


def test_threads_decide_nothing(files):
    streams = [epochs(pictures.batches(files, SIZE, 5, seed=3, threads=threads), 2, 5) for threads in (1, 2, 7)]
    for other in streams[1:]:
        for (x, y), (x_other, y_other) in zip(*map(itertools.chain.from_iterable, (streams[0], other)), strict=True):
            np.testing.assert_array_equal(y, y_other)
            np.testing.assert_array_equal(x, x_other)


def test_an_augmented_picture_depends_on_seed_epoch_and_row(files):
    def by_row(seed, batch_size):
        found = epochs(pictures.batches(files, SIZE, batch_size, seed=seed), 2, batch_size)
        return [{int(row): x[at] for x, y in epoch for at, row in enumerate(y)} for epoch in found]

    first, second = by_row(3, 5)
    for row, picture in by_row(3, 8)[0].items():  # Not on the batch that it lies in.
        np.testing.assert_array_equal(picture, first[row])
    other = by_row(4, 5)[0]
    assert sum(np.array_equal(first[row], second[row]) for row in range(ROWS)) <= 1
    assert sum(np.array_equal(first[row], other[row]) for row in range(ROWS)) <= 1


def test_without_a_seed_it_is_one_pass_in_order(files):
    (epoch, nothing) = epochs(pictures.batches(files, SIZE, 5, threads=2), 2, 5)
    assert order(epoch) == list(range(ROWS))
    assert nothing == []


def test_a_stream_goes_on_at_any_step(files):
    stream = iter(pictures.batches(files, SIZE, 5, seed=3, threads=2))
    expected = list(itertools.islice(stream, 12))
    again = iter(pictures.batches(files, SIZE, 5, seed=3, threads=3))
    again.set_state({"next_index": 7})
    for (x, y), (x_expected, y_expected) in zip(itertools.islice(again, 5), expected[7:], strict=True):
        np.testing.assert_array_equal(y, y_expected)
        np.testing.assert_array_equal(x, x_expected)


def test_a_smaller_decoding_gives_nearly_the_same_picture(files):
    path, _ = files[8]
    fewer_pixels, whole = (pictures.decoded(path, size) for size in (SIZE, 10_000))
    assert SIZE <= min(fewer_pixels.shape[:2]) <= min(whole.shape[:2]) / 2
    expected = cv2.resize(whole, (SIZE, SIZE), interpolation=cv2.INTER_AREA).astype(float)
    found = pictures.resized(fewer_pixels, SIZE)
    # Of 255. Two ways of making a picture smaller differ a little at its edges; in the wrong colors it is another one.
    assert np.abs(found - expected).mean() < 10
    assert np.abs(found[..., ::-1] - expected).mean() > 40


def test_a_picture_is_decoded_whole_where_a_half_would_be_too_small(files):
    path, row = files[-1]
    assert pictures.decoded(path, SIZE).shape == (90 - 3 * row, 10 + 7 * row, 3)


def test_a_file_that_is_no_jpeg_is_named(tmp_path):
    path = tmp_path / "broken.jpg"
    path.write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match=r"broken\.jpg cannot be read as a JPEG"):
        list(pictures.batches([(str(path), 0)], SIZE, 1))


@pytest.mark.slow
def test_fit_sees_each_row_once_an_epoch(files):
    seen = Order()
    with lockstep.MirroredStrategy(replicas=2).scope():
        model = keras.Sequential([keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[seen.metric])
    stream = pictures.batches(files, SIZE, 5, seed=3)
    model.fit(stream, epochs=2, steps_per_epoch=5, shuffle=False, verbose=0, callbacks=[seen])
    expected = epochs(pictures.batches(files, SIZE, 5, seed=3), 2, 5)
    assert [list(epoch) for epoch in seen.epochs] == [order(epoch) for epoch in expected]


@pytest.mark.data
def test_the_real_pictures_are_found(cats_vs_dogs):
    train, test = (pictures.find(cats_vs_dogs / part) for part in ("train", "test"))
    assert [sum(label == wanted for _, label in files) for files in (train, test) for wanted in (0, 1)] == [
        150,
        150,
        50,
        50,
    ]
    assert {os.path.basename(path).split(".")[0] for path, label in train if label} == {"dog"}
    (x, y), *_ = pictures.batches(test, 96, 100)
    assert x.shape == (100, 96, 96, 3)
    assert y.sum() == 50
