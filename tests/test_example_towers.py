"""The towers of ``examples/cifar10_towers``: what they draw, how their gradients meet, and what the loop prints and keeps."""

import functools
import importlib
import lzma
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import keras
import numpy as np
import pytest

import lockstep

FOLDER = Path(__file__).parents[1] / "examples" / "cifar10_towers"
LINE = re.compile(r"^step (\d+), loss (\d+\.\d+), (\d+) examples/s, (\d+\.\d+) s/batch$", re.MULTILINE)


@pytest.fixture
def example(monkeypatch):
    """The example's files, by name."""
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module
    for name in ("loop", "mirrored", "model", "single"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder of data with 64 pictures of noise, some brighter than others, and their labels."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 64).astype("uint8")
    pixels = rng.integers(0, 20, (64, 3072)) + 23 * labels[:, None]
    content = np.concatenate([labels[:, None], pixels.astype("uint8")], axis=1).tobytes()
    (folder / "cifar10").mkdir()
    for name in ("data_batch_1", "test_batch"):
        (folder / "cifar10" / f"{name}.bin.xz").write_bytes(lzma.compress(content))
    return folder


@pytest.fixture(scope="module")
def run(python, pictures):
    """Run a script of the example on the pictures, in a process of its own."""

    def run(script, folder, *arguments):
        options = ("--rows", 4, "--folder", folder, *arguments)
        return python(script=FOLDER / script, arguments=options, environ={"LOCKSTEP_DATA": str(pictures)}, timeout=200)

    return run


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    """Train 21 steps with a script, once: its folder and what the process left."""

    @functools.cache
    def trained(script):
        folder = tmp_path_factory.mktemp("trained")
        return folder, run(script, folder, "--steps", 21, "--checkpoint-steps", 20)

    return trained


@pytest.mark.slow
@pytest.mark.parametrize("script", ["single.py", pytest.param("mirrored.py", marks=pytest.mark.xdist_group("towers"))])
def test_towers_print_a_line_every_ten_steps_and_name_checkpoints_by_step(script, trained):
    folder, done = trained(script)
    assert done.returncode == 0, done.stderr
    lines = [[float(figure) for figure in found] for found in LINE.findall(done.stdout)]
    assert [line[0] for line in lines] == [10, 20]
    for _, _, examples, seconds in lines:
        assert examples * seconds == pytest.approx(4, rel=0.1)  # rows of one tower's batch; the figures are rounded
    assert re.search(r"^test accuracy \d\.\d{4}", done.stdout, re.MULTILINE)
    assert sorted(path.name for path in folder.glob("*.keras")) == [
        "model-step-000020.keras",
        "model-step-000021.keras",
    ]


@pytest.mark.slow
@pytest.mark.xdist_group("towers")
def test_towers_that_were_stopped_end_with_the_same_weights(run, trained, tmp_path):
    whole, done = trained("mirrored.py")
    assert done.returncode == 0, done.stderr
    for steps in (10, 20):
        done = run("mirrored.py", tmp_path, "--steps", steps, "--checkpoint-steps", 20, "--save-freq", "0.001 s")
        assert done.returncode == 0, done.stderr
    assert [int(found[0]) for found in LINE.findall(done.stdout)] == [20]
    found, expected = (keras.models.load_model(folder / "model-step-000020.keras") for folder in (tmp_path, whole))
    for one, other in zip(
        [*found.variables, *found.optimizer.variables],
        [*expected.variables, *expected.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_towers_end_at_a_loss_that_is_not_finite_and_keep_the_last_good_checkpoint(run, tmp_path):
    stairs_up = ("--decay", "1e30", "--decay-steps", 5)  # the learning rate is too high from step 6 on
    done = run("mirrored.py", tmp_path, "--steps", 20, "--checkpoint-steps", 2, *stairs_up)
    assert done.returncode == 1
    saved = sorted(tmp_path.glob("*.keras"))
    error = done.stderr.splitlines()[-1]
    assert re.match(
        r"FloatingPointError: (The loss of step|After step) \d+.* is no finite number, so training ends here\.", error
    )
    assert f"The last good checkpoint: {saved[-1]}. Try a lower --learning-rate." in error
    assert "model-step-000004.keras" in [path.name for path in saved]
    for path in saved:
        model = keras.models.load_model(path)
        assert all(np.isfinite(variable).all() for variable in [*model.variables, *model.optimizer.variables])
    assert int(model.optimizer.iterations) == int(path.stem[-6:])


def test_nan_weights_are_not_written_although_every_loss_was_a_number(example, tmp_path):
    loop = example("loop")
    model = example("model").build(0.1, 0.3, 500)
    given = SimpleNamespace(folder=tmp_path, steps=2, checkpoint_steps=1)

    def step(state, batch):
        return np.float32(1), state if batch == 1 else jax.tree.map(lambda value: value * np.nan, state)

    with pytest.raises(
        FloatingPointError, match=r"After step 2, .*kernel is no finite number.*model-step-000001\.keras"
    ):
        loop.train(model, step, lambda start: [1, 2], given)
    assert [path.name for path in tmp_path.iterdir()] == ["model-step-000001.keras"]


def test_towers_draw_batches_of_their_own_and_an_epoch_holds_each_picture_once(example):
    module = example("model")
    x = np.zeros((30, 32, 32, 3), "uint8")
    strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=4)
    dataset = strategy.distribute_datasets_from_function(
        lambda context: module.batches(x, np.arange(30), 2, context.num_replicas_in_sync, 15, 7)
    )
    drawn = [[own.tolist() for own in labels.values] for _, labels in dataset]
    assert all(len(own) == 2 for towers in drawn for own in towers)
    epochs = np.reshape(drawn, (4, 30))  # 15 steps × 4 towers × 2 rows
    for epoch in epochs:
        assert sorted(epoch) == list(range(30))
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_batch_depends_on_seed_step_and_tower_alone(example):
    module = example("model")
    x = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3)).astype("uint8")

    def drawn(steps, seed):
        return [pictures for pictures, _ in module.batches(x, np.arange(30), 3, 2, steps, seed)]

    once, again, other = drawn(3, 7), drawn(2, 7), drawn(3, 8)
    assert len(once) == 6  # 3 steps × 2 towers
    for one, same in zip(once[:4], again, strict=True):
        np.testing.assert_array_equal(one, same)
    for one, different in zip(once, other, strict=True):
        assert not np.array_equal(one, different)


@pytest.mark.slow
def test_a_changed_picture_is_a_part_of_it_with_another_contrast(example):
    module = example("model")
    x = np.random.default_rng(0).integers(0, 256, (50, 32, 32, 3)).astype("uint8")
    changed = module.changed(x, np.random.default_rng(1))
    assert changed.shape == (50, 24, 24, 3)
    assert changed.dtype == np.float32
    seen = [origin(picture, part) for picture, part in zip(module.scaled(x), changed, strict=True)]
    assert {turned for _, turned, _ in seen} == {False, True}
    assert len({place for place, _, _ in seen}) > 25
    factors = [factor for _, _, factor in seen]
    assert 0.6 <= min(factors) < 0.8 < 1.2 < max(factors) <= 1.4


def origin(picture, part):
    """Where a part comes from, whether it is turned, and the factor of its contrast: by trying all of them."""
    for top, left, turned in np.ndindex(9, 9, 2):
        found = picture[top : top + 24, left : left + 24][:, :: -1 if turned else 1]
        away = found - found.mean(axis=(0, 1))
        factor = (part - part.mean(axis=(0, 1))).std() / away.std()
        if np.allclose(part, found.mean(axis=(0, 1)) + factor * away, atol=1e-4):
            return (top, left), bool(turned), factor
    raise AssertionError("the part is nowhere in the picture")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_the_average_of_the_towers_gradients_is_the_gradient_of_the_joined_batch(example, devices):
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(3, 5)).astype("float32"), rng.integers(0, 4, 3)) for _ in range(4)]
    strategy = lockstep.MirroredStrategy(devices, replicas=4)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(4)])
        model.compile(keras.optimizers.SGD(1.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    state = tuple([variable.value for variable in kind] for kind in example("loop").variables_of(model))
    (towers,) = strategy.distribute_datasets_from_function(lambda context: batches)
    joined = tuple(map(np.concatenate, zip(*batches, strict=True)))
    loss, moved = example("mirrored").make_step(model, strategy)(state, towers)
    expected_loss, expected = example("single").make_step(model)(state, joined)
    # float32, added in another order
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for value, wanted, before in zip(moved[0], expected[0], state[0], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6)
        assert not np.array_equal(value, before)


def test_the_learning_rate_falls_in_stairs_that_count_steps(example):
    optimizer = example("model").build(1.0, 0.5, 10).optimizer
    rates = []
    for step in (0, 9, 10, 19, 20):
        optimizer.iterations.assign(step)
        rates.append(float(optimizer.learning_rate))
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]


@pytest.mark.slow
def test_the_averages_of_the_weights_are_what_is_evaluated(example, tmp_path, capsys):
    loop, module = example("loop"), example("model")
    strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
    with strategy.scope():
        model = module.build(0.1, 0.3, 500)
    x = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3)).astype("uint8")
    dataset = strategy.distribute_datasets_from_function(
        lambda context: module.batches(x, np.arange(30) % 10, 4, context.num_replicas_in_sync, 3, 0)
    )
    given = SimpleNamespace(folder=tmp_path, steps=3, checkpoint_steps=1)
    loop.train(model, example("mirrored").make_step(model, strategy), lambda start: dataset, given)
    loop.evaluate(model, np.zeros((2, 24, 24, 3)), np.zeros(2))
    saved = [keras.models.load_model(path).trainable_variables for path in sorted(tmp_path.iterdir())]
    for variable, first, *others in zip(model.trainable_variables, *saved, strict=True):
        average = np.asarray(first)  # Keras begins an average with the first weights after a step
        for weight in others:
            average = 0.99 * average + 0.01 * np.asarray(weight)
        np.testing.assert_allclose(variable, average, rtol=1e-5, atol=1e-6)  # float32
    assert "test accuracy" in capsys.readouterr().out
