"""Checks of the data: values and shapes, rows of a replica for BatchNormalization, the order of ``shuffle``, ``cache`` and ``prefetch``, and waits for batches."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import keras
import numpy as np

from lockstep._keras import trainer
from lockstep._keras.batch_normalization import unsynchronized_normalizations
from lockstep._keras.graph import global_batch_reason, is_keras_class, layers_of, operations_of
from lockstep._keras.output_activations import inputs_used_by, is_softmax, outputs_of
from lockstep._logging import counted
from lockstep.data.fit_wrapper import callbacks_in
from lockstep.data.input_bound import BOUND, describe_waiting
from lockstep.data.keras_adapter import KerasInput
from lockstep.data.random_state import capture_random_state, random_state_kept, restore_random_state
from lockstep.devices.batch_layout import rows_of_replicas
from lockstep.doctor.base import Finding, FitCall, array_in_memory, sample_rows
from lockstep.execution.executors import SpmdExecutor
from lockstep.execution.step_functions import StepFunctions
from lockstep.execution.step_measurement import StrategyProbes, copies, run_steps

FEW = 8  # rows; below, the error of ResNet-50 on ImageNet rises: figure 1 of Wu & He, "Group Normalization" (2018)
_FACTOR = 2  # between the batch sizes; a smaller change is not worth a finding
_CHANGING = (  # callbacks that may set the rate
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.LambdaCallback,
)
# Layers that may handle NaN or skip rows.
_NAN_HANDLING = (
    keras.layers.Lambda,
    keras.layers.Masking,
    keras.layers.Discretization,
    keras.layers.Cropping1D,
    keras.layers.Cropping2D,
    keras.layers.Cropping3D,
)


def check_finite_inputs(call: FitCall) -> Iterator[Finding]:
    """Find NaN and Inf among the inputs of a model without layers that handle them."""
    if not _propagates_nan(call.model):
        return
    may_mask = any(map(is_softmax, operations_of(call.model)))
    for path, rows in not_finite_in(inputs_used_by(call.model, call.x), call.max_values, may_mask):
        yield Finding(
            "inputs-not-finite",
            f"inputs that are NaN or Inf, in {rows}",
            f"x{path}, {call.at_fit}",
            "unless an activation hides it, one of them makes the loss of its batch NaN, and then all weights",
            "Leave these rows out or replace the values; lockstep.callbacks.NanGuard names such rows while training runs",
        )


def not_finite_in(tree: Any, max_values: int, may_mask: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the path of each array in memory with NaN or Inf, as an index, and in how many rows; ``may_mask``: without -Inf."""
    for path, leaf in keras.tree.flatten_with_path(tree):
        array = array_in_memory(leaf)
        if array is None or array.dtype.kind != "f" or not np.ndim(array):
            continue
        values, which_rows = sample_rows(array, max_values)
        bad = ~np.isfinite(values) & ~(np.isneginf(values) & may_mask)
        if bad.any():
            yield "".join(f"[{key!r}]" for key in path), f"{count_bad_rows(bad)} of {which_rows}"


def count_bad_rows(bad: np.ndarray) -> int:
    """Return the number of rows with a bad value."""
    return int(bad.reshape(len(bad), -1).any(-1).sum())


def _propagates_nan(model: keras.Model) -> bool:
    """Whether the model consists of Keras layers that propagate NaN."""
    outputs = outputs_of(model)
    return outputs is not None and all(
        is_keras_class(type(layer)) and isinstance(layer, keras.layers.Layer) and not isinstance(layer, _NAN_HANDLING)
        for layer in operations_of(model)
    )


def check_few_rows(call: FitCall) -> Iterator[Finding]:
    """Find a batch with fewer rows than there are replicas, unless the model runs on all rows at once."""
    rows, replicas = call.rows, call.settings.replicas
    if rows is not None and rows < replicas and not global_batch_reason(call.model):
        yield Finding(
            "fewer-rows-than-replicas",
            f"a batch of {counted(rows, 'row')} leaves {replicas - rows} of {replicas} replicas idle",
            call.at_fit,
            "the batch size is that of the global batch, which the replicas share",
            f"Use a batch of {replicas} rows or more",
        )


def check_normalization(call: FitCall) -> Iterator[Finding]:
    """Find a BatchNormalization that computes its mean and variance from few rows."""
    rows, replicas = call.rows, call.settings.replicas
    alone = set(unsynchronized_normalizations(call.model))
    layers = [x for x in layers_of(call.model) if isinstance(x, keras.layers.BatchNormalization) and x.trainable]
    names = [layer.name for layer in layers if layer.name in alone]
    if rows is None or rows < replicas or not names:
        return
    share = min(own for own in rows_of_replicas(rows, replicas) if own)
    if share >= FEW:
        return
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    synchronized = "" if replicas == 1 else "Use BatchNormalization(synchronized=True) in the scope, or "
    yield Finding(
        "normalization-of-few-rows",
        f"BatchNormalization over {share} {'row' if share == 1 else 'rows'}, a replica's share of a batch of {rows}",
        f"layer {names[0]!r}{others}, {call.at_fit}",
        f"with less than {FEW} rows mean and variance are so uncertain that accuracy falls (Wu & He, Group Normalization, 2018)",
        f"{synchronized or 'Use '}a larger batch, or GroupNormalization",
    )


@dataclass(frozen=True)
class FitRecord:
    """Global batch size and learning rate of a call of ``fit``, with the class of its optimizer, and how many batches make one update."""

    rows: int
    rate: float
    optimizer: type
    accumulated: int

    @property
    def rows_of_update(self) -> int:
        """Number of rows over which an update averages."""
        return self.rows * self.accumulated


def fit_record(call: FitCall, rate: float | None) -> FitRecord | None:
    """Return the record of a call; None if the learning rate changes during training, or the batch size is unknown or larger than all data."""
    rows = call.batch_size if call.rows_read is None else call.rows_read
    if rate is None or rows != call.rows or call.is_only_batch:
        return None
    optimizer = call.model.optimizer
    kind = type(trainer.inner_optimizer(optimizer))
    return FitRecord(rows, rate, kind, trainer.batches_per_update(optimizer))


def learning_rate_of(call: FitCall) -> float | None:
    """Return the learning rate; None if it may change during training. Call it before steps run: then variables have no values."""
    optimizer = call.model.optimizer
    if optimizer is None or _may_change(callbacks_in(call.arguments)):
        return None
    rate = trainer.adjustable_learning_rate(optimizer)
    return None if rate is None else float(np.asarray(rate))


def check_changed_batch(
    now: FitRecord | None, earlier: FitRecord | None, where: str, since: str = "the last fit"
) -> Iterator[Finding]:
    """Find training that continues with another batch size at the same learning rate.

    Args:
        now: record of this call; None: unknown.
        earlier: record of an earlier call; None: there is none.
        where: location for the message.
        since: name of the earlier call for the message.
    """
    if earlier is None or now is None or (now.rate, now.optimizer) != (earlier.rate, earlier.optimizer):
        return
    rows, before = now.rows_of_update, earlier.rows_of_update
    if max(rows, before) >= _FACTOR * min(rows, before):
        factor = rows / before
        what = "the global batch" if now.accumulated == earlier.accumulated == 1 else "an update"
        yield Finding(
            "batch-without-rate",
            f"{what} has {counted(rows, 'row')}, {before} in {since}, and the learning rate is {now.rate:g} as before",
            where,
            f"a step now averages over {factor:.3g} times as many rows: with the same rate, each row has another weight in training (Goyal et al., "
            "Accurate, Large Minibatch SGD, 2017)",
            f"Use {now.rate * factor:.3g} with SGD, about {now.rate * factor**0.5:.3g} with Adam, as lockstep.callbacks."
            f"LearningRateScaling(base_batch={before}) does gradually; or use the old batch size",
        )


def _may_change(callbacks: Sequence[Any]) -> bool:
    """Whether a callback may set the learning rate: one of Keras that does so, or a user-defined one."""
    return any(isinstance(one, _CHANGING) or not _is_known(type(one)) for one in callbacks)


def _is_known(kind: type) -> bool:
    is_ours = kind.__module__.startswith("lockstep.") and not kind.__module__.startswith("lockstep.tuning.")
    return is_keras_class(kind) or is_ours


BATCHES = 6  # to read and train on; the first step compiles and is not counted
_MIN_WAIT_SECONDS = 0.002  # that a step waits; less is not reported


def check_cached_order(call: FitCall) -> Iterator[Finding]:
    """Find a cache of ``InputOptions`` that fixes an order which should change in each epoch."""
    cache, torch = call.settings.input_options.cache, sys.modules.get("torch")
    shuffled = (
        "PyDataset" if isinstance(call.x, keras.utils.PyDataset) and call.arguments.get("shuffle", True) else None
    )
    if torch and isinstance(call.x, torch.utils.data.DataLoader):
        shuffled = "DataLoader" if isinstance(call.x.sampler, torch.utils.data.RandomSampler) else None
    if "Shuffle" in _transformations_of(call.x):
        shuffled = "tf.data.Dataset"
    if cache and shuffled:
        yield Finding(
            "cache-freezes-order",
            f"the cache keeps the batches of its {shuffled} in the order of the first epoch, though it shuffles",
            f"InputOptions(cache={str(cache)!r}), {call.at_fit}",
            "from the second epoch on the order is the same",
            "Do not shuffle if that is meant, or leave out the cache",
        )


def _transformations_of(data: Any) -> list[str]:
    """Return the transformations of a ``tf.data.Dataset``, from the last to the first; none for other data, or if it does not tell."""
    if not trainer.is_tf_dataset(data):
        return []
    try:  # tf.data's debug text has one line for each.
        shown = data.__debug_string__()
    except AttributeError:
        return []
    return [line.lstrip("-<_").partition("Dataset")[0] for line in shown.splitlines()]


def check_tf_data_order(call: FitCall) -> Iterator[Finding]:
    """Find ``shuffle``, ``cache`` and ``prefetch`` of a ``tf.data.Dataset`` in an order in which they have no effect."""
    chain = _transformations_of(call.x)
    shuffles = [number for number, name in enumerate(chain) if name == "Shuffle"]
    if "Cache" in chain and shuffles and shuffles[0] > chain.index("Cache"):  # No shuffle after the cache.
        yield Finding(
            "shuffle-before-cache",
            "its tf.data.Dataset caches what it has shuffled",
            call.at_fit,
            "every epoch has the order of the first",
            "Put cache() before shuffle()",
        )
    if ("Cache", "Prefetch") in pairwise(chain):
        yield Finding(
            "prefetch-before-cache",
            "its tf.data.Dataset caches what it has prefetched",
            call.at_fit,
            "nothing is read ahead of the step",
            "Put prefetch() last",
        )


@dataclass(frozen=True)
class ProbedBatches:
    """The first batches of an input.

    Args:
        batches: on the host.
        seconds: median time to read one, without the first; None if there is only one.
        is_prefetched: whether batches are read while steps run.
        name: name of the input.
        batches_per_pass: number of batches of a pass; None if unknown.
    """

    batches: Sequence[Any]
    seconds: float | None
    is_prefetched: bool
    name: str
    batches_per_pass: int | None


@dataclass(frozen=True)
class MeasuredSteps:
    """Time, memory and logs of training steps.

    Args:
        seconds: median time of a step.
        logs: logs of the last one.
        bytes: memory that the program needs on a device; None if the step is several programs.
    """

    seconds: float
    logs: Any
    bytes: int | None


def read_batches(made: KerasInput) -> ProbedBatches:
    """Read the first batches of an input, give them back, and close it.

    The global random state is restored afterwards, except for a generator: it has used the numbers for rows that it will yield.
    """
    before, order, begun = capture_random_state(), made.source.order_state(), time.perf_counter()
    batches, seconds = [], []
    try:
        for batch in islice(made.preview(), BATCHES):
            batches.append(batch)
            seconds.append(time.perf_counter() - begun)
            begun = time.perf_counter()
    finally:
        made.close()
        if made.source.restarts:
            made.source.restore_order(order)
            restore_random_state(before)
    usual = float(np.median(seconds[1:])) if len(seconds) > 1 else None
    return ProbedBatches(batches, usual, made.depth > 0, made.source.name, made.num_batches)


def measure_steps(functions: StepFunctions, probed: ProbedBatches) -> MeasuredSteps:
    """Measure training steps on the first batch, with copies of all variables."""
    steps = max(1, len(probed.batches) - 1)
    with random_state_kept():
        if isinstance(functions.executor, SpmdExecutor) and trainer.is_compiled(functions.model):
            probes = StrategyProbes(functions.model, functions.placement, functions.executor, functions.executor)
            probe = probes.compile(probed.batches[0])
            return MeasuredSteps(*probe.run(steps), probe.memory)
        train, state = functions.make("train"), copies(trainer.training_state(functions.model, probed.batches[0]))
        timed = run_steps(lambda own, batch: train(own, iter([batch])), state, probed.batches[0], steps)
        return MeasuredSteps(*timed, None)


def check_loss_is_finite(steps: MeasuredSteps, where: str) -> Iterator[Finding]:
    """Find a loss that is NaN or Inf after the steps."""
    loss = steps.logs.get("loss") if isinstance(steps.logs, Mapping) else None
    if loss is not None and not np.all(np.isfinite(loss)):
        yield Finding(
            "loss-not-finite",
            f"the loss is {float(np.mean(loss))} after some steps on the first batch",
            where,
            "such a loss makes all weights NaN",
            "Take a lower learning rate, bring the inputs to a range such as 0 … 1, or clip gradients. lockstep.callbacks.NanGuard names the "
            "first step, row and layer",
        )


def waiting_share(probed: ProbedBatches, steps: MeasuredSteps) -> float:
    """Return the share of the time in which the step waits for its batch."""
    if probed.seconds is None or not probed.is_prefetched:
        return 0.0
    return max(0.0, 1 - steps.seconds / probed.seconds)


def is_cached(call: FitCall) -> bool:
    """Return whether batches are read only once, so that the first ones do not tell how fast later ones come."""
    return call.settings.input_options.cache is not None or "Cache" in _transformations_of(call.x)


def check_input_speed(probed: ProbedBatches, steps: MeasuredSteps, where: str) -> list[Finding]:
    """Find an input that is slower than the step."""
    share = waiting_share(probed, steps)
    if share < BOUND or (probed.seconds or 0) - steps.seconds < _MIN_WAIT_SECONDS:
        return []
    what, fix = describe_waiting(share)
    reads, runs = 1000 * (probed.seconds or 0), 1000 * steps.seconds
    why = f"a batch of {probed.name} is read in {reads:.1f} ms, and a step takes {runs:.1f} ms"
    return [Finding("input-bound", what, where, why, fix)]
