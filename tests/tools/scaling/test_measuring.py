"""Measuring trains as the script does, on the devices of the override; in this process, and in children."""

import functools
import io
import json
import operator
import os
import re
import sys
import types

import jax
import keras
import numpy as np
import pytest

import lockstep
from lockstep import DeviceError, OptionError, cli
from lockstep.collectives import ops_from_argument
from lockstep.data.input_bound import WaitMeter, collect_meters
from lockstep.strategies import options
from lockstep.strategies.options import override_devices
from lockstep.tools.scaling import api
from lockstep.tools.scaling.benchmark import (
    _reason_of,
    formula_of,
    is_higher_better,
    measure,
    measure_all,
    measure_in_child,
    measure_workload,
)
from lockstep.tools.scaling.results import Budget, ScalingSetting, SettingFailure, SettingResult, table_of
from lockstep.tools.scaling.terminal import describe_result, progress_reporter
from lockstep.tools.scaling.workload import Workload, run_workload, workload_of
from lockstep.tools.script_runner import FirstFit

from .data_of_tests import build, data

SCRIPT = """
import keras, lockstep, numpy as np, sys
sys.path.insert(0, {folder!r})
from data_of_tests import build, data
"""
PLAIN = """
model = build()
keep = keras.callbacks.ModelCheckpoint(sys.argv[1], save_weights_only=True)
model.fit(*data(), batch_size=7, epochs=9, callbacks=[keep])
raise RuntimeError("too far")
"""
OWN_BATCHES = """
class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 12
    def __getitem__(self, number):
        return tuple(array[50 * number : 50 * number + 50] for array in data())
with lockstep.MirroredStrategy(replicas=5).scope():
    model = build()
model.fit(Batches(), validation_data=data())
"""


def script(tmp_path, code):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(folder=os.path.dirname(__file__)) + code)
    return str(path)


def found(model, *args, **kwargs):
    return FirstFit(model, model.fit, args, kwargs, "train.py:1")


@pytest.mark.slow
def test_measuring_trains_exactly_what_fit_trains():
    x, y = data()
    keras.utils.set_random_seed(3)
    plain, watched = build(), build()
    watched.set_weights(plain.get_weights())
    plain.fit(x[:512], y[:512], batch_size=64, epochs=2, shuffle=False, verbose=0)
    call = found(watched, x, y, batch_size=7, shuffle=False, validation_data=data())
    with override_devices(2):
        one = measure(call, ScalingSetting(2, 64), Budget(epochs=2, rows=540))
    for ours, theirs in zip(watched.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    loss, accuracy = plain.evaluate(*data(), verbose=0)
    assert (one.metric, one.curve[-1].rows) == ("accuracy", 1024)
    assert one.curve[-1].value == pytest.approx(accuracy, abs=2 / 600)
    assert loss > 0
    assert [point.seconds for point in one.curve] == sorted(point.seconds for point in one.curve)
    assert one.rows_per_epoch == 512
    assert one.gradient_bytes == 4 * (4 * 8 + 8 + 8 * 2 + 2)
    assert (one.algorithm, {link.devices for link in one.links}) == ("auto", {2})
    assert min(*one.blocks, one.bare, one.taking, one.memory) > 0
    assert "512 of 600 rows are used: whole batches only" in one.notes


@pytest.mark.slow
def test_plain_keras_is_measured_too_and_what_is_held_out_is_not_trained_on():
    with override_devices(0):
        strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"])
        with strategy.scope():
            model = build()
        one = measure(found(model, *data()), ScalingSetting(0, 32), Budget())
    assert strategy.devices == ("cpu:0",)
    assert one.taking is None
    assert one.links == ()
    assert one.rows_per_epoch == 512  # Whole batches of the 540 rows that are left.
    assert "the last 10% of the rows are held out for evaluation" in one.notes


def test_callbacks_write_nothing_but_the_learning_rate_is_set(tmp_path):
    model, rates = build(), []
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rates.append(epoch) or rate)
    keep = keras.callbacks.ModelCheckpoint(tmp_path / "kept.weights.h5", save_weights_only=True)
    with override_devices(1):
        one = measure(found(model, *data(), callbacks=[schedule, keep]), ScalingSetting(1, 64), Budget(epochs=2))
    assert rates == [0, 1]
    assert not list(tmp_path.iterdir())
    assert "callbacks left out while measuring: ModelCheckpoint" in one.notes


def test_a_fit_of_the_models_own_and_validation_without_end_are_understood():
    calls = []

    class Own(keras.Model):
        def fit(self, *args, **kwargs):
            calls.append(kwargs)
            return super().fit(*args, batch_size=5, **kwargs)

    inner = build()
    model = Own(inner.inputs, inner.outputs)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def endless():
        while True:
            yield data()

    original = keras.Model.fit.__get__(model)
    call = FirstFit(model, original, data(), {"validation_data": endless(), "validation_steps": 2}, "train.py:1")
    with override_devices(1):
        one = measure(call, ScalingSetting(1, 64), Budget())
    assert not calls
    assert (one.metric, one.is_higher_better) == ("loss", False)
    assert one.curve[-1].rows == 576


@pytest.mark.slow
def test_weights_of_classes_and_several_steps_in_one_call_are_measured_as_they_train():
    x, y = data()
    keras.utils.set_random_seed(5)
    plain, watched = build(), build()
    watched.set_weights(plain.get_weights())
    for model in (plain, watched):
        model.compile("sgd", model.loss, steps_per_execution=4)
    plain.fit(x[:512], y[:512], batch_size=64, shuffle=False, class_weight={0: 1.0, 1: 3.0}, verbose=0)
    call = found(watched, x, y, shuffle=False, class_weight={0: 1.0, 1: 3.0}, validation_data=data())
    with override_devices(1):
        one = measure(call, ScalingSetting(1, 64), Budget(rows=512))
    for ours, theirs in zip(watched.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert sum(one.blocks) > 0


@pytest.mark.slow
def test_a_run_that_would_pass_its_limit_stops_and_says_so():
    with override_devices(1):
        one = measure(found(build(), *data()), ScalingSetting(1, 32), Budget(epochs=10_000, limit=1.0))
    assert any("to stay within the limit of 1 s" in note for note in one.notes)
    assert one.blocks


def test_override_devices_replaces_the_devices_that_a_script_names():
    with override_devices(2):
        strategy = lockstep.MirroredStrategy(["cpu:3"], replicas=7)
        assert (strategy.devices, strategy.num_replicas_in_sync) == (("cpu:0", "cpu:1"), 2)
        with pytest.raises(OptionError, match="MultiWorkerMirroredStrategy: only strategies of one process"):
            lockstep.MultiWorkerMirroredStrategy()
        central = lockstep.CentralStorageStrategy(["cpu:3"], replicas=7)
        assert (central.devices, central.parameter_device) == (("cpu:0", "cpu:1"), "cpu:0")
    with override_devices(4000), pytest.raises(DeviceError):
        lockstep.MirroredStrategy()
    assert lockstep.MirroredStrategy(["cpu:1"], replicas=3).num_replicas_in_sync == 3


def test_override_devices_refuses_more_accelerators_than_there_are(monkeypatch):
    found = len(jax.local_devices())
    monkeypatch.setattr(options, "platform_of", lambda device: "gpu")  # Of CPU devices, more can be made.
    with (
        override_devices(found + 1),
        pytest.raises(DeviceError, match=f"There are {found} gpu devices here; {found + 1} were"),
    ):
        lockstep.MirroredStrategy()


def test_a_batch_without_rows_is_a_row_that_says_so():
    program = Workload(
        "names", build=f"{build.__module__}:build", data=f"{build.__module__}:data", folders=tuple(sys.path)
    )
    failed = measure_workload(program, ScalingSetting(1, 4096), Budget())
    assert failed == SettingFailure(
        ScalingSetting(1, 4096), "Batch size 4096: only 540 rows to train on. Fix: choose a smaller batch."
    )
    assert "only 540 rows" in describe_result(failed.setting, failed)


def test_reasons_are_one_line():
    in_layer = ValueError("Exception encountered when calling Dense.call().\n\n\x1b[1mno such axis\x1b[0m\nArguments")
    assert _reason_of(in_layer) == "ValueError: no such axis"
    assert _reason_of(RuntimeError("RESOURCE_EXHAUSTED: no room\nmore")) == "out of memory: RESOURCE_EXHAUSTED: no room"
    assert _reason_of(MemoryError()) == "out of memory: MemoryError"
    assert _reason_of(KeyError("x")) == "KeyError: 'x'"
    assert _reason_of(OptionError("all of it")) == "all of it"


def test_which_way_is_better_is_told_from_the_name():
    higher = (
        "accuracy",
        "sparse_top_k_categorical_accuracy",
        "AUC",
        "auc_1",
        "f1_score",
        "mean_io_u",
        "pearson_correlation",
        "sensitivity_at_specificity",
        "acc",
        "r2_score",
        *("dice_coef", "jaccard", "psnr", "ssim", "bleu", "ndcg", "mrr", "cohen_kappa", "hit_rate", "r_squared"),
        *("BinaryAccuracy", "MeanIoU", "F1Score", "true_positives"),
    )
    lower = ("loss", "mae", "mean_squared_error", "kl_divergence", "vacancy_mae")
    lower += ("dice_loss", "DiceLoss", "jaccard_distance", "MeanSquaredError", "false_positives")
    losses = ("score_loss", "accuracy_head_loss", "acceleration_loss", "previous_loss")
    assert all(map(is_higher_better, higher))
    assert not any(map(is_higher_better, lower + losses))
    assert not is_higher_better("score_mae", outputs=("value", "score"))
    assert is_higher_better("score_accuracy", outputs=("value", "score"))


@pytest.mark.slow
def test_several_outputs_without_metrics_are_compared_by_the_whole_loss():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(inputs) for name in ("score", "value")})
    model.compile("sgd", "mse")
    x = np.ones((540, 8), "float32")
    y = {name: x[:, :1] for name in ("score", "value")}
    with override_devices(1):
        one = measure(found(model, x, y, validation_data=(x, y)), ScalingSetting(1, 64), Budget())
    assert (one.metric, one.is_higher_better) == ("loss", False)


def test_an_operation_has_its_formula_and_somebodys_own_the_platforms():
    assert formula_of(ops_from_argument("tree")) == "tree"
    assert formula_of(ops_from_argument(lambda array, axis: array)) == "auto"


def test_a_meter_counts_what_getting_a_batch_takes_and_is_seen_where_it_is_made():
    times = iter(range(100))
    with collect_meters() as meters:
        meter = WaitMeter(lambda: next(times))
        with meter.getting():
            pass
    assert meters == [meter]
    assert meter.taking == 1
    with collect_meters() as others:
        assert others == []


def test_children_import_functions_of_modules_and_get_arrays_in_files(tmp_path):
    program = workload_of(build, data(), None, tmp_path)
    assert (program.kind, program.build, program.validation) == ("names", f"{build.__module__}:build", None)
    calls = []
    run_workload(program, lambda call: calls.append(call.args[0]))
    np.testing.assert_array_equal(calls[0], data()[0])
    with pytest.raises(OptionError, match="data: expected NumPy arrays"):
        workload_of(build, "rows", None, tmp_path)
    with pytest.raises(OptionError, match="validation: expected NumPy arrays"):
        workload_of(build, data(), "rows", tmp_path)


def test_what_is_in_the_main_script_is_reached_by_running_that_again(tmp_path, monkeypatch):
    path = script(tmp_path, "print(lockstep.scaling_report(lambda: build(), data(), devices=(1,), batch=(64,)))")
    main = types.ModuleType("__main__")
    main.__file__, main.__spec__ = path, None
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [path, "an argument"])
    program = workload_of(lambda: build(), data(), None, tmp_path)
    assert program == Workload("script", path=path, arguments=("an argument",))
    calls = []
    run_workload(program, calls.append)
    assert calls[0].where == f"{path}:5"
    del main.__file__
    with pytest.raises(OptionError, match="typed into a notebook or a console"):
        lockstep.scaling_report(lambda: build(), data())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("lambda: 3, data()", "build: expected a function that returns a compiled model, got 3"),
        ("build, (1,)", r"data: expected \(x, y\)"),
    ],
)
def test_what_is_no_model_or_no_data_is_told(tmp_path, given, message):
    program = Workload("script", path=script(tmp_path, f"lockstep.scaling_report({given})"))
    with pytest.raises(OptionError, match=message):
        run_workload(program, print)


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path, capsys):
    output = tmp_path / "absent" / "page.html"
    with pytest.raises(OptionError, match=r"page\.html: cannot be written: No such file or directory"):
        lockstep.scaling_report(build, data, output=output)
    path = script(tmp_path, "1 / 0")
    assert cli.main(["scale", "--html", str(output), path]) == 2
    assert cli.main(["scale", "--html", str(tmp_path / "page.html"), "--json", str(tmp_path), path]) == 2
    assert capsys.readouterr().err.count("cannot be written: ") == 2
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]


def test_a_link_to_a_file_that_is_not_there_yet_stays_when_it_is_checked(tmp_path):
    link = tmp_path / "page.html"
    link.symlink_to(tmp_path / "later.html")
    api.check_writable([link])
    assert link.is_symlink()


def test_files_of_a_measurement_are_there_even_where_nobody_reads_what_is_printed(tmp_path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    report = api.ScalingReport("a net", "lockstep scale net.py", "a laptop", table_of([]), (), None, ())
    monkeypatch.setattr(api, "scale_script", lambda *arguments, **options: report)
    monkeypatch.setattr(sys, "stdout", Closed())
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    with pytest.raises(BrokenPipeError):
        cli.main(["scale", "--html", str(page), "--json", str(figures), "net.py"])
    assert "a net" in page.read_text()
    assert json.loads(figures.read_text())["title"] == "a net"


def test_what_builds_a_model_may_have_no_name_of_its_own(monkeypatch):
    titles = []
    monkeypatch.setattr(api, "workload_of", lambda *_: Workload("script"))
    monkeypatch.setattr(api, "_measure", lambda *asked: titles.append(asked[4]))
    for one in (build, functools.partial(build, 3), types.SimpleNamespace, operator.itemgetter(1)):
        lockstep.scaling_report(one, data)
    assert titles == ["build", "build", "SimpleNamespace", "itemgetter"]


def test_a_module_that_asks_for_a_report_on_import_is_told(tmp_path, monkeypatch):
    (tmp_path / "asks_at_once.py").write_text("import lockstep\nlockstep.scaling_report(print, ())\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    program = Workload("names", build="asks_at_once:build", folders=(str(tmp_path), *sys.path))
    with pytest.raises(OptionError, match="called while a module is imported"):
        run_workload(program, print)


@pytest.mark.slow
def test_the_command_measures_a_script_without_a_strategy(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "kept.weights.h5"
    words = ["--devices", "2", "--batch", "64", "--json", "found.json", "--limit", "120", "--", str(kept)]
    assert cli.main(["scale", script(tmp_path, PLAIN), *words]) == 0
    shown = capsys.readouterr()
    rows = json.loads((tmp_path / "found.json").read_text())["table"]["rows"]
    assert [row["setting"] for row in rows] == [{"devices": count, "batch": 64} for count in (0, 1, 2)]
    assert len({round(row["at_rows"], 4) for row in rows}) == 1  # The devices do not change the numbers.
    assert rows[2]["measured"]["links"][0]["devices"] == 2
    assert "callbacks left out while measuring: ModelCheckpoint" in shown.out.replace("\n", " ")
    assert "lockstep scale: 3 of 3: 2 devices, batch 64" in shown.err
    assert (tmp_path / "scaling.html").read_text().startswith("<!doctype html>")
    assert not kept.exists()


@pytest.mark.slow
def test_an_input_with_batches_of_its_own_is_measured_once(tmp_path):
    program, told = Workload("script", path=script(tmp_path, OWN_BATCHES)), []
    settings = [ScalingSetting(2, 64), ScalingSetting(2, 128)]
    (one,) = measure_all(program, settings, Budget(limit=120), os.environ, lambda *words: told.append(words))
    assert isinstance(one, SettingResult), one
    assert one.setting == ScalingSetting(2, 50)
    assert one.rows_per_epoch == 600
    assert any("already has batches" in note for note in one.notes)
    assert one.curve
    assert len(told) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "limit", "reason"),
    [
        ("import os\nos._exit(7)", 60, "The process ended with code 7: no output"),
        (
            "import os\nos.kill(os.getpid(), 9)",
            60,
            r"The process was killed \(SIGKILL\), usually because memory ran out\.",
        ),
        ("import threading\nthreading.Event().wait()", 2, "Not finished within 2 s"),
        ("1 / 0", 60, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_setting_that_fails_is_a_row_with_the_reason(tmp_path, code, limit, reason):
    path = tmp_path / "train.py"
    path.write_text(code)
    one = measure_in_child(Workload("script", path=str(path)), ScalingSetting(1, 64), Budget(limit=limit), os.environ)
    assert isinstance(one, SettingFailure)
    assert re.match(reason, one.reason), one.reason


def test_a_terminal_gets_a_bar_and_a_line_for_each_setting():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream, failed = Terminal(), SettingFailure(ScalingSetting(1, 64), "a [red]reason")
    with progress_reporter(1, stream) as tell:
        tell(failed.setting, None)
        tell(failed.setting, failed)
    assert "a [red]reason" in stream.getvalue()
    assert "1/1" in stream.getvalue()


@pytest.mark.slow
def test_a_script_without_fit_is_tried_once(tmp_path, capsys):
    script, runs = tmp_path / "empty.py", tmp_path / "runs"
    script.write_text(f"print('run', file=open({str(runs)!r}, 'a'))\n")
    words = ["scale", str(script), "--html", str(tmp_path / "r.html"), "--devices", "1,2", "--batch", "8"]
    assert cli.main(words) == 2
    assert capsys.readouterr().err.count("empty.py: the script ended without a call of fit") == 1
    assert runs.read_text() == "run\n"


def test_words_of_the_script_that_stand_at_the_wrong_place_are_told_where_to_stand(capsys):
    with pytest.raises(SystemExit):
        cli.main(["scale", "train.py", "0.1"])
    assert "unrecognized arguments: 0.1; give arguments of the script last, after --" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["env", "0.1"])
    assert capsys.readouterr().err.endswith("unrecognized arguments: 0.1\n")


def test_wrong_words_are_told_in_a_sentence(tmp_path, capsys):
    assert cli.main(["scale", str(tmp_path / "absent.py")]) == 2
    assert "absent.py: no such file" in capsys.readouterr().err
    (tmp_path / "train.py").write_text("")
    assert cli.main(["scale", "--bandwidth", "string", str(tmp_path / "train.py")]) == 2
    assert "bandwidth: expected GB/s or one of" in capsys.readouterr().err
