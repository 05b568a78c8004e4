"""Prometheus callback: the measurements of a run as metrics on an HTTP port of the chief.

Metrics follow https://prometheus.io/docs/practices/naming/: base units, and counters whose rate gives the value for any duration. A request
reads what the step timer and the heartbeats have; it waits for no device and for no step.
"""

import importlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from lockstep._errors import OptionError, instance_of, whole_number
from lockstep.distributed.cluster.env_reader import restarts_of
from lockstep.fit.monitoring.step_timer import Attachment, MonitorCallback, numbers_of

_LARGEST_PORT = 65_535
_LONGEST_WAIT = 5.0  # seconds that the end of fit waits for the thread of the server


class PrometheusExporter(MonitorCallback):
    """Serves the measurements of a run to Prometheus while ``fit`` runs.

    The chief serves ``http://HOST:PORT/metrics``; other workers do nothing. ``docs/monitoring.md`` lists the metrics. The port is open from
    the beginning to the end of a call of ``fit``, also if that fails. There is no authentication: a ``host`` other than that of this
    machine lets everyone who can reach it read the metrics.

    This needs ``pip install 'keras-lockstep[prometheus]'``.

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
        self._wanted = whole_number("PrometheusExporter: port", port, least=0, most=_LARGEST_PORT)
        self._host = instance_of(str, "PrometheusExporter: host", host, "a name or an address")
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int | None:
        """The port on which it listens; None if no ``fit`` runs, and on other workers than the chief."""
        return None if self._server is None else int(self._server.server_port)

    def attach(self, attachment: Attachment, arguments: dict[str, Any]) -> None:
        """See the base class."""
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
        """See the base class."""
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            server.server_close()
            self._thread.join(_LONGEST_WAIT)
        super().detach()


def _prometheus_client() -> Any:
    try:
        importlib.import_module("prometheus_client.core")
        return importlib.import_module("prometheus_client")
    except ModuleNotFoundError as error:
        raise OptionError(
            "PrometheusExporter: the package prometheus_client is not installed. Fix: pip install 'keras-lockstep[prometheus]'"
        ) from error


class _Collector:
    """Reads the metrics of a call of ``fit`` for each request, as ``prometheus_client`` asks for them.

    Args:
        attachment: to the call.
        core: the module of the classes of metrics.
    """

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
