"""Progress for Kubeflow, sent over TLS to a server that behaves as the published one."""

import http.server
import json
import math
import re
import shutil
import ssl
import subprocess
import threading
from collections import namedtuple

import keras
import numpy as np
import pytest

from lockstep.callbacks import BackupAndRestore, KubeflowProgress
from lockstep.fit.monitoring import exporters
from lockstep.fit.monitoring.exporters import estimate_of, metrics_of
from lockstep.fit.monitoring.step_timer import FitProgress, StepTimer, TimerReading

from .runs import built, fit
from .test_prometheus import attachment_of

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/night/status"
VARIABLES = [f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN")]

Update = namedtuple("Update", "path authorization body")


def make_certificate(folder):
    """Return a certificate for 127.0.0.1 that is its own authority, and its key."""
    names = folder / "tls.crt", folder / "tls.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    options = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", names[0], "-keyout", names[1]]
    subprocess.run([*command, *options], check=True, capture_output=True, timeout=60)
    return names


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    return make_certificate(tmp_path_factory.mktemp("certificate"))


class StatusServer:
    """Takes updates, and answers each with ``status``."""

    def __init__(self, certificate, status=200):
        self.updates = updates = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                updates.append(Update(self.path, self.headers["Authorization"], body))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b'{"message": "Forbidden"}')

            def log_message(self, *arguments):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"https://127.0.0.1:{self._server.server_port}{PATH}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.fixture
def trainjob(certificate, monkeypatch, tmp_path):
    """Make a pod's variables for a server, which is closed with the test."""
    servers = []

    def make(**options):
        servers.append(StatusServer(certificate, **options))
        (tmp_path / "token").write_text("first\n")
        for name, value in zip(VARIABLES, (servers[-1].url, certificate[0], tmp_path / "token"), strict=True):
            monkeypatch.setenv(name, str(value))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def fits_the_schema(body):
    """Check an update against what the CRD of TrainJob says of ``trainerStatus`` (trainer.kubeflow.org/v1alpha1, 2.3)."""
    (status,) = body.values()
    assert set(body) == {"trainerStatus"}
    assert set(status) <= {"progressPercentage", "estimatedRemainingSeconds", "metrics", "lastUpdatedTime"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", status["lastUpdatedTime"])
    assert 0 <= status["progressPercentage"] <= 100
    assert status.get("estimatedRemainingSeconds", 0) in range(2**31)
    assert len(status["metrics"]) <= 256
    for metric in status["metrics"]:
        assert set(metric) == {"name", "value"}
        assert all(isinstance(text, str) and 1 <= len(text) <= 64 for text in metric.values())
    return status


@pytest.mark.slow
def test_progress_and_logs_of_a_run_are_reported(trainjob):
    server = trainjob()
    history = fit(built(devices=2), KubeflowProgress())
    assert {update.path for update in server.updates} == {PATH}
    first, *_, last = (fits_the_schema(update.body) for update in server.updates)
    assert (first["progressPercentage"], first["metrics"]) == (0, [])
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    values = {metric["name"]: float(metric["value"]) for metric in last["metrics"]}
    assert values == {name: pytest.approx(value[-1], rel=1e-5) for name, value in history.items()}


@pytest.mark.slow
def test_updates_come_during_the_run_and_with_the_token_of_the_moment(trainjob, tmp_path, monkeypatch):
    monkeypatch.setattr(exporters, "_INTERVAL", 0.05)
    server = trainjob()
    seen = threading.Event()

    def renew(epoch, logs):
        (tmp_path / "token").write_text("second\n")
        while not any(update.authorization == "Bearer second" for update in server.updates):
            assert not seen.wait(0.02)

    fit(built(), KubeflowProgress(), keras.callbacks.LambdaCallback(on_epoch_end=renew))
    assert server.updates[0].authorization == "Bearer first"
    during = [fits_the_schema(update.body) for update in server.updates[:-1]]
    assert 50 in [status["progressPercentage"] for status in during]


@pytest.mark.slow
def test_a_run_that_fails_is_not_reported_as_complete(trainjob):
    server = trainjob()

    def fail(epoch, logs):
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        fit(built(), KubeflowProgress(), keras.callbacks.LambdaCallback(on_epoch_end=fail))
    assert fits_the_schema(server.updates[-1].body)["progressPercentage"] == 50


@pytest.mark.slow
def test_a_server_that_refuses_is_reported_once_and_training_continues(trainjob, caplog):
    caplog.set_level("INFO", "lockstep")
    trainjob(status=403)
    assert fit(built(), KubeflowProgress())["loss"]
    (line,) = [message for message in caplog.messages if "KubeflowProgress" in message]
    assert line.endswith('failed: 403 {"message": "Forbidden"}. Training continues.')


@pytest.mark.slow
def test_a_server_with_another_certificate_gets_no_token(trainjob, caplog, tmp_path, monkeypatch):
    caplog.set_level("INFO", "lockstep")
    server = trainjob()
    monkeypatch.setenv(VARIABLES[1], str(make_certificate(tmp_path)[0]))
    fit(built(), KubeflowProgress())
    assert not server.updates
    assert "certificate verify failed" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict.fromkeys(VARIABLES),
            "KUBEFLOW_TRAINER_SERVER_URL, KUBEFLOW_TRAINER_SERVER_CA_CERT, KUBEFLOW_TRAINER_SERV",
        ),
        ({VARIABLES[2]: None}, "KUBEFLOW_TRAINER_SERVER_TOKEN is not set, so no progress is reported"),
        ({VARIABLES[0]: "http://server/x"}, "expected an https address in KUBEFLOW_TRAINER_SERVER_URL, got 'http"),
    ],
)
def test_without_a_server_nothing_is_sent_and_a_line_says_why(trainjob, changes, message, caplog, monkeypatch):
    caplog.set_level("INFO", "lockstep")
    server = trainjob()
    for name, value in changes.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    fit(built(), KubeflowProgress())
    assert message in caplog.text
    assert not server.updates


@pytest.mark.slow
def test_other_workers_than_the_chief_send_nothing(trainjob):
    server = trainjob()
    progress = KubeflowProgress()
    progress.attach(attachment_of(is_chief=False), {})
    progress.on_train_begin()
    progress.on_train_end()
    progress.detach()
    assert not server.updates


@pytest.mark.slow
def test_a_resumed_run_reports_from_its_position(trainjob, tmp_path):
    server = trainjob()
    fit(built(), BackupAndRestore(tmp_path / "run"), epochs=1)
    fit(built(), BackupAndRestore(tmp_path / "run"), KubeflowProgress())
    assert fits_the_schema(server.updates[-1].body)["progressPercentage"] == 100


def timer(progress, recent):
    made = StepTimer(lambda: 0.0, 10)
    made.progress = progress
    made._recent.extend([TimerReading(), recent])
    return made


@pytest.mark.parametrize(
    ("progress", "recent", "expected"),
    [
        (
            FitProgress(1, 4, 5, 10),
            TimerReading(2, 16, 1.0),
            {"progressPercentage": 37, "estimatedRemainingSeconds": 12},
        ),
        (FitProgress(1, 4, 5, 10), TimerReading(), {"progressPercentage": 37}),
        (FitProgress(1, 4, 5, None), TimerReading(2, 16, 1.0), {"progressPercentage": 25}),
        (FitProgress(), TimerReading(), {"progressPercentage": 0}),
        (
            FitProgress(0, 1, 0, 10**9),
            TimerReading(1, 1, 1e9),
            {"progressPercentage": 0, "estimatedRemainingSeconds": 2**31 - 1},
        ),
    ],
)
def test_estimates(progress, recent, expected):
    assert estimate_of(timer(progress, recent)) == expected


def test_metrics_stay_within_the_limits_of_the_schema():
    logs = {
        "": 1.0,
        "x" * 100: math.nan,
        "of each class": np.ones(3),
        "text": "best",
        **{f"m{number}": number for number in range(300)},
    }
    found = metrics_of(logs)
    assert len(found) == 256
    assert found[0] == {"name": "x" * 64, "value": "nan"}
    assert found[2] == {"name": "m1", "value": "1"}
