"""Measure each setting in a fresh process: the time of a step, of its parts, and memory.

The parent starts and kills the process, which measures and writes JSON.
"""

import contextlib
import itertools
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep._errors import LockstepError, OptionError
from lockstep._keras import trainer
from lockstep._keras.graph import cause_of
from lockstep.collectives import ALGORITHMS, CrossDeviceOps
from lockstep.collectives.cost_model import FORMULAS, AllReduceMeasurement
from lockstep.data.input_bound import WaitMeter, collect_meters
from lockstep.devices.cpu_devices import reserve_devices
from lockstep.execution.step_loop import STATE
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.strategies.options import override_devices
from lockstep.tools.scaling.results import Budget, CurvePoint, ScalingSetting, SettingFailure, SettingResult, from_json
from lockstep.tools.scaling.workload import TrainingTask, Workload, run_workload, training_task
from lockstep.tools.script_runner import FirstFit, NoFitError, read_request, run_child

WARMUP_STEPS = 3  # not timed, as they compile
MAX_BLOCKS = 8  # also the points of a learning curve

# The timer wraps the function that runs a step, in the thread of Keras's loop. A callback would not do: Keras reads the logs of
# each step for its callbacks, and so waits for each step.
StepFunction = Callable[[Any, Any], tuple[Any, Any]]


def block_ends(steps: int | None) -> list[int]:
    """Return the numbers of steps after which a block of steps ends.

    Args:
        steps: number of steps of the whole training; None if it is unknown: each block is then longer than the last.
    """
    if steps is None:
        return [WARMUP_STEPS + 10 * 2**power for power in range(30)]
    timed = max(0, steps - WARMUP_STEPS)
    return sorted({WARMUP_STEPS + -(-timed * part // MAX_BLOCKS) for part in range(1, MAX_BLOCKS + 1)} - {WARMUP_STEPS})


class BlockTimer:
    """Timer for blocks of training steps, which waits for the devices at both ends of a block.

    Args:
        steps: number of steps of the whole training, or None.
        limit: seconds after which the training stops.
        evaluate: returns the metric; it runs between blocks and is not timed.
        input_seconds: returns the seconds spent on getting batches so far.
        before: the metric before the first step.
        steps_per_epoch: or None.
    """

    def __init__(
        self,
        steps: int | None,
        limit: float,
        evaluate: Callable[[], float] | None,
        input_seconds: Callable[[], float],
        before: float | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        self._ends, self._limit, self._evaluate, self._input_seconds = block_ends(steps), limit, evaluate, input_seconds
        self._created, self._steps_per_epoch = time.perf_counter(), steps_per_epoch
        self.steps, self.lengths = 0, list[int]()
        self.seconds, self.input_times = list[float](), list[float]()
        self.values = [] if before is None else [(0, before)]  # steps, metric
        self.is_stopped = False

    def begin(self) -> None:
        """Start a block."""
        self._first, self._input_before, self._started = self.steps, self._input_seconds(), time.perf_counter()

    def record(self, result: Any, count: int) -> bool:
        """Record that ``count`` steps, or those left of the epoch, were started and return ``result``; return whether a block has ended."""
        if self._steps_per_epoch:
            count = min(count, self._steps_per_epoch - self.steps % self._steps_per_epoch)
        before, self.steps = self.steps, self.steps + count
        self.is_stopped = time.perf_counter() - self._created > self._limit
        if before < WARMUP_STEPS <= self.steps:
            jax.block_until_ready(result)
            self.begin()
            return False
        if not (self._ends and self.steps >= self._ends[0]) and not (self.is_stopped and self.steps > WARMUP_STEPS):
            return False
        jax.block_until_ready(result)
        seconds, count = time.perf_counter() - self._started, self.steps - self._first
        self._ends = [end for end in self._ends if end > self.steps]
        self.seconds.append(seconds)
        self.lengths.append(count)
        self.input_times.append(self._input_seconds() - self._input_before)
        return True

    def evaluate(self) -> None:
        """Evaluate the metric between two blocks."""
        if self._evaluate:
            self.values.append((self.steps, self._evaluate()))

    def curve(self, batch: int) -> tuple[CurvePoint, ...]:
        """Return the metric by rows and by time; a warm-up step counts as long as a mean timed step."""
        mean = sum(self.seconds) / max(1, sum(self.lengths))
        times = dict[int, float]()
        steps, seconds = WARMUP_STEPS, WARMUP_STEPS * mean
        for length, block in zip(self.lengths, self.seconds, strict=True):
            steps, seconds = steps + length, seconds + block
            times[steps] = seconds
        return tuple(CurvePoint(at * batch, times.get(at, at * mean), value) for at, value in self.values)


def timed_function(model: keras.Model, function: StepFunction, timer: BlockTimer) -> StepFunction:
    """Wrap the training function of a model in a timer."""

    def timed(state: Any, iterator: Any) -> tuple[Any, Any]:
        logs, state = function(state, iterator)
        if timer.record((logs, state), model.steps_per_execution):
            trainer.write_back_values(model, STATE["train"], state)
            timer.evaluate()
            model.stop_training = model.stop_training or timer.is_stopped
            timer.begin()
        return logs, state

    return timed


SIZES = (4_000, 400_000, 4_000_000)  # bytes of the vectors whose all-reduce measures the link
_SAMPLES, _SECONDS = 5, 0.05  # a sample repeats a call for at least these seconds
_AXIS = "device"
_STATUS = Path("/proc/self/status")


def bare_step_seconds(model: keras.Model, function: Callable[[Any, Any], Any], batch: Any) -> float:
    """Return the median seconds of the compiled training step, repeated on one batch on the devices; the trained model does not change."""
    state = jax.tree.map(jnp.copy, trainer.training_state(model, batch))
    batches = itertools.repeat(batch)

    def run(count: int) -> None:
        nonlocal state
        for _ in range(count):
            _, state = function(state, batches)
        jax.block_until_ready(state)

    return _median(run) / model.steps_per_execution


def all_reduce_seconds(ops: CrossDeviceOps, devices: Sequence[jax.Device], arrays: Sequence[Any]) -> float:
    """Return the median seconds of an all-reduce of arrays of these shapes and dtypes, less those of a program without it."""
    if len(devices) < 2:
        return 0.0
    mesh, cut = Mesh(np.asarray(devices), (_AXIS,)), PartitionSpec(_AXIS)
    held = [jnp.zeros((len(devices), *array.shape), array.dtype, device=NamedSharding(mesh, cut)) for array in arrays]

    def reduce(shards: list[jax.Array]) -> list[jax.Array]:
        return [total[None] for total in ops.all_reduce([shard[0] for shard in shards], _AXIS, devices)]

    def baseline(shards: list[jax.Array]) -> list[jax.Array]:
        return [shard.reshape(-1)[:1] for shard in shards]  # An empty program would not run.

    times = []
    for function in (reduce, baseline):
        program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))
        times.append(_median(partial(_repeat, program, held)))
    return max(0.0, times[0] - times[1])


def _repeat(program: Callable[[Any], Any], held: Any, count: int) -> None:
    for _ in range(count):
        jax.block_until_ready(program(held))


def measure_links(ops: CrossDeviceOps, devices: Sequence[jax.Device]) -> tuple[AllReduceMeasurement, ...]:
    """Measure all-reduces of vectors of several sizes."""
    if len(devices) < 2:
        return ()
    found = []
    for size in SIZES:
        seconds = all_reduce_seconds(ops, devices, [jax.ShapeDtypeStruct((size // 4,), "float32")])
        found.append(AllReduceMeasurement(formula_of(ops), size, len(devices), seconds))
    return tuple(found)


def formula_of(ops: CrossDeviceOps) -> str:
    """Return the name of the formula that predicts an operation; a user's operation counts as that of the platform."""
    return next((name for name, kind in ALGORITHMS.items() if type(ops) is kind and name in FORMULAS), "auto")


def peak_memory(devices: Sequence[jax.Device]) -> int:
    """Return the peak bytes of an accelerator, else of this process (``ru_maxrss`` would include the parent's)."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]
    if max(peaks):
        return int(max(peaks))
    found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text()) if _STATUS.exists() else None
    return 1024 * int(found[1]) if found else 0


def _median(run: Callable[[int], None]) -> float:
    """Return the median seconds of a call; ``run(count)`` makes ``count`` calls."""
    run(2)
    begun = time.perf_counter()
    run(1)
    count = max(1, min(1000, int(_SECONDS / max(1e-6, time.perf_counter() - begun))))
    samples = []
    for _ in range(_SAMPLES):
        begun = time.perf_counter()
        run(count)
        samples.append((time.perf_counter() - begun) / count)
    return statistics.median(samples)


_SHARE_OF_LIMIT = 0.6  # of the time limit, for training; the rest is for starting, compiling and timing the parts
_HIGHER_IS_BETTER = re.compile(  # mean_io_u is Keras's name
    r"(^|_)(acc|accuracy|auc|precision|recall|f1|fbeta|iou|io_u|similarity|r2|r_squared|score|sensitivity|specificity|correlation"
    r"|dice|jaccard|kappa|psnr|ssim|bleu|rouge|ndcg|mrr|hit_rate|true_positives|true_negatives)(_|$)"
)
_LOWER_IS_BETTER = re.compile(r"(^|_)(distance|error|loss)(_\d+)?$")
_NEW_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")  # as in BinaryAccuracy


def measure(first: FirstFit, setting: ScalingSetting, budget: Budget) -> SettingResult:
    """Train the model of a script in a setting, and measure; the script's own strategy uses the devices of that setting.

    Raises:
        LockstepError: the setting is impossible.
    """
    strategy = _strategy_of(first.model, setting)
    task = training_task(first, setting.batch, budget)
    with collect_meters() as meters:
        timer, metric = _train(first, task, budget, meters)
    devices = strategy._placement.devices if strategy else jax.local_devices()[:1]
    memory = peak_memory(devices)
    arrays = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in first.model.trainable_variables]
    ops = strategy.cross_device_ops if strategy else None
    steps = max(1, sum(timer.lengths))
    return SettingResult(
        setting=replace(setting, batch=task.batch),
        has_own_batches=task.has_own_batches,
        rows_per_epoch=task.batch * (task.steps_per_epoch or timer.steps // budget.epochs),
        blocks=tuple(seconds / count for seconds, count in zip(timer.seconds, timer.lengths, strict=True)),
        bare=_bare_step(first.model, task, strategy),
        taking=sum(timer.input_times) / steps if strategy else None,
        all_reduce=all_reduce_seconds(ops, devices, arrays) if ops else 0.0,
        gradient_bytes=sum(array.size * array.dtype.itemsize for array in arrays),
        algorithm=formula_of(ops) if ops else "auto",
        links=measure_links(ops, devices) if ops else (),
        memory=memory,
        metric=metric,
        is_higher_better=is_higher_better(metric or "loss", getattr(first.model, "output_names", None) or ()),
        curve=timer.curve(task.batch),
        platform=devices[0].platform,
        notes=(*task.notes, *_notes_of(timer, budget)),
    )


def is_higher_better(metric: str, outputs: Sequence[str] = ()) -> bool:
    """Return whether larger values of a metric are better, by its name as in Keras's callbacks; ``outputs`` are those of the model."""
    names = [metric.removeprefix(f"{output}_") for output in outputs if metric.startswith(f"{output}_")]
    name = _NEW_WORD.sub("_", (names or [metric])[0]).lower()
    return not _LOWER_IS_BETTER.search(name) and _HIGHER_IS_BETTER.search(name) is not None


def _strategy_of(model: keras.Model, setting: ScalingSetting) -> Strategy | None:
    """Return the strategy of the model, or a new one; None for plain Keras."""
    if not setting.devices:
        return None
    owner = trainer.strategy_of(model)
    if owner is None:
        owner = MirroredStrategy()
        owner._claim(model)
    return owner


def _input_seconds(meters: Sequence[WaitMeter]) -> Callable[[], float]:
    """Return a function that gives the seconds spent on getting batches; it reads the next meter that is created."""
    before = len(meters)
    return lambda: meters[before].taking if len(meters) > before else 0.0


def _train(
    first: FirstFit, task: TrainingTask, budget: Budget, meters: Sequence[WaitMeter]
) -> tuple[BlockTimer, str | None]:
    model, names = first.model, list[str]()

    def evaluate() -> float:
        x, y, weights = task.validation or (None, None, None)
        values = model.evaluate(
            x,
            y,
            sample_weight=weights,
            batch_size=None if y is None else task.batch,
            steps=task.validation_steps,
            verbose=0,
            return_dict=True,
        )
        names[:] = [name for name in values if name != "loss" and not name.endswith("_loss")][:1] or ["loss"]
        return float(values[names[0]])

    metric = evaluate if task.validation else None
    before = metric() if metric else None  # Compiles the evaluation and creates its input.
    steps = task.steps_per_epoch and task.steps_per_epoch * budget.epochs
    timer = BlockTimer(
        steps, _SHARE_OF_LIMIT * budget.limit, metric, _input_seconds(meters), before, task.steps_per_epoch
    )
    with _timing(model, timer):
        x, y, weights = task.data
        # A strategy that has just adopted the model has replaced its fit; a fit of its own class has run up to here.
        fit = model.fit if "fit" in vars(model) and not trainer.has_own(model, "fit") else first.fit
        fit(x, y, sample_weight=weights, epochs=budget.epochs, verbose=0, **task.options)
    return timer, names[0] if names else None


@contextlib.contextmanager
def _timing(model: keras.Model, timer: BlockTimer) -> Iterator[None]:
    model.make_train_function()
    function = model.train_function
    model.train_function = timed_function(model, function, timer)
    try:
        yield
    finally:
        model.train_function = function


def _bare_step(model: keras.Model, task: TrainingTask, strategy: Strategy | None) -> float:
    is_compiled = trainer.is_compiled(model)
    if strategy and is_compiled:
        placed = strategy._placement.place_for_step(task.first)
    else:
        placed = jax.device_put(task.first) if is_compiled else task.first
    return bare_step_seconds(model, model.train_function, placed)


def _notes_of(timer: BlockTimer, budget: Budget) -> list[str]:
    stopped = f"stopped after {timer.steps:,} steps to stay within the limit of {budget.limit:g} s"
    few = f"only {len(timer.seconds)} blocks of steps were timed, so the spread is uncertain"
    return [*[stopped] * timer.is_stopped, *[few] * (len(timer.seconds) < 3)]


ProgressCallback = Callable[[ScalingSetting, "SettingResult | SettingFailure | None"], None]


def measure_all(
    workload: Workload,
    settings: Sequence[ScalingSetting],
    budget: Budget,
    environment: Mapping[str, str],
    report: ProgressCallback,
) -> list[SettingResult | SettingFailure]:
    """Measure settings one after the other.

    A fresh process for each setting sets the number of CPU devices before JAX starts, has its own memory, and may crash alone.
    ``report`` is called before each setting with None, and after it with its result, unless that is raised.

    Raises:
        OptionError: the script calls no ``fit``.
    """
    results: list[SettingResult | SettingFailure] = []
    # Numbers of devices whose input has its own batches: another batch size would change nothing.
    fixed: set[int] = set()
    for setting in settings:
        if setting.devices not in fixed:
            report(setting, None)
            result = measure_in_child(workload, setting, budget, environment)
            if isinstance(result, SettingFailure) and result.ends_all:
                raise OptionError(result.reason)
            report(setting, result)
            results.append(result)
            if isinstance(result, SettingResult) and result.has_own_batches:
                fixed.add(setting.devices)
    return results


def measure_in_child(
    workload: Workload, setting: ScalingSetting, budget: Budget, environment: Mapping[str, str]
) -> SettingResult | SettingFailure:
    """Measure a setting in a child process, which is killed with its children at the time limit."""
    request = {"setting": asdict(setting), "budget": asdict(budget), "workload": asdict(workload)}
    found = run_child("lockstep.tools.scaling.benchmark", request, budget.limit, environment)
    if found.failure:
        hint = " Fix: raise --limit, or train on fewer rows." if found.is_late else ""
        return SettingFailure(setting, found.failure + hint)
    return from_json(found.content)


def main(arguments: Sequence[str]) -> None:
    """Measure the setting in the request file, and write the result: the entry point of the child."""
    content, write = read_request(arguments)
    setting = ScalingSetting(**content["setting"])
    reserve_devices(max(1, setting.devices))

    def tell(result: SettingResult | SettingFailure) -> int:
        write(asdict(result))
        return 0

    tell(measure_workload(Workload(**content["workload"]), setting, Budget(**content["budget"]), tell))


Tell = Callable[[SettingResult | SettingFailure], int]


def measure_workload(
    workload: Workload, setting: ScalingSetting, budget: Budget, tell: Tell | None = None
) -> SettingResult | SettingFailure:
    """Measure a workload in one setting; an exception becomes a :class:`SettingFailure`.

    If a script catches its end and calls fit again, the process ends with the exit code of ``tell(result)``.
    """
    results: list[SettingResult] = []
    keras.utils.set_random_seed(0)  # Unless the program sets another seed.

    def result(error: Exception | None) -> SettingResult | SettingFailure:
        if error is None:
            return results[0]
        return SettingFailure(setting, _reason_of(error), ends_all=isinstance(error, NoFitError))

    try:
        with override_devices(setting.devices):
            run_workload(
                workload,
                lambda first: results.append(measure(first, setting, budget)),
                tell and (lambda error: tell(result(error))),
            )
    except Exception as error:
        return result(error)
    return result(None)


def _reason_of(error: Exception) -> str:
    if "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError):
        return f"out of memory: {cause_of(error)[:300]}"
    return str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {cause_of(error)[:300]}"


if __name__ == "__main__":
    main(sys.argv[1:])
