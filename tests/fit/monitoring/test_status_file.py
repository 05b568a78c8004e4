"""The status of a run with one process, and what ``lockstep top`` makes of it."""

import json
import os
import socket
import subprocess
import sys
import threading

import keras
import pytest
from rich.console import Console

import lockstep
from lockstep import cli
from lockstep.callbacks import BackupAndRestore, TensorBoard, ThroughputMonitor
from lockstep.checkpoint.serialization import STATUS
from lockstep.tools import top
from tests.support.waiting import wait_until

from .runs import STEPS, built, fit


def status(folder):
    return json.loads((folder / STATUS).read_text())


def text(folder, **options):
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  # closed with the process
    with console.file:
        console.print(top.picture(folder, **options))
        return console.export_text()


def called(moment, action):
    return keras.callbacks.LambdaCallback(**{moment: lambda *_: action()})


def test_a_run_tells_where_it_stands(tmp_path, capsys):
    seen = {}

    def look():
        wait_until((tmp_path / "run" / STATUS).exists, "the status of the run")
        seen.update(status(tmp_path / "run"))

    history = fit(
        built(devices=2),
        BackupAndRestore(tmp_path / "run"),
        TensorBoard(tmp_path / "logs"),
        called("on_train_end", look),
    )
    assert len(history["loss"]) == 2
    assert seen["state"] == "running"
    found = status(tmp_path / "run")
    assert found == status(tmp_path / "logs")
    position = {name: found[name] for name in ("state", "reason", "epoch", "epochs", "step", "steps", "steps_in_all")}
    assert position == {
        "state": "ended",
        "reason": None,
        "epoch": 2,
        "epochs": 2,
        "step": STEPS,
        "steps": STEPS,
        "steps_in_all": 2 * STEPS,
    }
    (worker,) = found["workers"]
    assert (worker["host"], worker["pid"], worker["step"]) == (socket.gethostname(), os.getpid(), 2 * STEPS)
    assert cli.main(["top", str(tmp_path / "run"), "--once"]) == 0
    printed = capsys.readouterr().out
    assert f"epoch 2 of 2, step 5 of 5 (10 in all); {found['rows_per_second']:,.0f} rows/s" in printed
    assert "1 worker, 2 devices" in printed
    assert "last checkpoint: step 10, " in printed
    assert f" {socket.gethostname()} " in printed
    assert f" {os.getpid()} " in printed
    assert " has ended " in printed
    assert "last checkpoint" not in text(tmp_path / "logs")


def test_an_error_and_a_stop_are_told(tmp_path):
    def fail():
        raise ValueError("of the test")

    def stop():
        raise SystemExit(75)

    with pytest.raises(ValueError, match="of the test"):
        fit(built(), BackupAndRestore(tmp_path / "failed"), called("on_epoch_end", fail))
    assert "failed " in text(tmp_path / "failed")
    assert "ValueError: of the test" in text(tmp_path / "failed")
    with pytest.raises(SystemExit):
        fit(built(), BackupAndRestore(tmp_path / "stopped"), called("on_epoch_end", stop))
    assert text(tmp_path / "stopped").startswith("stopped ")


def test_a_job_that_gives_no_sign_of_life_is_told(tmp_path):
    fit(built(), BackupAndRestore(tmp_path))
    found = status(tmp_path)
    (tmp_path / STATUS).write_text(json.dumps(found | {"state": "running", "begun": found["time"] - 90}))
    assert text(tmp_path, now=lambda: found["time"] + 40).startswith(
        "no status update for 40 s; it ran for 1 min 30 s\n"
    )
    assert text(tmp_path, now=lambda: found["time"] + 2).startswith("running for 1 min 30 s\n")


def test_a_second_job_does_not_touch_the_status_of_the_first(tmp_path):
    def second():
        wait_until((tmp_path / STATUS).exists, "the status of the first job")
        begun = status(tmp_path)["begun"]
        with pytest.raises(lockstep.CheckpointError):
            fit(built(), BackupAndRestore(tmp_path))
        found.append((status(tmp_path)["state"], status(tmp_path)["begun"] == begun))

    found = []
    fit(built(), BackupAndRestore(tmp_path), called("on_epoch_end", second), epochs=1)
    assert found == [("running", True)]


def test_a_status_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    caplog.set_level("INFO", "lockstep")
    (tmp_path / STATUS).mkdir()
    assert len(fit(built(), BackupAndRestore(tmp_path))["loss"]) == 2
    assert caplog.text.count("cannot be written, so that lockstep top shows nothing new") == 1
    assert not list(tmp_path.glob(f".{STATUS}*"))


def test_a_fit_without_them_has_no_timer(tmp_path):
    threads = []
    count = called("on_train_end", lambda: threads.extend(one.name for one in threading.enumerate()))
    model = built()
    hooks = model._lockstep_functions.hooks
    seen = called("on_epoch_end", lambda: threads.append(model._lockstep_functions.hooks))
    fit(model, count, seen)
    assert "lockstep-status" not in threads
    assert threads[0] is hooks
    fit(model, ThroughputMonitor(), count)
    assert "lockstep-status" not in threads
    assert model._lockstep_functions.hooks is hooks


@pytest.mark.slow
def test_looking_at_a_run_needs_no_keras_and_no_backend(tmp_path):
    """Keras without a backend wants TensorFlow, and who looks from another shell has not said one."""
    fit(built(), BackupAndRestore(tmp_path))
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    for command in (
        ["top", str(tmp_path)],
        ["checkpoint", "show", str(tmp_path)],
        ["checkpoint", "verify", str(tmp_path)],
    ):
        code = f"import sys; from lockstep import cli; code = cli.main({command}); sys.exit(code or 'keras' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 0, (command, done.stderr)


def test_folders_without_a_status_are_one_sentence(tmp_path, capsys):
    assert cli.main(["top", str(tmp_path), "--once"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"lockstep top: {tmp_path}: no status.json found. ")
    assert said.count("\n") == 1
    for broken in (
        "{",
        "[]",
        '{"version": 2}',
        '{"version": 1}',
        "[" * 100_000,
        '{"version": 1, "workers": 1, "time": []}',
    ):
        (tmp_path / STATUS).write_text(broken)
        assert cli.main(["top", str(tmp_path), "--once"]) == 2
        assert "not a readable status of a run" in capsys.readouterr().err


def test_the_live_view_looks_again_until_it_is_interrupted(tmp_path):
    fit(built(), BackupAndRestore(tmp_path))
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        found = status(tmp_path)
        (tmp_path / STATUS).write_text(json.dumps(found | {"steps_in_all": 70 + len(slept)}))
        if len(slept) == 3:
            raise KeyboardInterrupt

    console = Console(width=160, record=True, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        top.watch(str(tmp_path), 0.5, console, sleep)
    assert slept == [0.5] * 3
    assert "(72 in all)" in console.export_text()
    with pytest.raises(lockstep.OptionError, match=r"--interval: expected 0.1 seconds or more, got 0"):
        top.watch(str(tmp_path), 0, console)


def test_the_slowest_is_who_reads_while_all_wait():
    rows = [{"worker": 0, "waited": 0.7, "read": 0.1}, {"worker": 1, "waited": 0.7, "read": 0.8}]
    assert top.slowest(rows) == 1
    assert top.slowest([{"worker": 0, "waited": 0.01, "read": 0.9}, rows[1]]) == 1
    assert top.slowest([{"worker": 0, "waited": 0.01, "read": 0.9}, {"worker": 1}]) is None
    assert top.slowest(rows[1:]) is None
