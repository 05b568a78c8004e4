"""What TensorBoard's own reader finds in the files, beside what Keras's history says."""

import io
import json
import os
import random
import signal

import jax
import keras
import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.util.tensor_util import make_ndarray

import lockstep
from lockstep.callbacks import BackupAndRestore, TensorBoard, ThroughputMonitor
from lockstep.fit.monitoring.step_timer import NAMES
from lockstep.fit.monitoring.tensorboard import (
    EventFile,
    StepProfiler,
    _learning_rates,
    crc32c,
    histogram,
    newest_steps,
    scalar,
)
from lockstep.tools.top import picture

from .runs import STEPS, built, data, fit

SPEED = set(NAMES[:4])


def shown(folder):
    """By tag the steps and arrays, in the order in which TensorBoard reads them."""
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["tensors"]
    return {tag: [(e.step, make_ndarray(e.tensor_proto)) for e in accumulator.Tensors(tag)] for tag in tags}


def curve(found, tag):
    return [(step, float(value)) for step, value in found[tag]]


def floats(values, steps):
    return [(step, float(np.float32(value))) for step, value in zip(steps, values, strict=True)]


def test_the_checksum_is_that_of_the_standard():
    for text, expected in (  # RFC 3720, B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ):
        assert crc32c(text) == expected


def test_curves_are_those_of_the_history_in_the_folders_of_keras(tmp_path):
    model = built(optimizer=keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)))
    logs = fit(model, TensorBoard(tmp_path), epochs=3, validation_split=0.2)
    train, validation = shown(tmp_path / "train"), shown(tmp_path / "validation")
    assert set(train) == {"keras", "epoch_loss", "epoch_mae", "epoch_learning_rate"} | SPEED
    for name in ("loss", "mae"):
        assert curve(train, f"epoch_{name}") == floats(logs[name], range(3))
        assert curve(validation, f"epoch_{name}") == floats(logs[f"val_{name}"], range(3))
        tag = f"evaluation_{name}_vs_iterations"
        assert curve(validation, tag) == floats(logs[f"val_{name}"], (4, 8, 12))
    rates = [0.1 * 0.5 ** (step / 2) for step in (4, 8, 12)]
    np.testing.assert_allclose([rate for _, rate in curve(train, "epoch_learning_rate")], rates, rtol=1e-6)
    assert [step for step, _ in train["time/step"]] == [4, 8, 12]


def test_steps_are_those_that_plain_keras_logs(tmp_path):
    expected = []

    class Seen(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            expected.append(logs["loss"])

    fit(built(), Seen())
    fit(built(), TensorBoard(tmp_path / "each", update_freq="batch", write_steps_per_second=True))
    found = shown(tmp_path / "each" / "train")
    assert curve(found, "batch_loss") == floats(expected, range(1, 2 * STEPS + 1))
    assert {"batch_mae", "batch_steps_per_second", "epoch_steps_per_second"} < set(found)
    rates = [(step, float(np.float32(1 / value))) for step, value in curve(found, "time/step")]
    np.testing.assert_allclose(rates, curve(found, "batch_steps_per_second"), rtol=1e-6)
    fit(built(), TensorBoard(tmp_path / "some", update_freq=4))
    assert curve(shown(tmp_path / "some" / "train"), "batch_loss") == floats(expected[3::4], (4, 8))


def test_the_speed_is_that_of_the_monitor_wherever_it_stands(tmp_path):
    speed, board = ThroughputMonitor(peak_flops=1e9), TensorBoard(tmp_path)
    logs = fit(built(), board, speed, epochs=3)
    found = shown(tmp_path / "train")
    assert not [tag for tag in found if tag.startswith(("epoch_time", "epoch_through", "epoch_mfu"))]
    for name in NAMES:
        assert curve(found, name) == floats(logs[name], (5, 10, 15))
    fit(built(), ThroughputMonitor(peak_flops=1e9), TensorBoard(tmp_path / "each", update_freq=1))
    assert "mfu" in shown(tmp_path / "each" / "train")


def test_histograms_are_of_all_weights(tmp_path):
    model = built()
    fit(model, TensorBoard(tmp_path, histogram_freq=2), epochs=3)
    found = shown(tmp_path / "train")
    for weight in model.weights:
        steps, arrays = zip(*found[f"{weight.path}/histogram"], strict=True)
        values = np.asarray(weight.value, np.float64)
        assert steps == (0, 2)
        assert arrays[-1][:, 2].sum() == values.size
        assert arrays[-1][0, 0] == values.min() - (0.5 if values.size == 1 else 0)
        counts, edges = np.histogram(values, 30)
        np.testing.assert_array_equal(arrays[-1], np.stack([edges[:-1], edges[1:], counts], axis=1))


def test_numbers_that_are_none_do_not_break_a_histogram(tmp_path):
    file = EventFile(tmp_path)
    file.write(0, [histogram("some", np.asarray([np.nan, 1, np.inf, 3])), histogram("none", np.full(3, np.nan))])
    file.close()
    found = shown(tmp_path)
    assert found["some"][0][1][:, 2].sum() == 2
    assert found["none"][0][1].shape == (0, 3)


@pytest.mark.parametrize("number", [2.5e15, -9e15])
def test_large_numbers_that_are_equal_have_one_bucket(tmp_path, number):
    file = EventFile(tmp_path)
    file.write(0, [histogram("large", np.full(3, number))])
    file.close()
    assert shown(tmp_path)["large"][0][1].tolist() == [[number, number, 3]]


def test_the_model_is_described_as_keras_describes_it(tmp_path):
    model = built()
    fit(model, TensorBoard(tmp_path))
    accumulator = EventAccumulator(str(tmp_path / "train"))
    accumulator.Reload()
    assert accumulator.PluginTagToContent("graph_keras_model") == {"keras": b"1"}
    ((_, value),) = shown(tmp_path / "train")["keras"]
    assert value.item().decode() == model.to_json()


class Odd(keras.layers.Layer):
    """Has no config, as its argument is a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def test_a_model_that_cannot_be_described_trains_all_the_same(tmp_path, caplog):
    caplog.set_level("INFO", "lockstep")
    with lockstep.MirroredStrategy(["cpu:0"], replicas=2).scope():
        model = keras.Sequential([keras.Input((3,)), Odd(abs), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    assert len(fit(model, TensorBoard(tmp_path))["loss"]) == 2
    why = "NotImplementedError: Object Odd was created by passing non-serializable argument values"
    assert caplog.text.count(f"the layers of {model.name!r} cannot be described: {why}") == 1


class Stop(keras.callbacks.Callback):
    def __init__(self, at):
        super().__init__()
        self.at = at

    def on_train_batch_end(self, batch, logs):
        if int(self.model._jax_state["optimizer_variables"][0]) == self.at:
            raise InterruptedError


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 5, 8])
def test_a_run_that_goes_on_has_each_step_once(tmp_path, at):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    logs = fit(built(), TensorBoard(whole, update_freq=1), epochs=3)
    board = TensorBoard(broken, update_freq=1)
    with pytest.raises(InterruptedError):
        fit(built(), board, Stop(at), BackupAndRestore(tmp_path / "backup", save_freq=2, async_=False), epochs=3)
    fit(built(), TensorBoard(broken, update_freq=1), BackupAndRestore(tmp_path / "backup"), epochs=3)
    expected, found = shown(whole / "train"), shown(broken / "train")
    for tag in ("batch_loss", "epoch_loss", "batch_mae", "epoch_mae"):
        assert curve(found, tag) == curve(expected, tag)
    assert curve(found, "epoch_loss") == floats(logs["loss"], range(3))
    steps = [step for step, _ in found["time/step"]]
    assert steps == sorted(set(steps))


def test_the_step_at_which_a_run_is_preempted_is_written(tmp_path):
    def stop(batch, logs):
        if batch == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def run(*callbacks):
        fit(built(), TensorBoard(tmp_path / "logs", update_freq=1), *callbacks, BackupAndRestore(tmp_path / "run"))

    def steps():
        return [step for step, _ in shown(tmp_path / "logs" / "train")["batch_loss"]]

    with pytest.raises(SystemExit) as ended:
        run(keras.callbacks.LambdaCallback(on_train_batch_end=stop))
    assert ended.value.code == 75
    assert steps() == [1, 2, 3]
    run()
    assert steps() == list(range(1, 2 * STEPS + 1))


def test_a_validation_that_a_preemption_cuts_short_is_written_when_it_is_whole(tmp_path):
    def stop(batch, logs):
        if batch == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def run(*callbacks):
        callbacks = (*callbacks, TensorBoard(tmp_path / "logs"), BackupAndRestore(tmp_path / "run"))
        return fit(built(), *callbacks, epochs=2, validation_split=0.4, validation_batch_size=4)

    with pytest.raises(SystemExit):
        run(keras.callbacks.LambdaCallback(on_test_batch_end=stop))
    logs = run()
    found = shown(tmp_path / "logs" / "validation")
    assert curve(found, "evaluation_loss_vs_iterations") == floats(logs["val_loss"], (3, 6))


def test_a_second_fit_counts_on(tmp_path):
    model, board = built(), TensorBoard(tmp_path, update_freq=1)
    fit(model, board, epochs=1)
    fit(model, board, epochs=1)
    found = shown(tmp_path / "train")
    assert [step for step, _ in found["batch_loss"]] == list(range(1, 11))
    assert [step for step, _ in found["epoch_loss"]] == [0, 0]  # As Keras counts the epochs of each call.


@pytest.mark.parametrize(
    ("resumes", "is_new"),
    [(False, False), (True, True), (True, False)],
    ids=["second fit", "new process", "same model"],
)
def test_steps_that_the_optimizer_does_not_count_are_counted(resumes, is_new, tmp_path):
    def made():
        return built(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**127))

    model, backup = made(), [BackupAndRestore(tmp_path / "backup")] if resumes else []
    fit(model, TensorBoard(tmp_path, update_freq=1), *backup, epochs=1)
    assert 0 < int(model.optimizer.iterations) < STEPS
    fit(made() if is_new else model, TensorBoard(tmp_path, update_freq=1), *backup, epochs=2 if resumes else 1)
    assert [step for step, _ in shown(tmp_path / "train")["batch_loss"]] == list(range(1, 2 * STEPS + 1))


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from tests.fit.monitoring.runs import built, fit, keras
import lockstep
def on_epoch_end(epoch, logs):
    if epoch == 2:
        os.kill(os.getpid(), signal.SIGKILL)
kill = keras.callbacks.LambdaCallback(on_epoch_end=on_epoch_end)
fit(built(), lockstep.callbacks.TensorBoard({folder!r}, update_freq=2), kill, epochs=5)
"""


def test_tensorboard_files_can_be_read_after_a_kill_without_tensorflow(python, tmp_path):
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    code = "import sys; assert not {'tensorflow', 'tensorboard'} & set(sys.modules)\n"
    code += "sys.modules['tensorflow'] = sys.modules['tensorboard'] = None\n"
    code += KILLED.format(root=root, folder=str(tmp_path))
    done = python(code=code, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = shown(tmp_path / "train")
    assert [step for step, _ in found["epoch_loss"]] == [0, 1, 2]
    assert [step for step, _ in found["batch_loss"]] == [2, 4, 6, 8, 10, 12, 14]
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "running"
    console = Console(width=160)
    with console.capture() as printed:
        console.print(picture(tmp_path, now=lambda: status["time"] + 40))
    assert printed.get().startswith("no status update for 40 s; it ran for ")


def test_a_file_that_was_torn_anywhere_is_read_up_to_there(tmp_path):
    whole = EventFile(tmp_path / "whole")
    ends = []
    (path,) = (tmp_path / "whole").iterdir()
    for step in range(20):
        ends.append(path.stat().st_size)
        whole.write(step * 100, [scalar("a", 1.5), scalar(f"b{step}", float("nan"))])
    whole.close()
    assert newest_steps(tmp_path / "whole") == {"a": 1900} | {f"b{step}": 100 * step for step in range(20)}
    text = path.read_bytes()
    for size in random.Random(0).sample(range(len(text)), 30):
        torn = tmp_path / "torn" / path.name
        torn.parent.mkdir(exist_ok=True)
        torn.write_bytes(text[:size])
        steps = sum(end <= size for end in ends) - 1
        found = newest_steps(torn.parent)
        assert found.get("a", -1) == (100 * (steps - 1) if steps > 0 else -1)


def test_an_event_is_whole_though_the_system_takes_a_part_at_a_time(tmp_path, monkeypatch):
    class Partial(io.FileIO):
        """As a file on a disk that is nearly full."""

        def write(self, data):
            return super().write(data[:7])

    monkeypatch.setattr(io, "FileIO", Partial)
    file = EventFile(tmp_path)
    for step in range(3):
        file.write(step, [scalar("loss", 0.5)])
    file.close()
    assert newest_steps(tmp_path) == {"loss": 2}
    assert curve(shown(tmp_path), "loss") == [(step, 0.5) for step in range(3)]


def test_an_event_is_what_the_protocol_says(tmp_path):
    file = EventFile(tmp_path, clock=lambda: 12.5)
    file.write(300, [scalar("a/b", 0.1), histogram("c", np.arange(4))])
    file.close()
    (path,) = tmp_path.iterdir()
    text = path.read_bytes()
    length = int.from_bytes(text[:8], "little")
    assert Event.FromString(text[12 : 12 + length]) == Event(wall_time=12.5, file_version="brain.Event:2")
    event = Event.FromString(text[12 + length + 4 + 12 : -4])
    assert (event.wall_time, event.step) == (12.5, 300)
    first, second = event.summary.value
    assert (first.tag, first.metadata.plugin_data.plugin_name) == ("a/b", "scalars")
    assert first.tensor.tensor_content == np.float32(0.1).tobytes()
    assert [one.size for one in second.tensor.tensor_shape.dim] == [30, 3]


@pytest.mark.slow
def test_a_profile_lies_where_tensorboard_looks(tmp_path, caplog):
    caplog.set_level("INFO", "lockstep")
    fit(built(), TensorBoard(tmp_path, profile_batch=(3, 4)))
    (folder,) = (tmp_path / "train" / "plugins" / "profile").iterdir()
    assert list(folder.glob("*.xplane.pb"))
    assert f"profile of steps 3 to 4: {folder.parent}" in caplog.text


@pytest.mark.slow
def test_a_profile_of_more_steps_than_there_are_ends_with_the_training(tmp_path, caplog):
    caplog.set_level("INFO", "lockstep")
    fit(built(), TensorBoard(tmp_path, profile_batch=(9, 90)))
    assert "profile of steps 9 to 10" in caplog.text
    jax.profiler.start_trace(tmp_path / "own")
    fit(built(), TensorBoard(tmp_path, profile_batch=2))
    jax.profiler.stop_trace()
    assert "no profile of steps 2 to 2: " in caplog.text


class Failed:
    """What a step gives that ends on its devices with an error."""

    def block_until_ready(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")


@pytest.mark.slow
def test_a_profile_ends_where_its_step_fails(tmp_path):
    for number in range(2):
        profile = StepProfiler(1, 2, tmp_path / str(number), print)
        profile.on_step_start(None, "train", None)
        profile.on_step_end(None, "train", None, Failed())
        profile.stop()
        assert list((tmp_path / str(number)).rglob("*.xplane.pb"))


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path, caplog):
    caplog.set_level("INFO", "lockstep")
    (tmp_path / "train").write_text("no folder")
    logs = fit(built(), TensorBoard(tmp_path, update_freq=1))
    assert len(logs["loss"]) == 2
    assert caplog.text.count("nothing more is written") == 1


@pytest.mark.slow
def test_a_file_that_cannot_be_read_when_a_run_goes_on_is_told_once(tmp_path, caplog):
    caplog.set_level("INFO", "lockstep")
    fit(built(), BackupAndRestore(tmp_path), epochs=1)
    (tmp_path / "train" / "events.out.tfevents.0.here").mkdir(parents=True)
    logs = fit(built(), BackupAndRestore(tmp_path), TensorBoard(tmp_path, update_freq=1))
    assert len(logs["loss"]) == 2
    assert caplog.text.count("nothing more is written") == 1


@pytest.mark.parametrize(
    ("given", "steps"), [("500,520", (500, 520)), ("7", (7, 7)), ("0", None), (" 2, 3", (2, 3)), ([2, 3], (2, 3))]
)
def test_steps_to_profile_are_given_as_to_keras(tmp_path, given, steps):
    assert TensorBoard(tmp_path, profile_batch=given).profile_batch == steps


def test_what_cannot_be_is_refused(tmp_path):
    for options, words in (
        ({"update_freq": "often"}, 'update_freq: expected "epoch", "batch" or a number of steps, got \'often\''),
        ({"update_freq": 0}, "update_freq: expected a whole number of at least 1"),
        ({"histogram_freq": -1}, "histogram_freq: expected a whole number of at least 0"),
        ({"profile_batch": "2,x"}, "profile_batch: expected a whole number of at least 0, got 'x'"),
        ({"profile_batch": "1,2,3"}, "profile_batch: expected a step or a pair of them, got '1,2,3'"),
        ({"profile_batch": (4, 3)}, r"profile_batch: expected a step or a pair of them, from 1, got \(4, 3\)"),
    ):
        with pytest.raises(lockstep.OptionError, match=words):
            TensorBoard(tmp_path, **options)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(lockstep.ScopeError, match="TensorBoard works for models of a strategy"):
        model.fit(*data(), callbacks=[TensorBoard(tmp_path)])


def test_files_that_begin_in_one_second_are_read_in_their_order(tmp_path):
    """TensorBoard reads the files of a folder by name, and takes a step that is smaller than one before for a new beginning."""
    for step in range(25):
        file = EventFile(tmp_path, clock=lambda: 5.0)
        file.write(step, [scalar("loss", step)])
        file.close()
    assert [step for step, _ in curve(shown(tmp_path), "loss")] == list(range(25))


def test_a_schedule_is_asked_with_a_count_on_the_host():
    """The chief alone asks: a program on arrays of several processes would have to be started by all."""
    asked = []

    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            asked.append(type(step))
            return 0.5 / (1 + step)

    optimizer = keras.optimizers.SGD(Schedule())
    optimizer.build([keras.Variable(np.zeros(2))])
    assert _learning_rates(optimizer) == {"learning_rate": 0.5}
    assert asked == [np.ndarray]
