"""The display in a terminal, which is a pseudo-terminal of a process of its own, and what is there without one."""

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lockstep.callbacks import RichProgress
from lockstep.fit.monitoring.rich_progress import _line, _time_left
from lockstep.fit.monitoring.step_timer import FitProgress, TimerReading

from .runs import built, fit

ROOT = Path(__file__).parents[3]
DEADLINE = 120
CODE = """
import sys
sys.path.insert(0, {root!r})
from tests.fit.monitoring.runs import built, data, fit, keras
import lockstep
class Slow(keras.utils.PyDataset):
    def __len__(self):
        return 12
    def __getitem__(self, number):
        import time
        time.sleep(0.05)
        return tuple(array[:8] for array in data())
class Says(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs):
        print("a line of the user's own")
options = dict(epochs=2, validation_data=data(), callbacks=[Says(), lockstep.callbacks.RichProgress()])
logs = built().fit(Slow(), **options).history
print("LOSSES", *(f"{{value:.4g}}" for value in logs["loss"]))
"""


def in_a_terminal(command):
    """All that a process writes to a terminal of 200 columns."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200", "LINES": "50"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    text, until = b"", time.monotonic() + DEADLINE
    with contextlib.suppress(OSError):  # What a terminal says whose other end was closed.
        while time.monotonic() < until:
            if select.select([ours], [], [], 0.1)[0]:
                text += os.read(ours, 65536)
    os.close(ours)
    process.kill()
    assert process.wait(DEADLINE) == 0, text.decode()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode()).replace("\r", "\n")


@pytest.mark.slow
def test_a_terminal_shows_one_display_and_not_the_bar_of_keras():
    text = in_a_terminal([sys.executable, "-c", CODE.format(root=str(ROOT))])
    losses = re.search(r"LOSSES (\S+) (\S+)", text).groups()
    for epoch, loss in enumerate(losses, start=1):
        (line,) = re.findall(rf"^epoch {epoch}/2 · step 12/12 · .*", text, flags=re.MULTILINE)
        assert f"loss {loss} " in line + " "
        assert "val_loss" in line
        assert re.search(r" · [\d,]+ rows/s · waits \d+% · 0:00:\d\d · ", line)
    running = re.findall(r"epoch \d/2 · step (\d+)/12 · .*?ETA (?:-|0:00:\d\d)", text)
    assert len(set(running)) > 1
    assert "ms/step" not in text
    assert text.count("a line of the user's own") == 2


def test_without_a_terminal_the_bar_of_keras_stays_as_it_is(capsys):
    fit(built(), RichProgress(), verbose="auto")
    printed = capsys.readouterr().out
    assert "Epoch 2/2" in printed
    assert "ms/step" in printed
    assert "rows/s" not in printed
    fit(built(), RichProgress(), verbose=0)
    assert not capsys.readouterr().out


def test_what_is_not_known_is_not_shown():
    course = FitProgress(epoch=0, epochs=3, done=4, steps=None)
    assert _line(course, TimerReading(), "ETA -", {}).plain == "epoch 1/3 · step 4/? · ETA -"
    assert _time_left(course, TimerReading(2, 8, 4.0, 0.0)) == "-"
    assert _time_left(course._replace(steps=10), TimerReading(2, 8, 4.0, 0.0)) == "0:00:12"
    logs = {"loss": np.float32(0.123456), "nested": {"a": 1}, "of each class": np.ones(2), "text": "best", "none": None}
    assert _line(course, TimerReading(2, 800, 4.0, 1.0), "x", logs).plain == (
        "epoch 1/3 · step 4/? · 200 rows/s · waits 25% · x · loss 0.1235"
    )
