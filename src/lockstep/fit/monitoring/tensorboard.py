"""TensorBoard callback, and the event files that it writes.

Formats: https://github.com/tensorflow/tensorboard/tree/master/tensorboard/compat/proto (``event.proto``, ``summary.proto``, ``tensor.proto``),
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details and, for the polynomial, RFC 3720. Values are written as
``tf.summary`` of TensorFlow 2 does: as tensors, with the name of the plugin that shows them.
"""

import contextlib
import io
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from lockstep._atomic_files import open_own, open_to_read
from lockstep._errors import OptionError, file_path, flag, shown, summary_of, whole_number
from lockstep._keras import trainer
from lockstep.execution.step_hooks import StepHook
from lockstep.fit.monitoring.step_timer import NAMES, Attachment, MonitorCallback

BUCKETS = 30  # of a histogram, as in TensorFlow
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_FLOAT, _DOUBLE, _STRING = 1, 2, 7  # types of tensors
_SCALARS, _TENSORS, _BLOBS = 1, 2, 3  # classes of data
_MASK = 0xA282EAD8

Value = tuple[str, bytes]  # a tag, and a Summary.Value in bytes
# No two files of a process have the same name, and their names have their order, in which TensorBoard reads them.
_numbers = count()


def _table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ (0x82F63B78 if value & 1 else 0) for value in table]
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) checksum.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _TABLE[(value ^ byte) & 255]
    return value ^ 0xFFFFFFFF


def scalar(tag: str, number: float) -> Value:
    """Encode a number."""
    return _value(tag, "scalars", _SCALARS, _tensor(_FLOAT, np.asarray(number, "<f4")))


def histogram(tag: str, numbers: np.ndarray) -> Value:
    """Encode a histogram of the finite numbers, in buckets of one width: rows of left edge, right edge and count."""
    numbers = np.asarray(numbers, np.float64).ravel()
    numbers = numbers[np.isfinite(numbers)]
    counts, edges = np.zeros(0), np.zeros(1)
    if numbers.size:
        first, last = numbers.min(), numbers.max()
        # NumPy cannot make more buckets than there are numbers of floating point; around equal ones they make up a width of 1.
        if (last - first or 1) < BUCKETS * np.spacing(max(abs(first), abs(last))):
            counts, edges = np.asarray([numbers.size]), np.asarray([first, last])
        else:
            counts, edges = np.histogram(numbers, BUCKETS)
    rows = np.stack([edges[:-1], edges[1:], counts], axis=1).astype("<f8")
    return _value(tag, "histograms", _TENSORS, _tensor(_DOUBLE, rows))


def graph(description: str) -> Value:
    """Encode a Keras model, given its JSON."""
    tensor = _number(1, _STRING) + _bytes(2, b"") + _bytes(8, description.encode())
    return _value("keras", "graph_keras_model", _BLOBS, tensor, content=b"1")


class EventFile:
    """A file of events. A write has reached the operating system when it returns, so that other processes can read it, also after a kill.

    Args:
        folder: folder of the file; it is made if necessary.
        known: by tag the last step that is written already, up to which nothing is written again.
        clock: gives the seconds since 1970.

    Raises:
        OSError: the file cannot be made.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = EventFile(folder)
        ...     file.write(7, [scalar("epoch_loss", 0.5)])
        ...     file.close()
        ...     newest_steps(folder)
        {'epoch_loss': 7}
    """

    def __init__(
        self, folder: str | Path, known: Mapping[str, int] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._known, self._clock = known or {}, clock
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(clock())}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):09}.v2"
        self._file = io.FileIO(open_own(Path(folder) / name, os.O_WRONLY | os.O_APPEND), "a")
        self._write(_bytes(3, b"brain.Event:2"))

    def write(self, step: int, values: Sequence[Value]) -> None:
        """Write values of one step.

        Raises:
            OSError: the write has failed; earlier writes can be read.
        """
        new = [packed for tag, packed in values if step > self._known.get(tag, -1)]
        if new:
            self._write(_number(2, step) + _bytes(5, b"".join(_bytes(1, packed) for packed in new)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: bytes) -> None:
        data = _key(1, _FIXED64) + struct.pack("<d", self._clock()) + event
        length = struct.pack("<Q", len(data))
        record = memoryview(length + _masked(length) + data + _masked(data))
        while record:  # If the disk is nearly full, the system takes a part, and the next write raises the error.
            record = record[self._file.write(record) :]


def newest_steps(folder: str | Path) -> dict[str, int]:
    """Return the largest step of each tag in a folder's files; a file ends at a record that a kill has cut off, or that is damaged.

    Raises:
        OSError: a file cannot be read.
    """
    found: dict[str, int] = {}
    for path in sorted(Path(folder).glob("events.out.tfevents.*")):
        with open_to_read(path) as file, contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):
            for event in _records(file.read()):
                fields = dict(_fields(event))
                step = int(fields.get(2, 0))
                for number, packed in _fields(fields.get(5, b"")):
                    tag = dict(_fields(packed)).get(1, b"").decode() if number == 1 else ""
                    found[tag] = max(found.get(tag, 0), step)
    return found


# Protocol buffers.


def _value(tag: str, plugin: str, kind: int, tensor: bytes, content: bytes = b"") -> Value:
    metadata = _bytes(1, _bytes(1, plugin.encode()) + _bytes(2, content)) + _number(4, kind)
    return tag, _bytes(1, tag.encode()) + _bytes(9, metadata) + _bytes(8, tensor)


def _tensor(kind: int, array: np.ndarray) -> bytes:
    shape = b"".join(_bytes(2, _number(1, length)) for length in array.shape)
    return _number(1, kind) + _bytes(2, shape) + _bytes(4, array.tobytes())


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _number(field: int, value: int) -> bytes:
    return _key(field, _VARINT) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def _records(data: bytes) -> Iterator[bytes]:
    position = 0
    while position + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        position += 12 + length + 4
        if position <= len(data):
            yield data[position - 4 - length : position - 4]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        field, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, position = _read_varint(message, position)
            yield field, value
            continue
        length, position = (
            _read_varint(message, position) if wire == _BYTES else ({_FIXED64: 8, _FIXED32: 4}[wire], position)
        )
        yield field, message[position : position + length]
        position += length


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        value, position, shift = value | (byte & 127) << shift, position + 1, shift + 7
        if byte < 128:
            return value, position


_FOLDERS = ("train", "validation")


class TensorBoard(MonitorCallback):
    """Writes curves, histograms and profiles for TensorBoard. Needs neither TensorFlow nor TensorBoard.

    Counterpart of ``keras.callbacks.TensorBoard``, with its arguments, folders (``train``, ``validation``) and tags: ``epoch_loss``, ``epoch_accuracy``,
    ``epoch_learning_rate``, … by epoch, ``batch_loss``, … and ``evaluation_loss_vs_iterations`` by step. In addition it writes ``throughput/samples_per_sec``,
    ``throughput/device/samples_per_sec``, ``time/step`` and ``time/data_wait`` (see :class:`ThroughputMonitor`) with the number of the
    step: once an epoch, or as often as ``update_freq`` says. Files can be read during the run, and after a kill. Of several workers only the
    chief writes. A run that :class:`BackupAndRestore` resumes continues to count its steps, and no step is written twice.

    Args:
        log_dir: parent of the folders; one for each run.
        histogram_freq: number of epochs from one histogram of all weights to the next; 0: none.
        write_graph: write the layers of a Sequential or functional model.
        write_steps_per_second: write ``epoch_steps_per_second`` and ``batch_steps_per_second``, too.
        update_freq: ``"epoch"``; ``"batch"`` or a number of steps: also write the logs of each step, or of each n-th step.
        profile_batch: a step or a pair ``(first, last)`` or ``"first,last"`` to profile, counted from 1 in this call of ``fit``; 0: none.

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

    _recorder: "_FitRecorder | None" = None

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        write_steps_per_second: bool = False,
        update_freq: str | int = "epoch",
        profile_batch: int | str | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.log_dir = file_path("TensorBoard: log_dir", log_dir)
        self.histogram_freq = whole_number("TensorBoard: histogram_freq", histogram_freq, minimum=0)
        self.write_graph = flag("TensorBoard: write_graph", write_graph)
        self.write_steps_per_second = flag("TensorBoard: write_steps_per_second", write_steps_per_second)
        self.update_freq = _frequency(update_freq)
        self.profile_batch = _profiled_steps(profile_batch)

    def attach(self, attachment: Attachment, arguments: dict[str, Any]) -> None:
        super().attach(attachment, arguments)
        if attachment.is_chief:
            self._recorder = _FitRecorder(self, attachment)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._recorder:
            self._recorder.open(self.model)

    def on_test_end(self, logs: Any = None) -> None:
        if self._recorder and not self.attachment.is_validation_cut():
            values = {f"evaluation_{name}_vs_iterations": value for name, value in (logs or {}).items()}
            self._recorder.write("validation", self._recorder.step, _scalars(values))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        is_due = self.histogram_freq and epoch % self.histogram_freq == 0
        weights = _weights_on_host(self.model) if is_due else ()
        if self._recorder:
            self._recorder.end_epoch(epoch, logs or {}, self.model, weights)
        else:
            for _ in weights:  # All workers read those that are sharded together; the chief writes.
                pass


class _FitRecorder(StepHook):
    """Writes the event files of one call of ``fit``."""

    def __init__(self, options: TensorBoard, attachment: Attachment) -> None:
        self._options, self._attachment, self._timer = options, attachment, attachment.timer
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
            speed = self._attachment.numbers_of(self._timer.recent)
            self._pending = (self.step, logs, self._steps_per_second("batch_", speed) | speed)

    def end_epoch(
        self, epoch: int, logs: Mapping[str, Any], model: keras.Model, weights: Iterable[tuple[str, np.ndarray]]
    ) -> None:
        """Write the logs of an epoch, and histograms of the weights, given by path."""
        self._write_pending()
        speed = self._attachment.numbers_of(self._timer.of_epoch)
        named = {name: value for name, value in logs.items() if name not in NAMES}
        validation = {name.removeprefix("val_"): value for name, value in named.items() if name.startswith("val_")}
        train = {name: value for name, value in named.items() if not name.startswith("val_")}
        train |= _learning_rates(model.optimizer) | self._steps_per_second("", speed)
        self.write("train", epoch, _scalars(_prefixed("epoch_", train)) + _histograms(weights))
        self.write("validation", epoch, _scalars(_prefixed("epoch_", validation)))
        if not self._options.update_freq:  # Else the steps have them.
            self.write("train", self.step, _scalars(speed))

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

    def stop(self) -> None:
        """End the profile, write the logs of the last step, after which the run may be preempted, and close the files."""
        if self._profiler:
            self._profiler.stop()
        with contextlib.suppress(RuntimeError):  # JAX's, if it is this step that has failed.
            self._write_pending()
        for file in self._files.values():
            file.close()

    def _write_pending(self) -> None:
        if self._pending:
            step, logs, speed = self._pending
            self._pending = None
            self.write("train", step, _scalars(_prefixed("batch_", dict(_flat(logs))) | speed))

    def _steps_per_second(self, prefix: str, speed: dict[str, float]) -> dict[str, float]:
        return {f"{prefix}steps_per_second": 1 / speed["time/step"]} if self._options.write_steps_per_second else {}

    def _write_graph(self, model: keras.Model) -> None:
        try:
            self.write("train", 0, [graph(model.to_json())])
        except Exception as error:  # A layer of the user's may raise any exception.
            why = " ".join(summary_of(error).partition("\n\n")[0].split())
            self._attachment.log(f"TensorBoard: the layers of {model.name!r} cannot be described: {why}")


class StepProfiler(StepHook):
    """Profiles the training steps from ``first`` to ``last``, counted from 1 in a call of ``fit``, with JAX, into the folder in that of the run
    in which TensorBoard looks for profiles.
    """

    def __init__(self, first: int, last: int, folder: Path, log: Callable[[str], None]) -> None:
        self._first, self._last, self._folder, self._log = first, last, folder, log
        self._step, self._is_running = 0, False
        self._newest: Any = None

    def on_step_start(self, model: keras.Model, kind: str, batch: Any) -> None:
        if kind != "train":
            return
        self._step += 1
        if self._step == self._first:
            jax.block_until_ready(self._newest)  # Steps that were started before are not part of the profile.
            self._start()

    def on_step_end(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
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
        # If the step has failed on its devices, the code that uses its results raises that.
        with contextlib.suppress(RuntimeError):
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
    return [
        scalar(name, float(number)) for name, number in wanted.items() if not (np.isnan(number) and _is_speed(name))
    ]


def _is_speed(name: str) -> bool:
    return name in NAMES or name.endswith("steps_per_second")


def _weights_on_host(model: keras.Model) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights with their paths, one after the other; if they are sharded over workers, all of them call it."""
    for weight in (weight for layer in model.layers for weight in layer.weights):
        yield weight.path, np.asarray(keras.ops.convert_to_numpy(weight))


def _histograms(weights: Iterable[tuple[str, np.ndarray]]) -> list[Value]:
    return [
        histogram(f"{path.replace(':', '_')}/histogram", array.astype(np.float64))
        for path, array in weights
        if array.dtype.kind not in "OSU"
    ]


def _learning_rates(optimizer: Any) -> dict[str, float]:
    optimizer = trainer.inner_optimizer(optimizer)
    several = trainer.nested_optimizers(optimizer)[1:]
    rates = {f"learning_rate_{one.name}": trainer.learning_rate_on_host(one) for one in several} or {
        "learning_rate": trainer.learning_rate_on_host(optimizer)
    }
    return {name: float(np.asarray(keras.ops.convert_to_numpy(rate))) for name, rate in rates.items()}


def _frequency(value: str | int) -> int:
    """Return the number of steps from one write to the next; 0: none."""
    if isinstance(value, str):
        if value not in ("epoch", "batch"):
            raise OptionError(
                f'TensorBoard: update_freq: expected "epoch", "batch" or a number of steps, got {shown(value)}. Fix: pass one of these.'
            )
        return int(value == "batch")
    return whole_number("TensorBoard: update_freq", value)


def _profiled_steps(value: int | str | tuple[int, int]) -> tuple[int, int] | None:
    """Return the first and the last step to profile; None: none. As to Keras, ``"500,520"`` is a pair, and ``"7"`` a step."""
    if isinstance(value, str):
        steps = [int(word) if word.strip().isdecimal() else word for word in value.split(",")]
        pair: Any = steps if len(steps) > 1 else steps * 2
    else:
        pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2:
        raise OptionError(
            f"TensorBoard: profile_batch: expected a step or a pair of them, got {shown(value)}. Fix: pass one or two numbers."
        )
    first, last = (whole_number("TensorBoard: profile_batch", one, minimum=0) for one in pair)
    if first == last == 0:
        return None
    if not 0 < first <= last:
        raise OptionError(
            f"TensorBoard: profile_batch: expected a step or a pair of them, from 1, got {shown(value)}. Fix: count from 1, the earlier step first."
        )
    return first, last
