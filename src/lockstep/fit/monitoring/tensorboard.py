"""The TensorBoard callback: curves, histograms and profiles, written without TensorFlow."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from lockstep._errors import OptionError, whole_number
from lockstep.distributed.control.failures import summary_of
from lockstep.execution.train_functions import StepHook
from lockstep.fit.monitoring.step_timer import Attachment, MonitorCallback, StepTimer, TimerReading
from lockstep.fit.monitoring.tfevents import EventFile, Value, graph, histogram, newest_steps, scalar
from lockstep.fit.monitoring.throughput import NAMES, numbers_of

__all__ = ["StepProfiler", "TensorBoard"]

_FOLDERS = ("train", "validation")


class TensorBoard(MonitorCallback):
    """Writes curves, histograms and profiles for TensorBoard. Needs neither TensorFlow nor TensorBoard.

    Counterpart of ``keras.callbacks.TensorBoard``, with its arguments, folders (``train``, ``validation``) and tags: ``epoch_loss``, ``epoch_accuracy``,
    ``epoch_learning_rate``, … by epoch, ``batch_loss``, … and ``evaluation_loss_vs_iterations`` by step. In addition it writes ``throughput/samples_per_sec``,
    ``throughput/device/samples_per_sec``, ``time/step`` and ``time/data_wait`` by step (see :class:`ThroughputMonitor`). Files can be read
    during the run, and after a kill. Of several workers only the chief writes. A run that :class:`BackupAndRestore`
    resumes continues to count its steps, and no step is written twice.

    Args:
        log_dir: parent of the folders; one for each run.
        histogram_freq: number of epochs from one histogram of all weights to the next; 0: none.
        write_graph: write the layers of a Sequential or functional model.
        write_steps_per_second: write ``epoch_steps_per_second`` and ``batch_steps_per_second``, too.
        update_freq: ``"epoch"``; ``"batch"`` or a number of steps: also write the logs of each step, or of each n-th step.
        profile_batch: a step or a pair ``(first, last)`` to profile, counted from 1 in this call of ``fit``; 0: none.

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
        self.profile_batch = _profiled_steps(profile_batch)
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
        """See Keras."""
        if self._run:
            self._run.open(self.model)

    def on_test_end(self, logs: Any = None) -> None:
        """See Keras."""
        if self._run:
            values = {f"evaluation_{name}_vs_iterations": value for name, value in (logs or {}).items()}
            self._run.write("validation", self._run.step, _scalars(values))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See Keras."""
        if self._run:
            self._run.end_epoch(epoch, logs or {}, self.model)


class _FitRecorder(StepHook):
    """Writes the event files of one call of ``fit``.

    Args:
        options: the callback, with its options.
        attachment: to the call.
    """

    def __init__(self, options: TensorBoard, attachment: Attachment) -> None:
        self._options, self._attachment = options, attachment
        self._files: dict[str, EventFile] = {}
        self._known: dict[str, dict[str, int]] = {}
        self._is_open = self._has_failed = False
        self._pending: tuple[int, Any, dict[str, float]] | None = None  # a step whose logs may not be computed yet
        self._profiler: StepProfiler | None = None
        if options.update_freq:
            attachment.add_step_hook(self)
        if options.profile_batch:
            self._profiler = StepProfiler(*options.profile_batch, options.log_dir / "train", attachment.log)
            attachment.add_step_hook(self._profiler)

    @property
    def step(self) -> int:
        """Number of training steps so far, over all calls of ``fit``."""
        return self._timer.progress.total

    @property
    def _timer(self) -> StepTimer:
        return self._attachment.timer

    def open(self, model: keras.Model) -> None:
        """Start when training begins; if a run is resumed, steps that it has written are not written again."""
        if self._is_open:
            return
        self._is_open = True
        if self._attachment.is_resumed():
            try:
                self._known = {name: newest_steps(self._options.log_dir / name) for name in _FOLDERS}
            except OSError as error:
                self._fail(error)
        if self._options.write_graph and type(model).__name__ in ("Functional", "Sequential"):
            self._write_graph(model)

    def on_step_end(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
        """Keep the logs of a training step, and write those of the step before, so that no step waits for the devices."""
        if kind != "train":
            return
        self._write_pending()
        if self.step % (self._options.update_freq or 1) == 0:
            speed = self._speed(self._timer.recent)
            self._pending = (self.step, logs, self._steps_per_second("batch_", speed) | speed)

    def end_epoch(self, epoch: int, logs: Mapping[str, Any], model: keras.Model) -> None:
        """Write the logs of an epoch."""
        self._write_pending()
        speed = self._speed(self._timer.of_epoch)
        named = {name: value for name, value in logs.items() if name not in NAMES}
        validation = {name.removeprefix("val_"): value for name, value in named.items() if name.startswith("val_")}
        train = {name: value for name, value in named.items() if not name.startswith("val_")}
        train |= _learning_rates(model.optimizer) | self._steps_per_second("", speed)
        is_due = self._options.histogram_freq and epoch % self._options.histogram_freq == 0
        self.write("train", epoch, _scalars(_prefixed("epoch_", train)) + (_histograms(model) if is_due else []))
        self.write("validation", epoch, _scalars(_prefixed("epoch_", validation)))
        if not self._options.update_freq:  # Else the steps have them.
            mfu = {"mfu": logs["mfu"]} if "mfu" in logs else {}
            self.write("train", self.step, _scalars(speed | mfu))

    def write(self, folder: str, step: int, values: list[Value]) -> None:
        """Write values; a failure is logged once, and training continues."""
        if self._has_failed or not values:
            return
        try:
            if folder not in self._files:
                self._files[folder] = EventFile(self._options.log_dir / folder, self._known.get(folder))
            self._files[folder].write(step, values)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._has_failed = True
        self._attachment.log(f"TensorBoard: nothing more is written to {self._options.log_dir}: {error}")

    def close(self) -> None:
        """End the profile and close the files."""
        if self._profiler:
            self._profiler.stop()
        for file in self._files.values():
            file.close()

    def _write_pending(self) -> None:
        if self._pending:
            step, logs, speed = self._pending
            self._pending = None
            self.write("train", step, _scalars(_prefixed("batch_", dict(_flat(logs))) | speed))

    def _speed(self, reading: TimerReading) -> dict[str, float]:
        return numbers_of(reading, len(self._attachment.devices))

    def _steps_per_second(self, prefix: str, speed: dict[str, float]) -> dict[str, float]:
        return {f"{prefix}steps_per_second": 1 / speed["time/step"]} if self._options.write_steps_per_second else {}

    def _write_graph(self, model: keras.Model) -> None:
        try:
            self.write("train", 0, [graph("keras", model.to_json())])
        except Exception as error:  # A layer of the user's may raise any exception.
            why = " ".join(summary_of(error).partition("\n\n")[0].split())
            self._attachment.log(f"TensorBoard: the layers of {model.name!r} cannot be described: {why}")


class StepProfiler(StepHook):
    """Profiles some training steps with JAX, into the folder in which TensorBoard looks for profiles.

    Args:
        first: number of the first step, counted from 1 in a call of ``fit``.
        last: number of the last step.
        folder: of the run.
        log: takes a line for the user.
    """

    def __init__(self, first: int, last: int, folder: Path, log: Callable[[str], None]) -> None:
        self._first, self._last, self._folder, self._log = first, last, folder, log
        self._step, self._is_running = 0, False
        self._newest: Any = None

    def on_step_start(self, model: keras.Model, kind: str, batch: Any) -> None:
        """See :class:`StepHook`."""
        if kind != "train":
            return
        self._step += 1
        if self._step == self._first:
            jax.block_until_ready(self._newest)  # Steps that were started before are not part of the profile.
            self._start()

    def on_step_end(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
        """See :class:`StepHook`."""
        if kind != "train":
            return
        self._newest = logs
        if self._step == self._last:
            self.stop()

    def stop(self) -> None:
        """Write the profile, if it is still being recorded."""
        if not self._is_running:
            return
        self._is_running = False
        with contextlib.suppress(
            RuntimeError
        ):  # If the step has failed on its devices, the code that uses its results raises that.
            jax.block_until_ready(self._newest)
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            self._log(f"TensorBoard: no profile was written: {error}")
            return
        profiles = self._folder / "plugins" / "profile"
        self._log(
            f"TensorBoard: profile of steps {self._first} to {min(self._step, self._last)}: {profiles}; tensorboard shows it with the "
            "package tensorboard-plugin-profile"
        )

    def _start(self) -> None:
        try:
            jax.profiler.start_trace(self._folder)
            self._is_running = True
        except (OSError, RuntimeError) as error:  # For example, another profile is running.
            self._log(f"TensorBoard: no profile of steps {self._first} to {self._last}: {error}")


def _flat(logs: Any) -> Iterable[tuple[str, Any]]:
    """Yield the logs of a step by name; a metric may have several results."""
    for name, value in (logs or {}).items() if isinstance(logs, dict) else ():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield name, value


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in values.items()}


def _scalars(values: Mapping[str, Any]) -> list[Value]:
    """Return the values that are single numbers, except speeds that were not measured."""
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
    """Return the number of steps from one write to the next; 0: none."""
    if isinstance(value, str):
        if value not in ("epoch", "batch"):
            raise OptionError(
                f'TensorBoard: update_freq: expected "epoch", "batch" or a number of steps, got {value!r}.'
            )
        return int(value == "batch")
    return whole_number("TensorBoard: update_freq", value)


def _profiled_steps(value: int | tuple[int, int]) -> tuple[int, int] | None:
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if pair == (0, 0):
        return None
    if len(pair) != 2 or not all(isinstance(one, int) for one in pair) or not 0 < pair[0] <= pair[1]:
        raise OptionError(f"TensorBoard: profile_batch: expected a step or a pair of them, from 1, got {value!r}.")
    return (pair[0], pair[1])
