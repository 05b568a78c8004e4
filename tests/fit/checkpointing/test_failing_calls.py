"""Calls of the operating system that fail, and limits of the process: training loses checkpoints and nothing else."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.callbacks import BackupAndRestore
from lockstep.checkpoint.store import CheckpointStore
from tests.fit.monitoring.runs import built, fit
from tests.support import compile_cache

SHIM = Path(__file__).parent / "programs" / "failing_calls.c"
FAULTS = {
    "a disk with errors, on write": ("write", errno.EIO),
    "a disk with errors, on sync": ("fsync", errno.EIO),
    "a stale handle of NFS": ("rename", errno.ESTALE),
    "a rename whose answer is lost": ("lost answer of rename", errno.ESTALE),
    "a quota": ("mkdir", errno.EDQUOT),
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """A library that has calls fail, to be preloaded."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("this needs a C compiler and Linux")
    library = tmp_path_factory.mktemp("shim") / "failing_calls.so"
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(SHIM), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return library


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_calls_that_fail_cost_checkpoints_and_no_training(shim, tmp_path):
    faults = {"LD_PRELOAD": str(shim), "FAULT_UNDER": "faulty", "FAULT_SWITCH": str(tmp_path / "switch")}
    program = "tests.fit.checkpointing.programs.trains_while_calls_fail"
    command = [sys.executable, "-m", program, str(tmp_path), json.dumps(list(FAULTS.values()))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=270, env=os.environ | faults, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name, (call, error), case in zip(FAULTS, FAULTS.values(), found["cases"], strict=True):
        assert [case["disturbed"], case["resumed"]] == found["whole"], name
        failures = [line for line in case["lines"] if "was not written, and training continues: " in line]
        assert failures, (name, case["lines"])
        assert all(os.strerror(error) in line for line in failures), (name, failures)
        if call == "lost answer of rename":
            assert max(case["good"]) > 3  # What was renamed is whole, whatever the answer was.
        else:
            assert 1 <= max(case["good"]) <= 3, name  # The third may still have been under way.
        assert not case["left"], name


def test_a_limit_of_file_sizes_costs_checkpoints_and_no_training(tmp_path, caplog):
    caplog.set_level("INFO", "lockstep")
    whole = built()
    fit(whole)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limited = built()
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with compile_cache.unused():  # Entries would be cut off, too.
            fit(limited, BackupAndRestore(tmp_path / "run", save_freq=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for one, other in zip(whole.get_weights(), limited.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert "the checkpoint of step 1 was not written, and training continues: " in caplog.text
    assert "File too large; it needs " in caplog.text
    assert CheckpointStore(tmp_path / "run").newest() is None
    assert not list((tmp_path / "run").glob(".writing*"))
    fit(limited, BackupAndRestore(tmp_path / "run"))
    assert CheckpointStore(tmp_path / "run").newest() is not None
