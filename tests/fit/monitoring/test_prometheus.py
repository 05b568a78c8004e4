"""The Prometheus callback, read over HTTP as Prometheus does; ``./scripts/test-inputs`` runs these, where none may be skipped."""

import contextlib
import importlib
import math
import os
import socket
import sys
import urllib.error
import urllib.request
from itertools import pairwise

import keras
import pytest

from lockstep import OptionError
from lockstep.callbacks import BackupAndRestore, PrometheusExporter
from lockstep.fit.monitoring.flops import FlopCounter
from lockstep.fit.monitoring.step_timer import Attachment, StepTimer

from .runs import BATCH, STEPS, built, fit

with contextlib.suppress(ImportError):
    importlib.import_module("prometheus_client")


@pytest.fixture
def client():
    if os.environ.get("LOCKSTEP_ALL_INPUTS"):
        return importlib.import_module("prometheus_client")
    return pytest.importorskip(
        "prometheus_client", reason="prometheus_client is not installed: ./scripts/test-inputs runs this"
    )


class Scraper(keras.callbacks.Callback):
    """Reads the metrics at some points of a run."""

    def __init__(self, exporter):
        super().__init__()
        self.exporter, self.seen = exporter, []

    def on_train_begin(self, logs=None):
        self.seen.append(scraped(self.exporter.port))

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(scraped(self.exporter.port))


def scraped(port):
    """The values by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    parser = importlib.import_module("prometheus_client.parser")
    samples = [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_exporter_serves_the_measurements_of_a_run(client, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_GENERATION", "3")
    exporter = PrometheusExporter(port=0)
    scraper = Scraper(exporter)
    fit(built(devices=2), exporter, scraper)
    first, *_, last = scraper.seen
    assert len(scraper.seen) == 3
    assert (first["lockstep_step",], last["lockstep_step",]) == (0, 2 * STEPS)
    assert (last["lockstep_epoch",], last["lockstep_devices",], last["lockstep_restarts",]) == (2, 2, 3)
    assert math.isnan(first["lockstep_step_seconds",])
    assert 0 < last["lockstep_step_seconds",] < 60
    steps = last["lockstep_measured_steps_total",]
    assert STEPS <= steps < 2 * STEPS
    assert last["lockstep_measured_rows_total",] == steps * BATCH
    assert last["lockstep_rows_per_second",] == pytest.approx(BATCH / last["lockstep_step_seconds",])
    assert last["lockstep_measured_seconds_total",] >= last["lockstep_data_wait_seconds_total",] >= 0
    assert last["lockstep_worker_step", socket.gethostname(), "0"] == 2 * STEPS
    assert last["lockstep_worker_data_read_seconds_total", socket.gethostname(), "0"] > 0
    counters = [name for name in last if name[0].endswith("_total")]
    assert all(one[name] <= other[name] for one, other in pairwise(scraper.seen) for name in counters)


def test_exporter_closes_its_port_with_fit(client):
    exporter, ports = PrometheusExporter(port=0), []
    note = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: ports.append(exporter.port))
    for _ in range(2):  # a callback can be used again
        fit(built(), exporter, note)
        assert exporter.port is None
        with pytest.raises(urllib.error.URLError):
            scraped(ports[-1])


def test_exporter_closes_its_port_after_an_exception(client):
    exporter, ports = PrometheusExporter(port=0), []

    def fail(epoch, logs):
        ports.append(exporter.port)
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        fit(built(), exporter, keras.callbacks.LambdaCallback(on_epoch_end=fail))
    with pytest.raises(urllib.error.URLError):
        scraped(ports[0])


def test_exporter_names_a_port_that_is_taken(client):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            OptionError, match=rf"PrometheusExporter: 127\.0\.0\.1:{port} cannot be opened: .*Fix: choose another"
        ):
            fit(built(), PrometheusExporter(port))


def test_exporter_is_compatible_with_checkpoints(client, tmp_path):
    for epochs in (1, 2):
        exporter = PrometheusExporter(port=0)
        scraper = Scraper(exporter)
        fit(built(), BackupAndRestore(tmp_path), exporter, scraper, epochs=epochs)
    assert [seen["lockstep_step",] for seen in scraper.seen][-1] == 2 * STEPS


def test_exporter_names_the_missing_package(monkeypatch):
    for name in ("prometheus_client", "prometheus_client.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(OptionError, match=r"prometheus_client is not installed. Fix: pip install '.\[prometheus\]'"):
        fit(built(), PrometheusExporter(port=0))
    assert fit(built())["loss"]


@pytest.mark.parametrize(
    ("arguments", "problem"), [({"port": 65_536}, "port: expected"), ({"host": 5}, "host: expected")]
)
def test_exporter_checks_its_arguments(arguments, problem):
    with pytest.raises(OptionError, match=f"PrometheusExporter: {problem}"):
        PrometheusExporter(**arguments)


def attachment_of(is_chief):
    """The attachment to a call of fit with two workers, of which worker 1 reads slowly."""
    rows = [
        {"worker": worker, "host": f"node{worker}", "step": 8 + worker, "phase": "data", "seconds": 3.0, "silent": 0.5}
        for worker in (0, 1)
    ]
    workers = [(rows[0], {"waited": 5.0, "read": 1.0}), (rows[1], {"waited": 6.0, "read": 7.0})]
    timer = StepTimer(lambda: 0.0, 100)
    return Attachment(timer, (None,) * 4, FlopCounter(), bool, bool, is_chief, print, print, lambda: workers)


def test_exporter_serves_each_worker_at_the_chief(client):
    exporter = PrometheusExporter(port=0)
    exporter.attach(attachment_of(is_chief=True), {})
    try:
        found = scraped(exporter.port)
    finally:
        exporter.detach()
    assert found["lockstep_devices",] == 4
    assert [found["lockstep_worker_step", f"node{worker}", str(worker)] for worker in (0, 1)] == [8, 9]
    assert found["lockstep_worker_activity_seconds", "data", "node1", "1"] == 3
    assert found["lockstep_worker_heartbeat_age_seconds", "node1", "1"] == 0.5
    assert [found["lockstep_worker_data_read_seconds_total", f"node{worker}", str(worker)] for worker in (0, 1)] == [
        1,
        7,
    ]
    assert found["lockstep_worker_data_wait_seconds_total", "node1", "1"] == 6


def test_exporter_serves_nothing_on_other_workers():
    exporter = PrometheusExporter(port=0)
    exporter.attach(attachment_of(is_chief=False), {})
    assert exporter.port is None
    exporter.detach()
