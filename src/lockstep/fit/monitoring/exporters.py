"""Callbacks that give the measurements of a run to other programs: Prometheus, and the status of a TrainJob of Kubeflow.

Metrics for Prometheus follow https://prometheus.io/docs/practices/naming/: base units, and counters whose rate gives the value for any
duration. A request reads what the step timer and the heartbeats have; it waits for no device and for no step.

Kubeflow Trainer (from 2.2 on, with its feature gate ``TrainJobStatus``) gives each pod an address, a CA certificate and a token, and takes
updates there: https://github.com/kubeflow/trainer/blob/master/docs/user-guides/trainjob-progress.md.
"""

import importlib
import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPSConnection
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep._errors import OptionError, install_extra, instance_of, whole_number
from lockstep.distributed.cluster.env_reader import restarts_of
from lockstep.fit.monitoring.step_timer import Attachment, MonitorCallback, StepTimer, numbers_of

_MAX_PORT = 65_535
_CLOSING_SECONDS = 5.0  # that the end of fit waits for the thread of the server


class PrometheusExporter(MonitorCallback):
    """Serves the measurements of a run to Prometheus while ``fit`` runs.

    The chief serves ``http://HOST:PORT/metrics``; other workers do nothing. ``docs/monitoring.md`` lists the metrics. The port is open from
    the beginning to the end of a call of ``fit``, also if that fails. There is no authentication: a ``host`` other than that of this
    machine lets everyone who can reach it read the metrics.

    This needs ``pip install '.[prometheus]'`` in a checkout.

    Args:
        port: to listen on; 0: a free port, which :attr:`port` has.
        host: name or address of this machine on which it listens; ``"0.0.0.0"``: all addresses.

    Raises:
        OptionError: an argument is out of its range; and in ``fit``: prometheus_client is not installed, or the port cannot be opened.

    Example:
        >>> import lockstep
        >>> exporter = lockstep.callbacks.PrometheusExporter(port=0)  # model.fit(x, y, callbacks=[exporter])
        >>> exporter.port is None  # as no fit runs
        True
    """

    def __init__(self, port: int = 9464, host: str = "127.0.0.1") -> None:
        super().__init__()
        self._wanted = whole_number("PrometheusExporter: port", port, minimum=0, maximum=_MAX_PORT)
        self._host = instance_of(str, "PrometheusExporter: host", host, "a name or an address")
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int | None:
        """The port on which it listens; None if no ``fit`` runs, and on other workers than the chief."""
        return None if self._server is None else int(self._server.server_port)

    def attach(self, attachment: Attachment, arguments: dict[str, Any]) -> None:
        super().attach(attachment, arguments)
        if not attachment.is_chief:
            return
        client = _prometheus_client()
        registry = client.CollectorRegistry()
        registry.register(_Collector(attachment, client.core))
        try:
            self._server, self._thread = client.start_http_server(self._wanted, self._host, registry)
        except (OSError, UnicodeError) as error:
            raise OptionError(
                f"PrometheusExporter: {self._host}:{self._wanted} cannot be opened: {error}. Fix: choose another port (0: any free "
                "port), and a host of this machine."
            ) from error

    def detach(self) -> None:
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            server.server_close()
            self._thread.join(_CLOSING_SECONDS)
        super().detach()


def _prometheus_client() -> Any:
    try:
        importlib.import_module("prometheus_client.core")
        return importlib.import_module("prometheus_client")
    except ModuleNotFoundError as error:
        raise OptionError(
            f"PrometheusExporter: the package prometheus_client is not installed. Fix: {install_extra('prometheus')}."
        ) from error


class _Collector:
    """Reads the metrics of a call of ``fit`` for each request, as ``prometheus_client`` asks for them."""

    def __init__(self, attachment: Attachment, core: Any) -> None:
        self._attachment, self._core, self._restarts = attachment, core, restarts_of(os.environ)

    def collect(self) -> Iterator[Any]:
        """Yield each metric with its values."""
        yield from self._run()
        yield from self._steps()
        yield from self._workers()

    def _run(self) -> Iterator[Any]:
        gauge, progress = self._core.GaugeMetricFamily, self._attachment.timer.progress
        yield gauge("lockstep_epoch", "The epoch that runs, from 1", value=progress.epoch + 1)
        yield gauge("lockstep_step", "Steps since the optimizer was made", value=progress.total)
        yield gauge("lockstep_devices", "Devices of all workers", value=len(self._attachment.devices))
        yield gauge("lockstep_restarts", "Restarts by lockstep run so far", value=self._restarts)

    def _steps(self) -> Iterator[Any]:
        gauge, counter, timer = self._core.GaugeMetricFamily, self._core.CounterMetricFamily, self._attachment.timer
        steps, rows, seconds, waited = timer.newest
        yield counter("lockstep_measured_steps", "Training steps that were not compiled", value=steps)
        yield counter("lockstep_measured_rows", "Rows of the global batches of these steps", value=rows)
        yield counter("lockstep_measured_seconds", "Seconds of these steps", value=seconds)
        yield counter("lockstep_data_wait_seconds", "Seconds of these steps without a batch", value=waited)
        recent = numbers_of(timer.recent, len(self._attachment.devices))
        for name, text, of in (
            ("lockstep_rows_per_second", "Rows of the global batch a second", "throughput/samples_per_sec"),
            ("lockstep_step_seconds", "Seconds from step to step", "time/step"),
            ("lockstep_step_data_wait_seconds", "Seconds of a step without a batch", "time/data_wait"),
        ):
            yield gauge(name, f"{text}, over the last steps; NaN before the first measured step", value=recent[of])

    def _workers(self) -> Iterator[Any]:
        counter, gauge, labels = self._core.CounterMetricFamily, self._core.GaugeMetricFamily, ["worker", "host"]
        step = gauge("lockstep_worker_step", "The last step that a worker has begun", labels=labels)
        activity = gauge("lockstep_worker_activity_seconds", "Age of what a worker does", labels=[*labels, "activity"])
        silent = gauge("lockstep_worker_heartbeat_age_seconds", "Age of the last heartbeat", labels=labels)
        waited = counter("lockstep_worker_data_wait_seconds", "Seconds without a batch", labels=labels)
        read = counter("lockstep_worker_data_read_seconds", "Seconds in which a worker has read data", labels=labels)
        for row, seconds in self._attachment.workers():
            worker = [str(row["worker"]), row["host"]]
            step.add_metric(worker, row["step"])
            activity.add_metric([*worker, row["phase"]], row["seconds"])
            silent.add_metric(worker, row["silent"])
            waited.add_metric(worker, seconds.get("waited", 0.0))
            read.add_metric(worker, seconds.get("read", 0.0))
        yield from (step, activity, silent, waited, read)


_URL, _CA, _TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_INTERVAL = 5.0  # seconds between updates, as Kubeflow asks for
_LIMIT = 5.0  # seconds of an update
_MAX_WAIT_SECONDS = 2 * _LIMIT  # that the end of fit waits for the last update
_MAX_METRICS, _MAX_TEXT, _MAX_SECONDS = 256, 64, 2**31 - 1  # limits of the TrainJob's schema


class KubeflowProgress(MonitorCallback):
    """Reports progress, the remaining time and the logs of the last epoch to the TrainJob in whose pods ``fit`` runs.

    ``kubectl get trainjob NAME -o jsonpath='{.status.trainerStatus}'`` shows them. The chief sends an update at the beginning, every five
    seconds, and at the end of ``fit``, in a thread: training does not wait for it. Updates that fail are reported in one line. Outside of a
    TrainJob that takes updates, the chief says so in a line, and nothing is sent.

    Example:
        >>> import lockstep
        >>> progress = lockstep.callbacks.KubeflowProgress()  # model.fit(x, y, callbacks=[progress])
    """

    _recorder: "_Updates | None" = None

    def attach(self, attachment: Attachment, arguments: dict[str, Any]) -> None:
        super().attach(attachment, arguments)
        if attachment.is_chief:
            server = _server_of(os.environ, attachment.log)
            self._recorder = None if server is None else _Updates(server, attachment.timer, attachment.log)

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        if self._recorder is not None:
            self._recorder.start()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._recorder is not None:
            self._recorder.metrics = dict(logs or {})

    def on_train_end(self, logs: Any = None) -> None:
        if self._recorder is not None:
            self._recorder.is_done = True


@dataclass(frozen=True)
class _StatusServer:
    """The server of Kubeflow Trainer for one TrainJob; the token is read anew for each update, as Kubernetes renews its file."""

    url: str
    ca_file: str
    token_file: str

    def post(self, update: Mapping[str, Any]) -> str | None:
        """Send an update; return why it failed, or None."""
        parts = urlsplit(self.url)
        try:
            headers = {
                "Authorization": f"Bearer {Path(self.token_file).read_text().strip()}",
                "Content-Type": "application/json",
            }
            context = ssl.create_default_context(cafile=self.ca_file)
            connection = HTTPSConnection(parts.hostname or "", parts.port, timeout=_LIMIT, context=context)
            try:
                connection.request("POST", parts.path, json.dumps(update, allow_nan=False), headers)
                response = connection.getresponse()
                if response.status == 200:
                    return None
                return f"{response.status} {response.read(500).decode(errors='replace')}"
            finally:
                connection.close()
        except (OSError, HTTPException, ValueError) as error:
            return f"{type(error).__name__}: {error}"


def _server_of(environ: Mapping[str, str], log: Callable[[str], None]) -> _StatusServer | None:
    """Return the server that the variables of the pod name; None, with a line, if they name none."""
    missing = [name for name in (_URL, _CA, _TOKEN) if not environ.get(name)]
    if missing:
        log(
            f"KubeflowProgress: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, so no progress is reported. Kubeflow "
            "Trainer sets it in the pods of a TrainJob if its feature gate TrainJobStatus is on."
        )
        return None
    if urlsplit(environ[_URL]).scheme != "https":
        log(f"KubeflowProgress: expected an https address in {_URL}, got {environ[_URL]!r}; no progress is reported.")
        return None
    return _StatusServer(environ[_URL], environ[_CA], environ[_TOKEN])


class _Updates:
    """Sends the status of a call of ``fit`` from a thread.

    Attributes:
        metrics: logs of the last epoch.
        is_done: whether training came to its end.
    """

    def __init__(self, server: _StatusServer, timer: StepTimer, log: Callable[[str], None]) -> None:
        self._server, self._timer, self._log = server, timer, log
        self.metrics: dict[str, Any] = {}
        self.is_done = False
        self._has_ended, self._has_failed = threading.Event(), False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to send."""
        self._thread = threading.Thread(target=self._run, name="lockstep-kubeflow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send a last update, and end."""
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join(_MAX_WAIT_SECONDS)

    def _run(self) -> None:
        self._send()
        while not self._has_ended.wait(_INTERVAL):
            self._send()
        self._send()

    def _send(self) -> None:
        problem = self._server.post({"trainerStatus": self._status()})
        if problem is not None and not self._has_failed:
            self._has_failed = True
            self._log(f"KubeflowProgress: an update of {self._server.url} failed: {problem}. Training continues.")

    def _status(self) -> dict[str, Any]:
        status = {
            "metrics": metrics_of(self.metrics),
            "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        if self.is_done:
            return status | {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
        return status | estimate_of(self._timer)


def metrics_of(logs: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the logs that are single numbers as the metrics of a TrainJob, within the limits of its schema.

    Example:
        >>> metrics_of({"loss": 0.25})
        [{'name': 'loss', 'value': '0.25'}]
    """
    numbers = ((name, float(value)) for name, value in logs.items() if name and isinstance(value, Real))
    pairs = ((name[:_MAX_TEXT], f"{value:.6g}") for name, value in numbers)
    return [{"name": name, "value": value} for name, value in pairs][:_MAX_METRICS]


def estimate_of(timer: StepTimer) -> dict[str, int]:
    """Return the share of the steps that is done, in percent, and the seconds that the others will take; each only if it is known."""
    progress, recent = timer.progress, timer.recent
    if not progress.steps:
        return {"progressPercentage": 100 * progress.epoch // progress.epochs}
    steps = progress.epochs * progress.steps
    done = min(steps, progress.epoch * progress.steps + progress.done)
    found = {"progressPercentage": 100 * done // steps}
    if recent.steps:
        found["estimatedRemainingSeconds"] = min(_MAX_SECONDS, round((steps - done) * recent.seconds / recent.steps))
    return found
