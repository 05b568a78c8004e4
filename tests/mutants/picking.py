"""Pytest plugin for a run on a mutant: select tests, run the cheapest first, and record which one fails and how."""

import json
import os
import re
import time
from pathlib import Path

import pytest

PICK = "LOCKSTEP_MUTANTS_PICK"  # A JSON file: limits of tests by name, the file for notes.


def _pick() -> dict:
    return json.loads(Path(os.environ[PICK]).read_text())


def _note(**values) -> None:
    with Path(_pick()["notes"]).open("a") as file:
        file.write(json.dumps(values) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    import lockstep

    if Path(lockstep.__file__).parents[2] != Path.cwd():
        raise pytest.UsageError(f"the package comes from {lockstep.__file__}")
    limits = _pick()["limits"]
    order = {name: number for number, name in enumerate(limits)}
    items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
    for item in items:
        item.add_marker(pytest.mark.timeout(limits[item.nodeid]), append=False)
    _note(found=len(items))


def pytest_runtest_logstart(nodeid):
    _note(test=nodeid, begun=time.time())


def pytest_runtest_logreport(report):
    if report.failed:
        lines = report.longreprtext.splitlines()
        said = [line[1:].strip() for line in lines if line.startswith("E ")] or lines[-1:]
        # Where this machine keeps its files is nobody's business.
        short = re.sub(r"(?<![\w.])/(?:[\w.-]+/)+", "…/", " ".join(said))
        _note(failed=report.nodeid, when=report.when, said=short[:300])
