"""``lockstep plan``: rows, recommendation, text, page, and the command with its children."""

import dataclasses
import io
import json
import os
import sys
import time

import jax
import keras
import numpy as np
import pytest

import lockstep
from lockstep import OptionError, cli
from lockstep.collectives.cost_model import NetworkLink
from lockstep.devices.host_memory import HostMemory
from lockstep.tools.plan import compile_process, planner
from lockstep.tools.plan.compile_process import (
    Check,
    TargetResult,
    check_steps,
    keep_checks,
    ratios_of,
    result_from_json,
)
from lockstep.tools.plan.estimate import CompiledStep, Memory, Survey, TrainingCall
from lockstep.tools.plan.hardware import Accelerator, known_accelerators, parse_target
from lockstep.tools.plan.planner import PlanOptions, plan_script
from lockstep.tools.plan.render import text_of
from lockstep.tools.script_runner import run_child
from tests.support.processes import FOR_TESTS

GIB = 1 << 30
SURVEY = Survey(64, 1000, False, "float32", 1e12)
SCRIPT = """
import keras, numpy as np, lockstep
with lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(10, activation="softmax")])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits={from_logits}))
x, y = np.zeros(({rows}, 64), "float32"), np.zeros(({labels},), "int32")
model.fit(x, y, batch_size=32)
raise RuntimeError("too far")
"""
FAST_CPU = """
[cpu]
name = "these"
platform = "cpu"
kinds = ["cpu"]
memory_bandwidth = 1e15
link = 1e12
latency = 1e-12
peak = { float32 = 1e18 }
source = "a test"
"""


@pytest.fixture(autouse=True)
def _own_checks(monkeypatch, tmp_path):
    monkeypatch.setenv(compile_process.CHECKS_FILE, str(tmp_path / "state" / "checks.json"))


@pytest.fixture(autouse=True)
def _children_compile_fast(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", FOR_TESTS["XLA_FLAGS"])


def step(rows, gib, collectives=()):
    memory = Memory(weights=GIB, optimizer=2 * GIB, batch=0, gradients=GIB, temporaries=int((gib - 3) * GIB), results=0, code=0)  # fmt: skip
    return CompiledStep(rows, memory, memory.total, collectives, traffic=GIB)


def planned(targets, found, strategies="replicated", batches=(64,), **options):
    """Return the plan of results: for each pair of a target and a strategy, bytes in GiB by rows."""
    asked = PlanOptions(
        tuple(map(parse_target, targets)), tuple(strategies.split(",")), batches, options.pop("prices", {}), **options
    )
    results = [
        TargetResult(
            target.name, strategy, tuple(step(rows, gib) for rows, gib in found[target.name, strategy].items())
        )
        for target, strategy in asked.pairs()
    ]
    return planner._planned("a net", SURVEY, results, asked, ())


def test_a_setting_fits_only_if_the_last_batch_fits_too():
    for last, fits in ((20, True), (80, False)):
        (row,) = planned(["h100:1"], {("h100:1", "replicated"): {64: 30, 40: last}}).rows
        assert (row.fits, row.needed) == (fits, max(last, 30) * GIB)
        assert row.reason == ("" if fits else "needs 80.0 GiB of 59.3 GiB")
    assert planner._too_large([step(64, 30)], None) == "needs 30.0 GiB"


def test_a_setting_is_unknown_if_its_last_batch_was_not_compiled():
    (row,) = planned(["h100:1"], {("h100:1", "replicated"): {64: 30}}).rows
    assert row.fits is None


def test_what_fits_is_unknown_if_the_memory_is(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text("[ours]\nname = 'ours'\nplatform = 'cuda'\nsource = 'a test'\n")
    asked = PlanOptions((parse_target("ours:8", known_accelerators(file)),), ("replicated",), (64,))
    found = TargetResult("ours:8", "replicated", (step(64, 30), step(40, 30)))
    (row,) = planner._planned("a net", SURVEY, [found], asked, ()).rows
    assert (row.fits, row.needed) == (None, 30 * GIB)
    assert row.reason == "the memory of such a device is unknown. Fix: describe it with --hardware-file."


def test_memory_is_divided_into_kinds_that_add_up():
    """Of 30 GiB, 20 more than with 8 rows: activations grow with the rows, here by 20 / 56 a row."""
    (row,) = planned(["h100:1"], {("h100:1", "replicated"): {64: 30, 40: 20, 8: 10}}).rows
    assert row.kinds["weights"] == GIB
    assert row.kinds["activations"] == pytest.approx(20 / 56 * 64 * GIB, rel=1e-6)
    assert sum(row.kinds.values()) == 30 * GIB
    assert min(row.kinds.values()) >= 0


def test_activations_of_a_step_without_another_one_are_unknown():
    (row,) = planned(["h100:1"], {("h100:1", "replicated"): {64: 30}}).rows
    assert row.kinds["activations"] is None
    assert sum(size or 0 for size in row.kinds.values()) == 30 * GIB
    assert row.kinds["gradients"] == GIB


def test_recommendation_names_the_cheapest_the_fastest_and_what_fits_only_sharded():
    found = {
        ("h100:1", "replicated"): {64: 90, 40: 90},
        ("h100:8", "replicated"): {64: 90, 40: 90},
        ("h100:8", "variables"): {64: 30, 40: 30},
        ("a100:8", "replicated"): {64: 90, 40: 90},
        ("a100:8", "variables"): {64: 30, 40: 30},
    }
    plan = planned(
        ["h100:1", "h100:8", "a100:8"], found, "replicated,variables", prices={"h100:8": 24.0, "a100:8": 4.0}
    )
    said = " ".join(plan.recommendation)
    assert said.startswith("Cheapest that fits: a100:8, variables, batch 64")
    assert "Fastest that fits: h100:8, variables, batch 64" in said
    assert "On h100:8 with batch 64 the model fits only sharded: take variables." in said
    dear, cheap = (row for row in plan.rows if row.fits)
    assert dear.price == pytest.approx(24 / 3600 * dear.estimate.seconds / 64 * 1e6)
    assert cheap.price < dear.price


def test_recommendation_if_nothing_fits_says_what_to_change():
    plan = planned(["h100:1"], {("h100:1", "replicated"): {64: 90, 40: 90}})
    assert "Nothing fits. Fix: a smaller batch, more devices, or shard" in plan.recommendation[0]


def test_what_could_not_be_compiled_is_not_said_to_be_too_large():
    asked = PlanOptions((parse_target("h100:8"),), ("replicated", "variables"), (64,))
    failed = TargetResult("h100:8", "replicated", failure="no compiler")
    large = TargetResult("h100:8", "variables", (step(64, 90), step(40, 90)))
    for results, expected in (
        ([failed, dataclasses.replace(failed, strategy="variables")], "Nothing could be compiled: see the reason of each setting."),
        ([failed, large], "Nothing fits of what could be compiled (1 of 2 settings). Fix: a smaller batch"),
    ):  # fmt: skip
        assert planner._planned("a net", SURVEY, results, asked, ()).recommendation[0].startswith(expected)


def test_a_plan_says_that_operations_are_unknown():
    asked = PlanOptions((parse_target("h100:1"),), ("replicated",), (64,))
    surveyed = dataclasses.replace(SURVEY, flops_per_row=None)
    result = TargetResult("h100:1", "replicated", (step(64, 30), step(40, 30)))
    plan = planner._planned("a net", surveyed, [result], asked, ())
    assert plan.rows[0].estimate is None
    assert any(note.startswith("the operations of a step are unknown, so there is no time") for note in plan.notes)


@pytest.mark.parametrize("name", ["h100", "h100:4", "a100:8"])
def test_a_price_of_something_that_is_not_planned_is_refused(name):
    with pytest.raises(OptionError, match=rf"\(--price\): {name}: expected one of the targets h100:8, cpu:4, got"):
        PlanOptions.checked("h100:8,cpu:4", prices={name: 3.0})


def test_text_labels_memory_and_time_by_how_sure_they_are():
    found = {("h100:1", "replicated"): {64: 30, 40: 30}, ("v5e:1x1", "replicated"): {64: 9, 40: 9}}
    plan = planned(["h100:1", "v5e:1"], found)
    assert [row.certainty for row in plan.rows] == ["lower bound", "exact"]
    text = str(plan)
    assert text.count("unverified") == 2 + 1  # Each row, and the note.
    assert "memory of GPUs is a lower bound" in text
    assert not [line for line in text.splitlines() if "…" in line]  # No cell is cut.
    keep_checks([check("h100", seconds=3.0, predicted=2.0)])
    text = str(planned(["h100:1", "v5e:1"], found))
    assert "1.50 × that" in text
    assert "h100: measured over predicted: time 1.50 ×, memory 1.25 × (checks: 1, newest 2026-11-24)" in text


def check(accelerator, seconds, predicted, dtype="float32", title="train.py"):
    return Check(
        accelerator, 1, title, "replicated", 64, dtype, predicted, seconds, 4 * GIB, 5 * GIB, "2026-11-24"
    )  # fmt: skip


def test_checks_are_kept_in_place_of_older_ones_of_the_same_step():
    keep_checks([check("h100", 1.0, 2.0), check("h100", 9.0, 2.0, dtype="bfloat16"), check("a100", 3.0, 2.0)])
    path = keep_checks([check("h100", 3.0, 2.0), check("h100", 5.0, 2.0, title="other.py")])
    assert len(json.loads(path.read_text())) == 4
    found = ratios_of("float32")
    assert (found["h100"].time, found["h100"].checks, found["a100"].time) == (2.0, 2, 1.5)
    path.write_text("not JSON")
    assert ratios_of("float32") == {}


def test_checks_of_another_version_stay_in_the_file_and_count_for_no_ratio():
    path = keep_checks([check("h100", 1.0, 2.0)])
    newer = {**json.loads(path.read_text())[0], "driver": "550.54"}
    path.write_text(json.dumps([newer, *json.loads(path.read_text())]))
    assert ratios_of("float32")["h100"].checks == 1
    keep_checks([check("a100", 3.0, 2.0)])
    assert newer in json.loads(path.read_text())
    assert {key: ratio.checks for key, ratio in ratios_of("float32").items()} == {"h100": 1, "a100": 1}


@pytest.mark.parametrize("content", ["not JSON", '{"name": "a package"}', "\xff"])
def test_a_file_of_something_else_is_refused_and_stays(content):
    path = compile_process.checks_file()
    path.parent.mkdir()
    path.write_text(content, encoding="latin-1")
    with pytest.raises(OptionError, match=r"is no list of checks\. Fix: set LOCKSTEP_PLAN_CHECKS to another file"):
        keep_checks([check("h100", 1.0, 2.0)])
    assert path.read_text(encoding="latin-1") == content


def test_checks_that_cannot_be_written_are_an_error_with_the_variable(monkeypatch):
    monkeypatch.setenv(compile_process.CHECKS_FILE, "/dev/null/checks.json")
    with pytest.raises(OptionError, match="Fix: set LOCKSTEP_PLAN_CHECKS to a file"):
        keep_checks([check("h100", 1.0, 2.0)])


def test_as_many_compilers_run_side_by_side_as_memory_holds(monkeypatch):
    monkeypatch.setattr(planner, "usable_cores", lambda: 8)
    for free, jobs in ((None, 8), (64 * GIB, 8), (12 * GIB, 4), (GIB, 1)):
        monkeypatch.setattr(planner, "host_memory", lambda free=free: HostMemory(64 * GIB, None, free))
        assert planner._most_jobs() == jobs


def test_on_one_device_strategies_that_shard_are_left_out():
    options = PlanOptions.checked("cpu:1,cpu:2", "replicated,variables")
    assert [(target.name, name) for target, name in options.pairs()] == [
        ("cpu:1", "replicated"),
        ("cpu:2", "replicated"),
        ("cpu:2", "variables"),
    ]


def test_a_result_survives_its_way_as_json():
    result = TargetResult(
        "h100:8",
        "variables",
        (step(8, 5, (("all-gather", 2, 10, (0, 4)), ("all-reduce", 1, 5, None))), CompiledStep(9, None, 7)),
        (8, 9),
        ("a note",),
        "no",
    )
    assert result_from_json(json.loads(json.dumps(dataclasses.asdict(result)))) == result


HUGE = """
import keras, numpy as np, lockstep
with lockstep.MirroredStrategy().scope():
    model = keras.Sequential([keras.layers.Embedding(1 << 30, 1024), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x = np.zeros((64, 4), "int32")
model.fit(x, x, batch_size=8)
"""


@pytest.mark.slow
def test_a_model_larger_than_this_machine_is_planned_as_a_script_and_as_a_function(tmp_path):
    """Four TiB of weights, and eight of Adam's variables."""
    (tmp_path / "train.py").write_text(HUGE)
    options = PlanOptions.checked("cpu:1", is_search=False)
    (of_script,) = plan_script(str(tmp_path / "train.py"), (), options, os.environ).rows

    def build():
        model = keras.Sequential([keras.layers.Embedding(1 << 30, 1024), keras.layers.Dense(10)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    x = np.zeros((64, 4), "int32")
    (of_function,) = lockstep.plan(build, (x, x), hardware="cpu:1", batch=8, search=False).rows
    assert of_function.kinds == of_script.kinds
    assert of_script.kinds["weights"] == 4 * (1 << 40) + 4 * (1024 * 10 + 10)
    assert of_script.kinds["optimizer"] > 8 * (1 << 40)


def test_a_function_that_makes_the_model_has_the_plan_of_the_model():
    def build():
        model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(1024), keras.layers.Dense(10)])
        model.compile("adam", "mse")
        made.append(model)
        return model

    made, data = [], (np.zeros((64, 512), "float32"), np.zeros((64, 10), "float32"))
    found = [lockstep.plan(model, data, hardware="cpu:2", batch=32) for model in (build(), build)]
    steps = [[dataclasses.replace(row.step, seconds=0) for row in plan.rows] for plan in found]
    assert steps[0] == steps[1]
    real, placeholder = (model.layers[0].kernel.numpy() for model in made)
    assert real.any()
    assert not placeholder.any()
    with pytest.raises(OptionError, match="or a function that returns one, got <function"):
        lockstep.plan(lambda: build, data, hardware="cpu:2")


def test_plan_takes_a_function_of_data_and_refuses_no_batch():
    model = keras.Sequential([keras.Input((128,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = np.zeros((32, 128), "float32"), np.zeros((32, 1), "float32")
    options = {"hardware": "cpu:1", "strategy": "replicated", "search": False}
    rows = lockstep.plan(model, lambda: data, batch=[32, 2 * 10**9], **options).rows
    assert [row.fits for row in rows] == [True, False]  # Such rows have 1 TB.
    with pytest.raises(OptionError, match=r"batch: expected rows of global batches .* got \(\)"):
        lockstep.plan(model, data, batch=(), **options)


@pytest.mark.slow
def test_plan_of_a_model_is_text_json_and_a_page_and_changes_nothing(tmp_path):
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    before = [np.array(variable) for variable in model.variables]
    data = np.zeros((70, 64), "float32"), np.zeros((70, 1), "float32")
    plan = lockstep.plan(
        model, data, hardware="cpu:1,cpu:4", batch=[16, 32], strategy=["replicated", "variables"], prices={"cpu:4": 2}
    )
    assert [(row.target, row.strategy, row.batch, row.fits) for row in plan.rows] == [
        (target, strategy, batch, True)
        for target, strategy in (("cpu:1", "replicated"), ("cpu:4", "replicated"), ("cpu:4", "variables"))
        for batch in (16, 32)
    ]
    assert [row.last.rows for row in plan.rows[:2]] == [6, 6]
    replicated, sharded = plan.rows[3], plan.rows[5]
    assert sharded.step.memory.weights < 0.3 * replicated.step.memory.weights
    assert {name for name, *_ in replicated.step.collectives} <= {"all-reduce", "all-gather"}
    assert "reduce-scatter" in {name for name, *_ in sharded.step.collectives}
    assert replicated.estimate is None  # No peak of a CPU is known.
    plan.save_json(tmp_path / "plan.json")
    plan.save_html(tmp_path / "plan.html")
    read = json.loads((tmp_path / "plan.json").read_text())
    assert read["rows"][3]["kinds"] == replicated.kinds
    page = (tmp_path / "plan.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "Memory of a device in a step" in page
    assert text_of(plan) == str(plan)
    assert all(map(np.array_equal, before, model.variables))


# --- the command ----------------------------------------------------------------------------------------------------------------


def script(tmp_path, from_logits=False, rows=70, labels=70, code=SCRIPT):
    path = tmp_path / "train.py"
    path.write_text(code.format(from_logits=from_logits, rows=rows, labels=labels))
    return str(path)


@pytest.mark.slow
def test_the_command_plans_a_script_without_training_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--for", "cpu:1", "--for", "cpu:2", "--strategy", "variables", "--json", "found.json"]
    code = SCRIPT.replace("\nwith", "\nlockstep.config.set_logical_cpu_devices(1)\nwith")  # of lockstep migrate
    assert cli.main(["plan", script(tmp_path, code=code), *words, "--price", "cpu:2=3", "--jobs", "2"]) == 0
    shown = capsys.readouterr()
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["target"], row["strategy"], row["batch"], row["last"]["rows"]) for row in rows] == [
        ("cpu:1", "variables", 32, 6),
        ("cpu:2", "variables", 32, 6),
    ]
    assert all(row["fits"] and row["largest"][0] > 32 for row in rows)
    assert "Plan of train.py\nbatch 32, float32, " in shown.out
    assert shown.err.count("steps compiled in") == 2
    assert "lockstep plan: 2 of 2: " in shown.err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["found.json", "train.py"]


def test_files_of_a_plan_are_there_even_where_nobody_reads_what_is_printed(tmp_path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    plan = planned(["v5e:1"], {("v5e:1x1", "replicated"): {64: 9, 40: 9}})
    monkeypatch.setattr(planner, "plan_script", lambda *arguments: plan)
    monkeypatch.setattr(sys, "stdout", Closed())
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    with pytest.raises(BrokenPipeError):
        cli.main(["plan", "--for", "cpu:1", "--html", str(page), "--json", str(figures), script(tmp_path)])
    assert "v5e" in page.read_text()
    assert len(json.loads(figures.read_text())["rows"]) == 1


@pytest.mark.slow
def test_a_script_whose_fit_would_fail_fails_with_the_finding_of_the_doctor(tmp_path, capsys):
    assert cli.main(["plan", "--for", "cpu:1", script(tmp_path, from_logits=True, labels=60)]) == 2
    said = capsys.readouterr().err
    assert "train.py:7 fails: " in said
    assert "doctor: " in said


@pytest.mark.slow
def test_workers_are_planned_without_their_cluster_and_with_the_findings_of_the_doctor(tmp_path):
    """In the environment of a worker the plan neither waits for the others nor is refused."""
    cluster = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}})
    code = SCRIPT.replace('MirroredStrategy(["cpu:0", "cpu:1"])', "MultiWorkerMirroredStrategy()")
    options = PlanOptions.checked("cpu:2", "replicated", is_search=False)
    path = script(tmp_path, from_logits=True, code=code)
    plan = plan_script(path, (), options, {**os.environ, "TF_CONFIG": cluster})
    assert [row.fits for row in plan.rows] == [True]
    assert any(note.startswith("doctor: ") and "from_logits" in note for note in plan.notes)


@pytest.mark.slow
def test_check_measures_a_step_and_keeps_the_ratio_for_later_plans(tmp_path, capsys):
    sheet = tmp_path / "cpu.toml"
    sheet.write_text(FAST_CPU)
    options = ["--strategy", "replicated", "--batch", "16", "--hardware-file", str(sheet)]
    assert cli.main(["plan", "--check", *options, script(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "1 × cpu, replicated, batch 16: " in said
    assert f"kept for later plans in {tmp_path / 'state' / 'checks.json'}" in said
    found = ratios_of("float32")["cpu"]
    assert found.time > 1  # No CPU is as fast as this data sheet.
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = np.zeros((8, 8), "float32"), np.zeros((8, 1), "float32")
    plan = lockstep.plan(model, data, hardware="cpu:1", hardware_file=sheet)
    assert f"{found.time:.2f} × that" in str(plan)


def few_rows(most):
    """A layer that cannot be compiled for more rows on a replica."""

    class Few(keras.layers.Layer):
        def call(self, inputs):
            if isinstance(inputs.shape[0], int) and inputs.shape[0] > most:
                raise ValueError("too many rows")
            return inputs

    return Few()


@pytest.mark.slow
def test_a_check_keeps_what_could_be_measured_and_says_why_the_rest_was_not(monkeypatch):
    model = keras.Sequential([keras.Input((8,)), few_rows(16), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    call = TrainingCall.of_fit(model, (np.zeros((8, 8)), np.zeros((8, 1))), {})
    sheet = {"cpu": Accelerator("cpu", "these", "cpu", "a test", kinds=("cpu",))}
    devices, probes = jax.local_devices()[:2], compile_process.StrategyProbes

    def failing(model, placement, executor, other):
        if executor.shard == "optimizer":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room\nmore")
        return probes(model, placement, executor, other)

    monkeypatch.setattr(compile_process, "StrategyProbes", failing)
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: devices)
    names = ("replicated", "optimizer", "model:3", "model")
    checks, failures = check_steps(call, "train.py", sheet, names, (16, 64), NetworkLink(1e-6, 1e-9))
    assert [(one.strategy, one.batch) for one in checks] == [("replicated", 16)]
    told = dict(line.split(": ", 1) for line in failures)
    assert list(told) == [
        "2 × cpu, replicated, batch 64",
        "2 × cpu, optimizer, batch 16",
        "2 × cpu, optimizer, batch 64",
        "2 × cpu, model:3",
        "2 × cpu, model",
    ]
    assert "too many rows" in told["2 × cpu, replicated, batch 64"]
    assert "no room" in told["2 × cpu, optimizer, batch 16"]
    assert "needs 3 devices" in told["2 × cpu, model:3"]
    assert "no layer is sharded" in told["2 × cpu, model"]


@pytest.mark.slow
def test_a_check_that_measures_nothing_ends_with_1(tmp_path, capsys):
    sheet = tmp_path / "cpu.toml"
    sheet.write_text(FAST_CPU)
    code = SCRIPT.replace("keras.layers.Dense(256)", "few_rows(32)")
    code = "from tests.tools.plan.test_planner import few_rows" + code
    words = ["--strategy", "replicated", "--batch", "64", "--hardware-file", str(sheet), script(tmp_path, code=code)]
    assert cli.main(["plan", "--check", *words]) == 1
    said = capsys.readouterr().out
    assert said.startswith("1 × cpu, replicated, batch 64: not measured: ValueError: too many rows")
    assert "kept" not in said
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "words", [["--for", "h100:8"], ["--price", "h100:8=3"], ["--jobs", "2"], ["--json", "a"], ["--html", "b"], ["--no-search"]]
)  # fmt: skip
def test_a_check_refuses_options_that_it_would_ignore(tmp_path, words, capsys):
    assert cli.main(["plan", "--check", *words, script(tmp_path)]) == 2
    assert f"plan: {words[0]}: --check measures the devices of this machine" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.slow
def test_limits_of_time_and_memory_end_a_child_and_are_named(tmp_path, capsys):
    slow = script(tmp_path, code="import time\ntime.sleep(600)\n")
    began = time.monotonic()
    assert cli.main(["plan", "--for", "cpu:1", "--limit", "1", slow]) == 2
    assert "train.py: Not finished within 1 s. Fix: raise --limit." in capsys.readouterr().err
    assert cli.main(["plan", "--for", "cpu:1", "--memory", "0.001", slow]) == 2
    assert "train.py: It took more than 0.0 GB of memory." in capsys.readouterr().err
    found = run_child("lockstep.tools.plan.compile_process", {}, 600, os.environ, is_over=lambda: True)
    assert (found.content, found.failure) == (None, "Interrupted.")
    assert time.monotonic() - began < 60


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_compiled(tmp_path, capsys):
    words = ["plan", "--for", "cpu:1", "--html", str(tmp_path / "absent" / "page.html"), script(tmp_path)]
    assert cli.main(words) == 2
    assert "page.html: cannot be written" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]
