"""Trackers of other packages get one run with each epoch once, from the chief alone, also if a run is stopped and resumed.

``./scripts/test-inputs`` runs these with W&B and MLflow, where none may be skipped.
"""

import csv
import importlib.util
import json
import os
import struct

import pytest

from tests.pages import blocks_of
from tests.support.processes import Job

pytestmark = pytest.mark.xdist_group(__name__)

EPOCHS, STEPS = 3, 3
PACKAGES = ("mlflow", "wandb")


def is_there(package):
    return importlib.util.find_spec(package) is not None


@pytest.fixture(scope="module", params=[1, 2])
def tracked(request, forks, tmp_path_factory):
    """The folder of a run that was stopped in its second epoch, and then resumed; and the losses of its epochs."""
    workers, folder = request.param, tmp_path_factory.mktemp("tracked")
    trackers = [name for name in PACKAGES if os.environ.get("LOCKSTEP_ALL_INPUTS") or is_there(name)]
    codes, said = [], []
    for signal_at in (STEPS + 1, None):
        job = Job(forks, tmp_path_factory.mktemp("job"), workers)
        try:
            environ = {"MLFLOW_ALLOW_FILE_STORE": "true"}  # It needs no database.
            config = {"environ": environ, "folder": str(folder), "signal_at": signal_at, "trackers": trackers}
            processes = job.start_all("tracked", **config)
            codes.append([process.end() for process in processes])
            said.append(processes[0].said)
        finally:
            job.clean()
    assert codes == [[75] * workers, [0] * workers], "\n".join(said)
    return folder, processes[0].told["loss"]


def package_of(name):
    if not os.environ.get("LOCKSTEP_ALL_INPUTS") and not is_there(name):
        pytest.skip(f"{name} is not installed: ./scripts/test-inputs runs this")
    return name


def test_csv_logger_has_one_row_for_each_epoch(tracked):
    folder, losses = tracked
    with (folder / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == list(range(EPOCHS))
    assert [float(row["loss"]) for row in rows] == losses


def test_mlflow_has_one_run_with_each_epoch_once(tracked):
    package_of("mlflow")
    folder, losses = tracked
    (run,) = (path.parent for path in (folder / "mlruns").rglob("params"))
    assert run.name == (folder / "mlflow_run_id").read_text()
    lines = [line.split() for line in (run / "metrics" / "loss").read_text().splitlines()]
    assert [int(line[2]) for line in lines] == list(range(EPOCHS))
    assert [float(line[1]) for line in lines] == pytest.approx(losses)


WANDB_HEADER, BLOCK, FRAME = 7, 32_768, struct.Struct("<IHB")  # of a log of LevelDB, after W&B's own header


def wandb_records(path):
    """The records of a file of W&B's."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, parts = path.read_bytes(), WANDB_HEADER, b""
    while at + FRAME.size <= len(data):
        if BLOCK - at % BLOCK < FRAME.size:  # Nothing begins at the end of a block.
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = FRAME.unpack_from(data, at)
        at += FRAME.size + length
        parts += data[at - length : at]
        if kind in (1, 4):  # whole, or the last part
            yield records.Record.FromString(parts)
            parts = b""


def wandb_rows(folder):
    """What W&B's files of a folder log, in the order of their names, which begin with the time; and the ids of their runs."""
    rows, ids = [], set()
    for path in sorted(folder.rglob("*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                items = record.history.item
                rows.append(
                    {"/".join([item.key, *item.nested_key]).strip("/"): json.loads(item.value_json) for item in items}
                )
    return rows, ids


def test_wandb_has_one_run_with_each_epoch_once(tracked):
    package_of("wandb")
    folder, losses = tracked
    rows, ids = wandb_rows(folder / "wandb")
    assert ids == {"night-7"}
    assert [row["epoch/epoch"] for row in rows] == list(range(EPOCHS))
    assert [row["epoch/loss"] for row in rows] == pytest.approx(losses)


def test_the_example_in_the_documentation_logs_each_epoch_once(python, tmp_path):
    package_of("wandb")
    done = python(code="\n".join(blocks_of("monitoring")), cwd=tmp_path, environ={"WANDB_MODE": "offline"}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log.csv").read_text().count("\n") == 1 + EPOCHS
    rows, ids = wandb_rows(tmp_path / "wandb")
    assert ids == {"night-7"}
    assert [row["epoch"] for row in rows] == list(range(EPOCHS))
