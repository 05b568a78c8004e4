"""What TensorBoard shows of a run, written without TensorFlow."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from lockstep._errors import OptionError, whole_number
from lockstep.distributed.control.failures import summary_of
from lockstep.execution.train_functions import StepListener
from lockstep.fit.monitoring.base_callback import Attachment, MonitorCallback
from lockstep.fit.monitoring.profiler import StepProfiler
from lockstep.fit.monitoring.step_timer import StepTimer, TimerReading
from lockstep.fit.monitoring.tfevents import EventFile, Value, graph, histogram, newest_steps, scalar
from lockstep.fit.monitoring.throughput import NAMES, numbers_of

__all__ = ["TensorBoard"]

_FOLDERS = ("train", "validation")


class TensorBoard(MonitorCallback):
    """Writes curves, histograms and profiles for TensorBoard. Needs neither TensorFlow nor TensorBoard.

    Counterpart of ``keras.callbacks.TensorBoard``, with its arguments, folders (``train``, ``validation``) and tags: ``epoch_loss``, ``epoch_accuracy``,
    ``epoch_learning_rate``, … by epoch, ``batch_loss``, … and ``evaluation_loss_vs_iterations`` by step. Besides there are ``throughput/samples_per_sec``,
    ``throughput/device/samples_per_sec``, ``time/step`` and ``time/data_wait`` by step (:class:`ThroughputMonitor` says what they are). Files can be read
    while the run goes on, and after a kill. Of several workers the chief alone writes. A run that goes on after a
    :class:`BackupAndRestore` counts its steps on, and no step is there twice.

    Args:
        log_dir: where the folders are; one for each run.
        histogram_freq: number of epochs from one histogram of all weights to the next; 0: none.
        write_graph: describe the layers of a Sequential or functional model.
        write_steps_per_second: write ``epoch_steps_per_second`` and ``batch_steps_per_second``, too.
        update_freq: ``"epoch"``; ``"batch"`` or a number of steps: also write the logs of each step, or of one in so many.
        profile_batch: a step or a pair ``(first, last)`` of which a profile is made, counted from 1 in this call of ``fit``; 0: none.

    Raises:
        OptionError: an argument is out of its range.

    Example:
        >>> import keras, lockstep, numpy as np, tempfile
        >>> from pathlib import Path
        >>> with lockstep.MirroredStrategy(replicas=2).scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     board = lockstep.callbacks.TensorBoard(folder)
        ...     history = model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0, callbacks=[board])
        ...     [file.name.split(".")[2] for file in Path(folder, "train").iterdir()]
        ['tfevents']
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        write_steps_per_second: bool = False,
        update_freq: str | int = "epoch",
        profile_batch: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.log_dir = Path(log_dir)
        self.histogram_freq = whole_number("TensorBoard: histogram_freq", histogram_freq, least=0)
        self.write_graph, self.write_steps_per_second = bool(write_graph), bool(write_steps_per_second)
        self.update_freq = _frequency(update_freq)
        self.profile_batch = _profiled(profile_batch)
        self._run: _FitRecorder | None = None

    def attach(self, attachment: Attachment, arguments: dict[str, Any]) -> None:
        """See the base class."""
        super().attach(attachment, arguments)
        if attachment.is_chief:
            self._run = _FitRecorder(self, attachment)

    def detach(self) -> None:
        """See the base class."""
        run, self._run = self._run, None
        if run:
            run.close()
        super().detach()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras says that an epoch begins."""
        if self._run:
            self._run.open(self.model)

    def on_test_end(self, logs: Any = None) -> None:
        """Keras says that a validation has ended."""
        if self._run:
            values = {f"evaluation_{name}_vs_iterations": value for name, value in (logs or {}).items()}
            self._run.write("validation", self._run.step, _scalars(values))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras says that an epoch has ended."""
        if self._run:
            self._run.end_epoch(epoch, logs or {}, self.model)


class _FitRecorder(StepListener):
    """What is written in one call of ``fit``.

    Args:
        asked: what was asked for.
        attachment: of the call.
    """

    def __init__(self, asked: TensorBoard, attachment: Attachment) -> None:
        self._asked, self._attachment = asked, attachment
        self._files: dict[str, EventFile] = {}
        self._known: dict[str, dict[str, int]] = {}
        self._is_open = self._has_failed = False
        self._waiting: tuple[int, Any, dict[str, float]] | None = None  # a step whose logs may not be there yet
        self._profile: StepProfiler | None = None
        followers = attachment.clock.followers
        if asked.update_freq:
            followers.append(self)
        if asked.profile_batch:
            self._profile = StepProfiler(*asked.profile_batch, asked.log_dir / "train", attachment.announce)
            followers.append(self._profile)

    @property
    def step(self) -> int:
        """Number of training steps so far, over all calls of ``fit``."""
        return self._clock.course.total

    @property
    def _clock(self) -> StepTimer:
        return self._attachment.clock

    def open(self, model: keras.Model) -> None:
        """Training begins, or goes on: then what was written before is not written again."""
        if self._is_open:
            return
        self._is_open = True
        if self._attachment.resumed():
            try:
                self._known = {name: newest_steps(self._asked.log_dir / name) for name in _FOLDERS}
            except OSError as error:
                self._fail(error)
        if self._asked.write_graph and type(model).__name__ in ("Functional", "Sequential"):
            self._describe(model)

    def on_step_end(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
        """A step was started; what is due is written while the next one runs, so that nothing waits for it."""
        self._write_waiting()
        if self.step % (self._asked.update_freq or 1) == 0:
            speed = self._speed(self._clock.recent)
            self._waiting = (self.step, logs, self._steps_per_second("batch_", speed) | speed)

    def end_epoch(self, epoch: int, logs: Mapping[str, Any], model: keras.Model) -> None:
        """Write what there is of an epoch."""
        self._write_waiting()
        speed = self._speed(self._clock.of_epoch)
        named = {name: value for name, value in logs.items() if name not in NAMES}
        validation = {name.removeprefix("val_"): value for name, value in named.items() if name.startswith("val_")}
        train = {name: value for name, value in named.items() if not name.startswith("val_")}
        train |= _learning_rates(model.optimizer) | self._steps_per_second("", speed)
        is_due = self._asked.histogram_freq and epoch % self._asked.histogram_freq == 0
        self.write("train", epoch, _scalars(_prefixed("epoch_", train)) + (_histograms(model) if is_due else []))
        self.write("validation", epoch, _scalars(_prefixed("epoch_", validation)))
        if not self._asked.update_freq:  # Else they are there, of the steps.
            mfu = {"mfu": logs["mfu"]} if "mfu" in logs else {}
            self.write("train", self.step, _scalars(speed | mfu))

    def write(self, folder: str, step: int, values: list[Value]) -> None:
        """Write values; where that fails, say so once, and training goes on."""
        if self._has_failed or not values:
            return
        try:
            if folder not in self._files:
                self._files[folder] = EventFile(self._asked.log_dir / folder, self._known.get(folder))
            self._files[folder].write(step, values)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._has_failed = True
        self._attachment.announce(f"TensorBoard: nothing more is written to {self._asked.log_dir}: {error}")

    def close(self) -> None:
        """Training has ended, in whatever way."""
        if self._profile:
            self._profile.stop()
        for file in self._files.values():
            file.close()

    def _write_waiting(self) -> None:
        if self._waiting:
            step, logs, speed = self._waiting
            self._waiting = None
            self.write("train", step, _scalars(_prefixed("batch_", dict(_flat(logs))) | speed))

    def _speed(self, reading: TimerReading) -> dict[str, float]:
        return numbers_of(reading, len(self._attachment.devices))

    def _steps_per_second(self, prefix: str, speed: dict[str, float]) -> dict[str, float]:
        return {f"{prefix}steps_per_second": 1 / speed["time/step"]} if self._asked.write_steps_per_second else {}

    def _describe(self, model: keras.Model) -> None:
        try:
            self.write("train", 0, [graph("keras", model.to_json())])
        except Exception as error:  # Of a layer of somebody's own, whatever that raises.
            why = " ".join(summary_of(error).partition("\n\n")[0].split())
            self._attachment.announce(f"TensorBoard: the layers of {model.name!r} cannot be described: {why}")


def _flat(logs: Any) -> Iterable[tuple[str, Any]]:
    """Logs of a step by name; a metric may have several."""
    for name, value in (logs or {}).items() if isinstance(logs, dict) else ():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield name, value


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in values.items()}


def _scalars(values: Mapping[str, Any]) -> list[Value]:
    """What is one number; a speed that was not measured is left out."""
    numbers = {name: np.asarray(value) for name, value in jax.device_get(dict(values)).items()}
    wanted = {name: number for name, number in numbers.items() if number.size == 1 and number.dtype.kind not in "OSU"}
    left_out = [name for name, number in wanted.items() if np.isnan(number) and _is_speed(name)]
    return [scalar(name, float(number)) for name, number in wanted.items() if name not in left_out]


def _is_speed(name: str) -> bool:
    return name in NAMES or name.endswith("steps_per_second")


def _histograms(model: keras.Model) -> list[Value]:
    weights = [weight for layer in model.layers for weight in layer.weights]
    arrays = [np.asarray(keras.ops.convert_to_numpy(weight)) for weight in weights]
    return [
        histogram(f"{weight.path.replace(':', '_')}/histogram", array.astype(np.float64))
        for weight, array in zip(weights, arrays, strict=True)
        if array.dtype.kind not in "OSU"
    ]


def _learning_rates(optimizer: Any) -> dict[str, float]:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    several = optimizer.optimizers if isinstance(optimizer, keras.optimizers.MultiOptimizer) else []
    rates = {f"learning_rate_{one.name}": one.learning_rate for one in several} or {
        "learning_rate": optimizer.learning_rate
    }
    return {name: float(np.asarray(keras.ops.convert_to_numpy(rate))) for name, rate in rates.items()}


def _frequency(value: str | int) -> int:
    """Number of steps; 0: none."""
    if isinstance(value, str):
        if value not in ("epoch", "batch"):
            raise OptionError(
                f'TensorBoard: update_freq: expected "epoch", "batch" or a number of steps, got {value!r}.'
            )
        return int(value == "batch")
    return whole_number("TensorBoard: update_freq", value)


def _profiled(value: int | tuple[int, int]) -> tuple[int, int] | None:
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if pair == (0, 0):
        return None
    if len(pair) != 2 or not all(isinstance(one, int) for one in pair) or not 0 < pair[0] <= pair[1]:
        raise OptionError(f"TensorBoard: profile_batch: expected a step or a pair of them, from 1, got {value!r}.")
    return (pair[0], pair[1])
