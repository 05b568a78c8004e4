"""Kubeflow callback: progress, remaining time and logs of a run in the status of its TrainJob.

Kubeflow Trainer (from 2.2 on, with its feature gate ``TrainJobStatus``) gives each pod an address, a CA certificate and a token, and takes
updates there: https://github.com/kubeflow/trainer/blob/master/docs/user-guides/trainjob-progress.md.
"""

import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPSConnection
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.fit.monitoring.step_timer import Attachment, MonitorCallback, StepTimer

_URL, _CA, _TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_INTERVAL = 5.0  # seconds between updates, as Kubeflow asks for
_LIMIT = 5.0  # seconds of an update
_LONGEST_WAIT = 2 * _LIMIT  # seconds that the end of fit waits for the last update
_MOST_METRICS, _LONGEST_TEXT, _LARGEST = 256, 64, 2**31 - 1  # limits of the TrainJob's schema


class KubeflowProgress(MonitorCallback):
    """Reports progress, the remaining time and the logs of the last epoch to the TrainJob in whose pods ``fit`` runs.

    ``kubectl get trainjob NAME -o jsonpath='{.status.trainerStatus}'`` shows them. The chief sends an update at the beginning, every five
    seconds, and at the end of ``fit``, in a thread: training does not wait for it. Updates that fail are reported in one line. Outside of a
    TrainJob that takes updates, the chief says so in a line, and nothing is sent.

    Example:
        >>> import lockstep
        >>> progress = lockstep.callbacks.KubeflowProgress()  # model.fit(x, y, callbacks=[progress])
    """

    def __init__(self) -> None:
        super().__init__()
        self._updates: _Updates | None = None

    def attach(self, attachment: Attachment, arguments: dict[str, Any]) -> None:
        """See the base class."""
        super().attach(attachment, arguments)
        if attachment.is_chief:
            server = _server_of(os.environ, attachment.log)
            self._updates = None if server is None else _Updates(server, attachment.timer, attachment.log)

    def detach(self) -> None:
        """See the base class."""
        updates, self._updates = self._updates, None
        if updates is not None:
            updates.stop()
        super().detach()

    def on_train_begin(self, logs: Any = None) -> None:
        """See Keras."""
        super().on_train_begin(logs)
        if self._updates is not None:
            self._updates.start()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See Keras."""
        if self._updates is not None:
            self._updates.metrics = dict(logs or {})

    def on_train_end(self, logs: Any = None) -> None:
        """See Keras."""
        if self._updates is not None:
            self._updates.is_done = True


@dataclass(frozen=True)
class _StatusServer:
    """The server of Kubeflow Trainer for one TrainJob.

    Args:
        url: to post to.
        ca_file: certificate of its authority.
        token_file: has the token, which Kubernetes renews.
    """

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
                return (
                    None
                    if response.status == 200
                    else f"{response.status} {response.read(500).decode(errors='replace')}"
                )
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

    Args:
        server: to send it to.
        timer: of the call.
        log: takes a line for the user.

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
            self._thread.join(_LONGEST_WAIT)

    def _run(self) -> None:
        has_ended = False
        while not has_ended:
            self._send()
            has_ended = self._has_ended.wait(_INTERVAL)
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
    pairs = ((name[:_LONGEST_TEXT], f"{value:.6g}") for name, value in numbers)
    return [{"name": name, "value": value} for name, value in pairs][:_MOST_METRICS]


def estimate_of(timer: StepTimer) -> dict[str, int]:
    """Return the share of the steps that is done, in percent, and the seconds that the others will take; each only if it is known."""
    progress, recent = timer.progress, timer.recent
    if not progress.steps:
        return {"progressPercentage": 100 * progress.epoch // progress.epochs}
    steps = progress.epochs * progress.steps
    done = min(steps, progress.epoch * progress.steps + progress.done)
    found = {"progressPercentage": 100 * done // steps}
    if recent.steps:
        found["estimatedRemainingSeconds"] = min(_LARGEST, round((steps - done) * recent.seconds / recent.steps))
    return found
