"""Throughput, step time and model FLOPs utilization in the logs of each epoch."""

from collections.abc import Mapping
from typing import Any

from lockstep._errors import OptionError, whole_number
from lockstep.fit.monitoring.flops import peak_of
from lockstep.fit.monitoring.step_timer import Attachment, MonitorCallback, TimerReading

__all__ = ["NAMES", "ThroughputMonitor", "numbers_of"]

NAMES = (
    "throughput/samples_per_sec",
    "throughput/device/samples_per_sec",
    "time/step",
    "time/data_wait",
    "mfu",
)


def numbers_of(reading: TimerReading, devices: int) -> dict[str, float]:
    """Return a reading by the names of the logs; NaN if no step was measured.

    Example:
        >>> numbers_of(TimerReading(steps=10, rows=640, seconds=2.0, waited=0.5), devices=2)["time/step"]
        0.2
    """
    steps, rows, seconds, waited = reading
    if not steps or seconds <= 0:
        return dict.fromkeys(NAMES[:4], float("nan"))
    values = (rows / seconds, rows / seconds / devices, seconds / steps, waited / steps)
    return dict(zip(NAMES[:4], values, strict=True))


class ThroughputMonitor(MonitorCallback):
    """Adds throughput, step time and the wait for data to the logs of each epoch.

    The logs, and with them the history and callbacks that write the logs (``keras.callbacks.CSVLogger``), get

    - ``throughput/samples_per_sec``: rows of the global batch a second; ``throughput/device/samples_per_sec``: for each device;
    - ``time/step``: seconds from step to step; ``time/data_wait``: seconds of that in which no step could run for lack of data;
    - ``mfu``: model FLOPs utilization, the operations of the step as a share of the peak of the devices, if both are known.

    All steps of the epoch count, except those that were compiled; validation does not. The values are NaN in an epoch without such steps. Each
    worker measures its own steps. No step waits for the devices, and the order of the callbacks does not matter.

    Args:
        window: number of steps that :attr:`last` looks back.
        peak_flops: floating-point operations a second that *one* device can do at most; by default those of the data sheet at 16 bits, for
            known accelerators.

    Raises:
        OptionError: an argument is out of its range.

    Example:
        >>> import keras, lockstep, numpy as np
        >>> with lockstep.MirroredStrategy(replicas=2).scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> speed = lockstep.callbacks.ThroughputMonitor(peak_flops=1e12)
        >>> history = model.fit(np.ones((40, 3)), np.ones((40, 1)), batch_size=8, verbose=0, callbacks=[speed])
        >>> sorted(history.history)  # doctest: +NORMALIZE_WHITESPACE
        ['loss', 'mfu', 'throughput/device/samples_per_sec', 'throughput/samples_per_sec', 'time/data_wait', 'time/step']
        >>> 0 < speed.last["time/step"] < 60
        True
    """

    def __init__(self, window: int = 100, peak_flops: float | None = None) -> None:
        super().__init__()
        self.window = whole_number("ThroughputMonitor: window", window)
        if peak_flops is not None and not 0 < peak_flops < float("inf"):
            raise OptionError(
                f"ThroughputMonitor: peak_flops: expected operations a second of one device, such as 312e12, got {peak_flops!r}."
            )
        self.peak_flops = peak_flops
        self._last: dict[str, float] = {}

    @property
    def last(self) -> Mapping[str, float]:
        """The numbers of the last ``window`` steps by the names of the logs; may be read at any time, also after ``fit``."""
        if self._attachment is not None:
            self._last = self._numbers(self._attachment.timer.recent)
        return dict(self._last)

    def attach(self, attachment: Attachment, arguments: dict[str, Any]) -> None:
        """See the base class."""
        super().attach(attachment, arguments)
        attachment.flop_counter.is_wanted |= self._peak(attachment) is not None

    def detach(self) -> None:
        """See the base class."""
        self._last = dict(self.last)
        super().detach()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the numbers to the logs."""
        if logs is not None:
            logs.update(self._numbers(self.attachment.timer.of_epoch))

    def _peak(self, attachment: Attachment) -> float | None:
        return self.peak_flops or peak_of(attachment.devices[0].device_kind)

    def _numbers(self, reading: TimerReading) -> dict[str, float]:
        attachment = self.attachment
        numbers = numbers_of(reading, len(attachment.devices))
        peak, per_row = self._peak(attachment), attachment.flop_counter.per_row
        if peak and per_row:
            numbers["mfu"] = per_row * numbers["throughput/device/samples_per_sec"] / peak
        return numbers
