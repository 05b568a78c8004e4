"""Measure one setting in the process that has its devices: the time of a step, of its parts, and memory."""

import contextlib
import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep._keras import trainer
from lockstep.collectives import ALGORITHMS, CrossDeviceOps
from lockstep.collectives.cost_model import FORMULAS
from lockstep.data.wait_meter import WaitMeter, collect_meters
from lockstep.execution.train_functions import STATE
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.tools.run_until_fit import FirstFit
from lockstep.tools.scaling.results import AllReduceTiming, Budget, CurvePoint, ScalingSetting, SettingResult
from lockstep.tools.scaling.workload import TrainingTask, work_of

__all__ = [
    "WARM",
    "BlockTimer",
    "all_reduce_seconds",
    "bare_seconds",
    "block_ends",
    "clocked",
    "formula_of",
    "greatest_memory",
    "is_higher_better",
    "links_of",
    "measure",
]

WARM = 3  # steps that are not timed: they compile
POINTS = 8  # of a curve, and blocks

StepFunction = Callable[[Any, Any], tuple[Any, Any]]


def block_ends(steps: int | None) -> list[int]:
    """After which steps a block ends.

    Args:
        steps: in all; None where nobody knows, and blocks become longer and longer.
    """
    if steps is None:
        return [WARM + 10 * 2**power for power in range(30)]
    timed = max(0, steps - WARM)
    return sorted({WARM + -(-timed * part // POINTS) for part in range(1, POINTS + 1)} - {WARM})


class BlockTimer:
    """Counts and times the steps of one training.

    Args:
        steps: of the whole training, or None.
        limit: seconds after which the training ends.
        evaluate: gives the metric, with the clock stopped.
        taking: gives the seconds that were spent on getting batches, so far.
        before: the metric before the first step.
        of_epoch: steps of an epoch, or None.
    """

    def __init__(
        self,
        steps: int | None,
        limit: float,
        evaluate: Callable[[], float] | None,
        taking: Callable[[], float],
        before: float | None = None,
        of_epoch: int | None = None,
    ) -> None:
        self._ends, self._limit, self._evaluate, self._taking = block_ends(steps), limit, evaluate, taking
        self._born, self._of_epoch = time.perf_counter(), of_epoch
        self.steps, self.lengths = 0, list[int]()
        self.seconds, self.taken = list[float](), list[float]()
        self.values = [] if before is None else [(0, before)]  # steps, metric
        self.is_cut = False

    def begin(self) -> None:
        """A block begins now."""
        self._first, self._taken_before, self._begun = self.steps, self._taking(), time.perf_counter()

    def stepped(self, result: Any, count: int) -> bool:
        """``count`` steps, or those left of the epoch, were started, and gave ``result``; returns whether a block has ended with them."""
        if self._of_epoch:
            count = min(count, self._of_epoch - self.steps % self._of_epoch)
        before, self.steps = self.steps, self.steps + count
        self.is_cut = time.perf_counter() - self._born > self._limit
        if before < WARM <= self.steps:
            jax.block_until_ready(result)
            self.begin()
            return False
        if not (self._ends and self.steps >= self._ends[0]) and not (self.is_cut and self.steps > WARM):
            return False
        jax.block_until_ready(result)
        seconds, count = time.perf_counter() - self._begun, self.steps - self._first
        self._ends = [end for end in self._ends if end > self.steps]
        self.seconds.append(seconds)
        self.lengths.append(count)
        self.taken.append(self._taking() - self._taken_before)
        return True

    def look(self) -> None:
        """Evaluate, between two blocks."""
        if self._evaluate:
            self.values.append((self.steps, self._evaluate()))

    def curve(self, batch: int) -> tuple[CurvePoint, ...]:
        """The metric by rows and by time; the first steps, which compile, count as much as the others."""
        usual = sum(self.seconds) / max(1, sum(self.lengths))
        times = dict[int, float]()
        steps, seconds = WARM, WARM * usual
        for length, block in zip(self.lengths, self.seconds, strict=True):
            steps, seconds = steps + length, seconds + block
            times[steps] = seconds
        return tuple(CurvePoint(at * batch, times.get(at, at * usual), value) for at, value in self.values)


def clocked(model: keras.Model, function: StepFunction, clock: BlockTimer) -> StepFunction:
    """The training function of a model, with a clock around it."""

    def timed(state: Any, iterator: Any) -> tuple[Any, Any]:
        logs, state = function(state, iterator)
        if clock.stepped((logs, state), model.steps_per_execution):
            trainer.write_back_values(model, STATE["train"], state)
            clock.look()
            model.stop_training = model.stop_training or clock.is_cut
            clock.begin()
        return logs, state

    return timed


SIZES = (4_000, 400_000, 4_000_000)  # bytes of the vectors whose all-reduce says what the link can do
_SAMPLES, _SECONDS = 5, 0.05  # a sample repeats a call for at least so long
_AXIS = "device"
_STATUS = Path("/proc/self/status")


def bare_seconds(model: keras.Model, function: Callable[[Any, Any], Any], batch: Any) -> float:
    """Median seconds of the compiled training step, repeated on one batch; the model is left as it is.

    Args:
        model: compiled, and trained before.
        function: its training function, which has been compiled.
        batch: on the devices.
    """
    state = jax.tree.map(jnp.copy, trainer.training_state(model, batch))
    batches = itertools.repeat(batch)

    def run(count: int) -> None:
        nonlocal state
        for _ in range(count):
            _, state = function(state, batches)
        jax.block_until_ready(state)

    return _median(run) / model.steps_per_execution


def all_reduce_seconds(ops: CrossDeviceOps, devices: Sequence[jax.Device], arrays: Sequence[Any]) -> float:
    """Median seconds in which the devices add up arrays, less those of a program that adds nothing.

    Args:
        ops: how they meet.
        devices: that hold them.
        arrays: shapes and dtypes.
    """
    if len(devices) < 2:
        return 0.0
    mesh, cut = Mesh(np.asarray(devices), (_AXIS,)), PartitionSpec(_AXIS)
    held = [jnp.zeros((len(devices), *array.shape), array.dtype, device=NamedSharding(mesh, cut)) for array in arrays]

    def meet(pieces: list[jax.Array]) -> list[jax.Array]:
        return [total[None] for total in ops.all_reduce([piece[0] for piece in pieces], _AXIS, devices)]

    def stay(pieces: list[jax.Array]) -> list[jax.Array]:
        return [piece.reshape(-1)[:1] for piece in pieces]  # Nothing at all would not run.

    both = []
    for function in (meet, stay):
        program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))
        both.append(_median(partial(_repeat, program, held)))
    return max(0.0, both[0] - both[1])


def _repeat(program: Callable[[Any], Any], held: Any, count: int) -> None:
    for _ in range(count):
        jax.block_until_ready(program(held))


def links_of(ops: CrossDeviceOps, devices: Sequence[jax.Device]) -> tuple[AllReduceTiming, ...]:
    """All-reduces of vectors of several sizes."""
    if len(devices) < 2:
        return ()
    found = []
    for size in SIZES:
        seconds = all_reduce_seconds(ops, devices, [jax.ShapeDtypeStruct((size // 4,), "float32")])
        found.append(AllReduceTiming(formula_of(ops), size, len(devices), seconds))
    return tuple(found)


def formula_of(ops: CrossDeviceOps) -> str:
    """Name of the formula that predicts an operation; somebody's own counts as the platform's."""
    names = [name for name, kind in ALGORITHMS.items() if type(ops) is kind and name in FORMULAS]
    return names[0] if names else "auto"


def greatest_memory(devices: Sequence[jax.Device]) -> int:
    """Bytes: the most that an accelerator has held, else this process. ``ru_maxrss`` would count the parent's, too."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]
    if max(peaks):
        return int(max(peaks))
    found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text()) if _STATUS.exists() else None
    return 1024 * int(found[1]) if found else 0


def _median(run: Callable[[int], None]) -> float:
    """Median seconds of a call, when ``run(count)`` makes so many."""
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


_SHARE_OF_LIMIT = 0.6  # of the time limit that training may take; the rest is for starting, compiling and the parts
_GROWING = ("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "similarity", "r2", "score")


def measure(found: FirstFit, setting: ScalingSetting, budget: Budget) -> SettingResult:
    """Train as the script would, on the devices of a setting, and measure.

    Args:
        found: the script's first fit; the devices are imposed on its strategy.
        setting: devices and batch.
        budget: how much is trained.

    Raises:
        LockstepError: the setting is impossible.
    """
    strategy = _strategy_of(found.model, setting)
    work = work_of(found, setting.batch, budget)
    with collect_meters() as meters:
        clock, metric = _train(found, work, budget, meters)
    devices = strategy._placement.devices if strategy else jax.local_devices()[:1]
    memory = greatest_memory(devices)
    arrays = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in found.model.trainable_variables]
    ops = strategy.cross_device_ops if strategy else None
    steps = max(1, sum(clock.lengths))
    return SettingResult(
        setting=replace(setting, batch=work.batch),
        has_own_batches=work.has_own_batches,
        rows_per_epoch=work.batch * (work.steps_per_epoch or clock.steps // work.epochs),
        blocks=tuple(seconds / count for seconds, count in zip(clock.seconds, clock.lengths, strict=True)),
        bare=_bare(found.model, work, strategy),
        taking=sum(clock.taken) / steps if strategy else None,
        all_reduce=all_reduce_seconds(ops, devices, arrays) if ops else 0.0,
        gradient_bytes=sum(array.size * array.dtype.itemsize for array in arrays),
        algorithm=formula_of(ops) if ops else "auto",
        links=links_of(ops, devices) if ops else (),
        memory=memory,
        metric=metric,
        is_higher_better=is_higher_better(metric or "loss"),
        curve=clock.curve(work.batch),
        platform=devices[0].platform,
        notes=(*work.notes, *_notes_of(clock, budget)),
    )


def is_higher_better(metric: str) -> bool:
    """By its name, as Keras's callbacks decide it: accuracies and the like grow, losses and errors shrink."""
    name = metric.lower()
    return any(part in name for part in _GROWING)


def _strategy_of(model: keras.Model, setting: ScalingSetting) -> Strategy | None:
    """The strategy that the model has, or a new one; None for plain Keras."""
    if not setting.devices:
        return None
    owner = trainer.strategy_of(model)
    if owner is None:
        owner = MirroredStrategy()
        owner._claim(model)
    return owner


def _taking(meters: Sequence[WaitMeter]) -> Callable[[], float]:
    """Seconds that training has spent on getting batches; its input is the next that is made."""
    before = len(meters)
    return lambda: meters[before].taking if len(meters) > before else 0.0


def _train(
    found: FirstFit, work: TrainingTask, budget: Budget, meters: Sequence[WaitMeter]
) -> tuple[BlockTimer, str | None]:
    model, names = found.model, list[str]()

    def evaluate() -> float:
        x, y, weights = work.validation or (None, None, None)
        values = model.evaluate(
            x,
            y,
            sample_weight=weights,
            batch_size=None if y is None else work.batch,
            steps=work.validation_steps,
            verbose=0,
            return_dict=True,
        )
        names[:] = [name for name in values if name != "loss"][:1] or ["loss"]
        return float(values[names[0]])

    usual = evaluate if work.validation else None
    before = usual() if usual else None  # It also compiles, and makes an input of its own.
    steps = work.steps_per_epoch and work.steps_per_epoch * work.epochs
    clock = BlockTimer(steps, _SHARE_OF_LIMIT * budget.limit, usual, _taking(meters), before, work.steps_per_epoch)
    with _clock_on(model, clock):
        x, y, weights = work.data
        # A model that a strategy has just made its own has another fit than the one that was called; a class may have its own around it.
        fit = model.fit if "fit" in vars(model) else found.fit
        fit(x, y, sample_weight=weights, epochs=work.epochs, verbose=0, **work.options)
    return clock, names[0] if names else None


@contextlib.contextmanager
def _clock_on(model: keras.Model, clock: BlockTimer) -> Iterator[None]:
    model.make_train_function()
    function = model.train_function
    model.train_function = clocked(model, function, clock)
    try:
        yield
    finally:
        model.train_function = function


def _bare(model: keras.Model, work: TrainingTask, strategy: Strategy | None) -> float:
    is_compiled = model.jit_compile and not model.run_eagerly
    if strategy and is_compiled:
        placed = strategy._placement.place_for_step(work.first)
    else:
        placed = jax.device_put(work.first) if is_compiled else work.first
    return bare_seconds(model, model.train_function, placed)


def _notes_of(clock: BlockTimer, budget: Budget) -> list[str]:
    cut = f"stopped after {clock.steps:,} steps, as the limit of {budget.limit:g} s would have been passed"
    few = f"only {len(clock.seconds)} blocks of steps could be timed, so the spread says little"
    return [*[cut] * clock.is_cut, *[few] * (len(clock.seconds) < 3)]
