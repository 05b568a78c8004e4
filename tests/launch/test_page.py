"""``docs/launching.md`` matches the code."""

import re
from pathlib import Path

import pytest

from lockstep import cli
from lockstep._errors import DONE, INTERRUPTED, NO_PROGRESS, PEER_LOST, USER_ERROR
from lockstep.distributed.cluster.addresses import DEFAULT_PORT
from lockstep.launch.job_scripts import JOB_SCRIPTS
from lockstep.launch.launch_config import LaunchConfig

PAGE = (Path(__file__).parents[2] / "docs" / "launching.md").read_text()


def test_its_options_exist(capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE.replace("--epochs", "")))
    assert named <= known
    assert known - named <= {"--help", "--nproc-per-node"}


def test_its_exit_codes_are_ours():
    rows = dict(re.findall(r"^\| (\d+) \| (.*?) \|", PAGE, flags=re.MULTILINE))
    named = {DONE, USER_ERROR, PEER_LOST, NO_PROGRESS, 2, 141}
    assert {int(code) for code in rows} == named
    assert str(INTERRUPTED) in PAGE


def test_its_ports_and_schedulers_are_ours():
    assert f"or {DEFAULT_PORT}: worker `k` of a machine has the port `{DEFAULT_PORT} + k`" in PAGE
    assert LaunchConfig(("train.py",), workers=2, coordinator="a").addresses == (
        f"a:{DEFAULT_PORT}",
        f"a:{DEFAULT_PORT + 1}",
    )
    assert set(re.findall(r"--print (\w+)", PAGE)) == set(JOB_SCRIPTS)
