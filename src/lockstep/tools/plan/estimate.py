"""Training steps compiled for a target without running them: memory, collectives, time, and the largest batch that fits.

Time is estimated by the roofline of S. Williams, A. Waterman, D. Patterson, 2009: a device takes at least as long as its arithmetic takes at
its peak, and at least as long as its memory takes at its bandwidth. Collectives are added, as if they overlapped with nothing.
"""

import inspect
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np
from jax.extend.core import Jaxpr

from lockstep._errors import LockstepError, OptionError, sequence_of, shown
from lockstep._keras import trainer
from lockstep._keras.graph import cause_of, layers_of
from lockstep.collectives import AutoAllReduce
from lockstep.collectives.cost_model import Network, NetworkLink, predict_seconds
from lockstep.data.sources import make_source
from lockstep.devices.placement import count_rows, placement_on
from lockstep.doctor.base import is_user_code
from lockstep.execution.executors import ModelParallelExecutor, SpmdExecutor
from lockstep.execution.jaxpr_utils import equations_of, source_location
from lockstep.execution.model_parallel.model_shardings import MeshAxes, MeshOptions, ModelShardings
from lockstep.execution.step_functions import StepFunctions
from lockstep.execution.variable_layout import ModelLayout, VariableLayout, layout_notes, layout_of
from lockstep.execution.variable_shards import Recompute, Shard
from lockstep.fit.monitoring.flops import flops_of_step
from lockstep.tools.plan.hardware import Target
from lockstep.tools.plan.hlo import collectives, memory_traffic


@dataclass(frozen=True)
class PlannedStrategy:
    """A strategy that is planned.

    Attributes:
        shard: argument of the strategy.
        recompute: argument of the strategy.
        has_mesh: whether it is a ``ModelParallelStrategy``.
    """

    shard: Shard = None
    recompute: Recompute = None
    has_mesh: bool = False


# Names of ``--strategy``. After one with a mesh, ``:4`` sets the size of its second axis.
STRATEGIES = {
    "replicated": PlannedStrategy(),
    "optimizer": PlannedStrategy("optimizer"),
    "variables": PlannedStrategy("variables"),
    "recompute": PlannedStrategy("variables", "blocks"),
    "model": PlannedStrategy(has_mesh=True),
    "model-recompute": PlannedStrategy("variables", "blocks", has_mesh=True),
}
MODEL_AXIS = 4  # most devices of a mesh's second axis, unless its size is given
MAX_COMPILED = 6  # steps in a search for the largest batch
CLOSE_ENOUGH = 1.1  # ratio of the smallest batch that does not fit, or of all memory, to the largest batch that fits
TARGET_SHARE = 0.96  # share of the memory that a try is to need
MAX_ROWS = 1 << 16  # of a device
_NAME = re.compile(rf"{'|'.join(STRATEGIES)}|(model|model-recompute):[1-9]\d{{0,3}}")
# "… Used 17.2G of 15.75G hbm …", or "… total memory required for HLO temporaries (22.17G) exceeds available HBM (15.75G)"
_REFUSED = re.compile(r"(?:[Uu]sed |memory required for HLO temporaries \()([\d.]+)([KMGT]?)")
_NOT_SHARDED = (
    "no layer is sharded over the {} devices of the second axis, which would all compute the same rows. Fix: take another strategy, or "
    "another size of the axis (--strategy model:SIZE)."
)
_PRIMITIVE = re.compile(r"primitive '([\w\-]+)'")
Group = tuple[int, ...] | None
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class TrainingCall:
    """A call of ``fit`` that is planned.

    Args:
        model: compiled.
        first: the first batch, as ``train_step`` gets it.
        batch: rows of a batch of the call.
        rows: number of rows of the training data; None if unknown.
        has_own_batches: whether the input has batches already.
    """

    model: keras.Model
    first: Any
    batch: int
    rows: int | None
    has_own_batches: bool

    @classmethod
    def of_fit(cls, model: keras.Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "TrainingCall":
        """Return what a call of ``fit`` with these arguments trains on; it reads one batch."""
        given = inspect.signature(keras.Model.fit).bind(model, *args, **kwargs).arguments
        data = (given.get("x"), given.get("y"), given.get("sample_weight"))
        size, steps, weights = (given.get(name) for name in ("batch_size", "steps_per_epoch", "class_weight"))
        source = make_source(*data, batch_size=size, steps_per_epoch=steps, class_weight=weights)
        first = next(source.batches())
        own = not source.is_arrays
        if own:
            return cls(model, first, count_rows(first), None, own)
        split = given.get("validation_split") if given.get("validation_data") is None else None
        rows = int(len(jax.tree.leaves(data[0])[0]) * (1 - (split or 0.0)))
        size = size or (-(-rows // steps) if steps else trainer.DEFAULT_BATCH_SIZE)
        return cls(model, first, min(size, rows or size), rows, own)

    @property
    def row(self) -> Any:
        """The first row, arrays ``(1, …)``."""
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:1], self.first)

    @property
    def whole_batch(self) -> Any:
        """A batch of the call, of equal rows: a model may be for batches of one size."""
        return repeat_row(self.row, self.batch)


@dataclass(frozen=True)
class Memory:
    """Bytes of a step on one device.

    Args:
        weights: size of the model's weights.
        optimizer: its variables.
        batch: the input.
        gradients: all of them, if the program held them at once; they are among the temporaries.
        temporaries: gradients, activations, and what the program needs to compute.
        results: those that reuse no memory of an argument.
        code: size of the compiled program.
    """

    weights: int
    optimizer: int
    batch: int
    gradients: int
    temporaries: int
    results: int
    code: int

    @property
    def total(self) -> int:
        """Bytes of the step in total."""
        return self.weights + self.optimizer + self.batch + self.temporaries + self.results + self.code


@dataclass(frozen=True)
class CompiledStep:
    """A training step for one batch size on one target.

    Args:
        rows: number of rows of the global batch.
        memory: on one device; None if the program does not fit or could not be compiled.
        needed: bytes on one device, also where the compiler has refused a program that does not fit; None if unknown.
        collectives: for each kind its name, number, bytes of the results on a device, and the first devices that exchange with each
            other, None for all; see :class:`~lockstep.tools.plan.hlo.Collective`.
        traffic: bytes that a device reads and writes in its memory, if each array is written and read once.
        share: the part of the operations of its rows that a device does: less than 1 if layers are sharded over a mesh.
        seconds: that compiling took.
        failure: why there is no program; "" if there is one, or if it does not fit.
    """

    rows: int
    memory: Memory | None
    needed: int | None
    collectives: tuple[tuple[str, int, int, Group], ...] = ()
    traffic: int = 0
    share: float = 1.0
    seconds: float = 0.0
    failure: str = ""

    def fits(self, usable: int | None) -> bool:
        """Whether there is a program, and it fits in ``usable`` bytes; None: any program does."""
        return self.memory is not None and (usable is None or self.memory.total <= usable)


@dataclass(frozen=True)
class Survey:
    """What a plan must know of a call of ``fit``, whatever the target is.

    Args:
        batch: rows of a batch of the call.
        rows: number of rows of the training data; None if unknown.
        has_own_batches: whether the input has batches already.
        dtype: in which the model computes.
        flops_per_row: floating-point operations of a training step that each row adds; None if XLA cannot count them.
        flops_per_step: those of a step whatever its rows are, such as the optimizer's.
    """

    batch: int
    rows: int | None
    has_own_batches: bool
    dtype: str
    flops_per_row: float | None
    flops_per_step: float = 0.0


def last_batch(rows: int | None, batch: int) -> int | None:
    """Return the rows of the last batch of an epoch if it differs; if the number of rows is unknown, one row less."""
    return ((batch - 1) if rows is None else rows % batch) or None


def survey(call: TrainingCall) -> Survey:
    """Build the model and count its operations.

    Raises:
        Exception: of any type, if a training step of the call fails.
    """
    state = trainer.training_state(call.model, call.whole_batch)
    per_row, per_step = _operations(call, state)
    return Survey(call.batch, call.rows, call.has_own_batches, _compute_dtype(call.model), per_row, per_step)


def _operations(call: TrainingCall, state: Any) -> tuple[float | None, float]:
    """Return the operations that each row of a step adds, and those of any step: by the line through two batches."""
    once = flops_of_step(call.model, state, call.whole_batch)
    if once is None:
        return None, 0.0
    try:
        twice = flops_of_step(call.model, state, repeat_row(call.row, 2 * call.batch))
    except Exception:  # of a model for batches of one size, of any type
        twice = None
    if twice is None or not once < twice <= 2 * once:
        return once / call.batch, 0.0
    return (twice - once) / call.batch, 2 * once - twice


def _compute_dtype(model: keras.Model) -> str:
    """Return the dtype in which most weights are multiplied."""
    sizes: Counter[str] = Counter()
    for layer in layers_of(model):
        sizes[layer.compute_dtype] += sum(int(np.prod(weight.shape)) for weight in layer.trainable_variables)
    return str(sizes.most_common(1)[0][0]) if sizes else str(model.compute_dtype)


def repeat_row(row: Any, rows: int) -> Any:
    """Return a batch of equal rows, which takes no memory."""
    return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (rows, *leaf.shape[1:])), row)


class StepCompiler:
    """Compiles the training step of a call under one strategy, such as "model:8", for one target.

    Without ``devices``, those that the target describes are used.

    Raises:
        OptionError: see :meth:`Target.devices`.
    """

    def __init__(
        self, call: TrainingCall, target: Target, strategy: str, devices: Sequence[jax.Device] | None = None
    ) -> None:
        self._call = call
        self.notes: dict[str, None] = {}  # sentences about the model, in order
        self._state = trainer.training_state(call.model, call.whole_batch)
        found = target.devices() if devices is None else devices
        self._executor = planned_executor(call, found, strategy, self._note)
        self._placement = self._executor.placement
        self._layout = self._described_layout()
        self._gradients = self._gradient_bytes()
        size = model_axis_of(strategy, len(found))
        sharded = self._sharded_part() if size > 1 else 0.0
        self._share = 1 - sharded + sharded / size
        self.refusal = "" if size == 1 or sharded else _NOT_SHARDED.format(size)  # why the strategy helps nothing here

    def compile(self, rows: int) -> CompiledStep:
        """Compile the step for a batch of so many rows, without running it."""
        start = time.perf_counter()
        functions = StepFunctions(self._call.model, self._placement, self._executor, self._note)
        step = self._executor.train_step(functions.build_step(self._executor, "train"))
        traced = None
        try:
            batch = self._placement.abstract_batch(repeat_row(self._call.row, rows))
            traced = step.trace_for(self._state, batch)
            program = _compile(traced.lower())
        except Exception as error:  # of the model or of the compiler, of any type
            seconds = time.perf_counter() - start
            if "RESOURCE_EXHAUSTED" in str(error):
                return CompiledStep(rows, None, _bytes_refused(str(error)), seconds=seconds)
            failure = describe_failure(error, traced.jaxpr.jaxpr if traced else None)
            return CompiledStep(rows, None, None, seconds=seconds, failure=failure)
        return self._measured(rows, program, time.perf_counter() - start)

    def _described_layout(self) -> ModelLayout:
        executor, model = self._executor, self._call.model
        if isinstance(executor, ModelParallelExecutor):
            return executor.shardings.layout()
        layout = layout_of(model, executor.placement, executor.shard, executor.recompute, deterministic=False)
        if executor.shard == "variables":
            self.notes.update(dict.fromkeys(layout_notes(layout, model.optimizer)))
        return layout

    def _gradient_bytes(self) -> int:
        """Return the bytes of all gradients on a device; they are sharded if the variables of the optimizer are."""
        model, layout = self._call.model, self._layout
        if self._executor.shard == "optimizer":
            layout = layout_of(model, self._placement, "variables", None, deterministic=False)
        return sum(row.device_bytes for row in self._trained(layout))

    def _trained(self, layout: ModelLayout) -> list[VariableLayout]:
        trained = {variable.path for variable in self._call.model.trainable_variables}
        return [row for row in layout.variables if row.owner == "model" and row.path in trained]

    def _sharded_part(self) -> float:
        """Return the part of the trained bytes that is sharded over the second axis of the mesh; a table that is looked up needs no operations."""
        tables = [layer for layer in layers_of(self._call.model) if type(layer) is keras.layers.Embedding]
        looked_up = {variable.path for layer in tables for variable in layer.trainable_variables}
        used = [row for row in self._trained(self._layout) if row.path not in looked_up]
        return sum(row.bytes for row in used if "model" in row.axes) / max(1, sum(row.bytes for row in used))

    def _note(self, sentence: str) -> None:
        self.notes[sentence] = None

    def _measured(self, rows: int, program: jax.stages.Compiled, seconds: float) -> CompiledStep:
        analysis: Any = program.memory_analysis()
        text = program.as_text() or ""
        sizes = Counter[str]()
        for one in self._layout.variables:
            sizes[one.owner] += one.device_bytes
        memory = Memory(
            weights=sizes["model"],
            optimizer=sizes["optimizer"],
            batch=max(0, int(analysis.argument_size_in_bytes) - sizes.total()),
            gradients=self._gradients,
            temporaries=int(analysis.temp_size_in_bytes),
            results=int(analysis.output_size_in_bytes - analysis.alias_size_in_bytes),
            code=int(analysis.generated_code_size_in_bytes),
        )
        counts, totals = Counter[tuple[str, Group]](), Counter[tuple[str, Group]]()
        for each in collectives(text):
            counts[each.name, each.group] += each.rounds
            totals[each.name, each.group] += each.rounds * each.bytes
        ordered = sorted(counts, key=lambda kind: (kind[0], kind[1] or ()))
        found = tuple((kind[0], counts[kind], totals[kind], kind[1]) for kind in ordered)
        traffic = int(analysis.argument_size_in_bytes) + memory_traffic(text)
        return CompiledStep(rows, memory, memory.total, found, traffic, self._share, seconds)


def model_axis_of(strategy: str, devices: int) -> int:
    """Return the size of the second axis of the mesh of a strategy such as "model:8"; 1: it has none."""
    name, _, size = strategy.partition(":")
    if not STRATEGIES[name].has_mesh:
        return 1
    return int(size) if size else max(n for n in range(1, MODEL_AXIS + 1) if devices % n == 0)


def planned_executor(
    call: TrainingCall, devices: Sequence[jax.Device], strategy: str, note: Callable[[str], None]
) -> SpmdExecutor:
    """Return what runs the steps of a call with a built model under a strategy on these devices.

    Raises:
        DeviceError: the size of a mesh's axis does not divide the devices.
    """
    planned, model = STRATEGIES[strategy.partition(":")[0]], call.model
    if not planned.has_mesh:
        placement = placement_on(devices, len(devices))
        return SpmdExecutor(placement, AutoAllReduce(), shard=planned.shard, recompute=planned.recompute)
    size = model_axis_of(strategy, len(devices))
    axes = MeshAxes({"data": max(1, len(devices) // size), "model": size})
    options = MeshOptions(axes.placement(devices), axes, None, planned.shard)
    shardings = ModelShardings(model, options, note)
    executor = ModelParallelExecutor(options.placement, shardings, shardings.resolve, planned.recompute, note)
    executor.prepare(call.whole_batch)
    return executor


def _compile(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile a step; if XLA's own kernels for GPUs have no tiles for a matrix product, which it could not tune, with those of cuBLAS."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "output tile sizes" not in str(error):
            raise
        return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def _bytes_refused(message: str) -> int | None:
    """Return the bytes that a program needs, from the message of the compiler that has refused it."""
    found = _REFUSED.search(message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def describe_failure(error: Exception, step: Jaxpr | None = None) -> str:
    """Describe an exception in one line, with the line of the user's program that it is about.

    Args:
        error: error of tracing or compiling.
        step: the traced step, in which an operation that the exception names is looked up; None: it was not traced.
    """
    text = str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {cause_of(error)[:300]}"
    named = _PRIMITIVE.search(text)
    if step is not None and named is not None:
        places = (source_location(equation) for equation in equations_of(step) if equation.primitive.name == named[1])
        layer, line = next(places, ("", ""))
        return f"{text} (at {line}, in {layer or 'the step'})" if line else text
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    return f"{text} (at {frames[-1].filename}:{frames[-1].lineno})" if frames else text


def largest_batch(
    known: list[CompiledStep], compile_step: Callable[[int], CompiledStep], usable: int, devices: int
) -> tuple[int, int | None]:
    """Search the largest batch that fits, by compiling.

    Memory is nearly a linear function of the rows, so each try is taken from the line through two steps that are known. The search
    ends with a step that needs nearly all memory, or between two steps that are close to each other.

    Args:
        known: steps that were compiled.
        compile_step: compiles one more.
        usable: bytes of a device.
        devices: by which batches are divided.

    Returns:
        The largest number of rows that was seen to fit, or 0, and the smallest that was seen not to; None: none was.
    """
    steps = {step.rows: step for step in known if not step.failure and step.rows % devices == 0}
    for _ in range(MAX_COMPILED):
        rows = _next_try(steps, usable, devices)
        if rows is None:
            break
        step = compile_step(rows)
        if step.failure:
            break
        steps[rows] = step
    return _bracket(steps, usable)


def _bracket(steps: Mapping[int, CompiledStep], usable: int) -> tuple[int, int | None]:
    fitting = max((rows for rows, step in steps.items() if step.fits(usable)), default=0)
    return fitting, min((rows for rows, step in steps.items() if not step.fits(usable)), default=None)


def _next_try(steps: Mapping[int, CompiledStep], usable: int, devices: int) -> int | None:
    """Return the batch to compile next; None: the search has ended."""
    fitting, failing = _bracket(steps, usable)
    if fitting and (steps[fitting].needed or 0) * CLOSE_ENOUGH >= usable:
        return None
    if failing is not None and failing <= max(CLOSE_ENOUGH * fitting, fitting + devices):
        return None
    points = sorted((rows, step.needed) for rows, step in steps.items() if step.needed)
    guess = _guess(points, int(usable * TARGET_SHARE))
    is_useless = failing is not None and guess is not None and not fitting < guess < failing - devices
    if guess is None or is_useless:  # What XLA recomputes to save memory makes no line.
        guess = 2 * fitting if failing is None else (fitting + failing) // 2
    most = min(MAX_ROWS * devices, 16 * (fitting or devices)) if failing is None else failing - devices
    rows = min(max(guess, fitting + devices), most) // devices * devices
    return rows if rows > fitting else None


def _guess(points: Sequence[tuple[int, int]], usable: int) -> int | None:
    """Return the rows at which the line through the two points nearest to ``usable`` reaches it."""
    nearest = sorted(points, key=lambda point: abs(point[1] - usable))[:2]
    if len(nearest) < 2:
        return None
    (first, one), (second, two) = sorted(nearest)
    slope = (two - one) / (second - first)
    return int(first + (usable - one) / slope) if slope > 0 else None


def check_strategies(names: Any) -> tuple[str, ...]:
    """Return the strategies of ``--strategy``; "auto": all.

    Raises:
        OptionError: a name is unknown.
    """
    expected = f'"auto" or some of {", ".join(STRATEGIES)}, model:8'
    given = list(sequence_of("strategy", names.split(",") if isinstance(names, str) else names, expected))
    if given == ["auto"]:
        return tuple(STRATEGIES)
    if not given or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in given):
        raise OptionError(
            f"strategy: expected {expected}, got {shown(names)}. Fix: pass one or more of these names, or leave it out."
        )
    return tuple(dict.fromkeys(given))


# A forward pass is about a third of a step's operations, and recomputed blocks do it twice.
RECOMPUTED = 4 / 3


@dataclass(frozen=True)
class Estimate:
    """Operations of a step, and seconds.

    Args:
        operations: floating-point operations of the device that has most rows.
        arithmetic: at the peak of a device.
        traffic: seconds for the traffic of a device's memory.
        communication: seconds for all collectives.
    """

    operations: float
    arithmetic: float
    traffic: float
    communication: float

    @property
    def seconds(self) -> float:
        """Estimated time of the step."""
        return max(self.arithmetic, self.traffic) + self.communication

    @property
    def efficiency(self) -> float:
        """Share of the time in which a device does not wait for others."""
        return max(self.arithmetic, self.traffic) / self.seconds

    @property
    def bound(self) -> str:
        """What takes longest: "arithmetic", "memory" or "communication"."""
        parts = {"arithmetic": self.arithmetic, "memory": self.traffic, "communication": self.communication}
        return max(parts, key=lambda name: parts[name])


def estimate(
    step: CompiledStep, surveyed: Survey, target: Target, strategy: str, between: NetworkLink
) -> Estimate | None:
    """Estimate the time of a compiled step; ``between`` links two machines of GPUs.

    Returns:
        The estimate; None if a figure of the hardware or of the model is unknown.
    """
    peak = target.accelerator.peak.get(surveyed.dtype)
    bandwidth, network = target.accelerator.memory_bandwidth, target.network(between)
    if peak is None or bandwidth is None or network is None or surveyed.flops_per_row is None or step.memory is None:
        return None
    groups = target.count // model_axis_of(strategy, target.count)  # of devices that compute the same rows
    rows = -(-step.rows // groups)  # of the group that has most
    planned = STRATEGIES[strategy.partition(":")[0]]
    of_rows = rows * surveyed.flops_per_row * step.share * (RECOMPUTED if planned.recompute else 1.0)
    of_step = surveyed.flops_per_step * (1 / target.count if planned.shard else step.share)
    communication = sum(_seconds(*one, target.count, network) for one in step.collectives)
    operations = of_rows + of_step
    return Estimate(operations, operations / peak, step.traffic / bandwidth, communication)


def _seconds(name: str, number: int, size: int, group: Group, count: int, network: Network) -> float:
    """Return the seconds of collectives of one kind, as rings of all groups at the same time.

    Args:
        name: such as "all-reduce".
        number: number of collectives.
        size: bytes of their results on a device.
        group: the first devices that exchange with each other; None: all.
        count: number of all devices.
        network: their links.
    """
    if name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        groups = _all_groups(tuple(range(count)) if group is None else group, count)
        devices = groups.shape[1]
        whole = size * devices if name == "reduce-scatter" else size
        seconds = number * predict_seconds("ring", whole / number, devices, network, groups)
        return seconds if name == "all-reduce" else seconds / 2  # Others have half of the rounds of an all-reduce.
    pairs = np.reshape(group, (-1, 2)) if group and name == "collective-permute" else np.array([[0, count - 1]])
    return number * network.seconds(pairs, size / number) if count > 1 else 0.0


def _all_groups(first: tuple[int, ...], count: int) -> np.ndarray:
    """Return all groups of a mesh, ``(groups, devices of a group)``: the first, moved until each of ``count`` devices is in one."""
    offsets = np.array(first) - min(first)
    free = np.ones(count, bool)
    groups = []
    for start in range(count):
        moved = start + offsets
        if free[start] and moved.max() < count:
            free[moved] = False
            groups.append(moved)
    return np.stack(groups)
