"""What docs/start.md shows is what happens: a training, one that is killed and goes on, and one on two workers."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "start.md").read_text()
SCRIPT, WITH_BACKUP = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
WHOLE, KILLED, RESUMED, WORKERS = re.findall(r"```\n((?:lockstep:|lockstep run:).*?)```", PAGE, flags=re.DOTALL)


def script_with_backup():
    *before, fit = SCRIPT.splitlines()
    assert fit.startswith("model.fit(")
    return "\n".join([*before, WITH_BACKUP])


def run(folder, script, *arguments, launcher=()):
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-u", *launcher, "train.py", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, cwd=folder)
    return done.returncode, done.stdout


def lines(printed):
    """What the lines say beside times and figures, without those about waits, which a busy machine adds."""
    kept = [line for line in printed.splitlines() if re.search(r"lockstep:|Epoch|loss", line)]
    kept = [line for line in kept if not re.search(r"waiting for|are here after", line)]
    return [re.sub(r" - \d+m?s - \S+/step|\b0\.\d{4}\b", "", line) for line in kept]


def figures(printed):
    return [float(number) for number in re.findall(r"\b0\.\d{4}\b", printed)]


def assert_shown(printed, shown):
    assert lines(printed) == lines(shown)
    assert figures(printed) == pytest.approx(figures(shown), abs=2e-3)  # Processors round differently.


@pytest.mark.slow
def test_the_first_script_prints_what_the_page_shows(tmp_path):
    code, printed = run(tmp_path, SCRIPT)
    assert code == 0, printed
    assert_shown(printed, WHOLE)


@pytest.mark.slow
def test_killed_and_started_again_it_goes_on_in_the_middle_of_the_epoch(tmp_path):
    code, printed = run(tmp_path, script_with_backup(), "kill")
    assert code == -signal.SIGKILL, printed
    assert_shown(printed, KILLED)
    code, printed = run(tmp_path, script_with_backup())
    assert code == 0, printed
    assert_shown(printed, RESUMED)
    assert figures(RESUMED) == figures(WHOLE)[-4:]


@pytest.mark.slow
def test_the_same_script_trains_on_two_workers(tmp_path):
    ((before, after),) = re.findall(r"```diff\n-(.*)\n\+(.*)\n```", PAGE)
    script = script_with_backup()
    assert before in script
    launcher = ("-m", "lockstep.cli", "run", "-n", "2", "--timeout", "100")
    code, printed = run(tmp_path, script.replace(before, after), launcher=launcher)
    assert code == 0, printed
    assert_shown(printed, WORKERS)
