"""One setting is measured, in the process that has its devices."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax
import keras

from lockstep._keras import trainer
from lockstep.data.wait_meter import WaitMeter, meters_observed
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.tools.run_until_fit import FirstFit
from lockstep.tools.scaling.block_timer import BlockTimer, clocked
from lockstep.tools.scaling.component_timing import (
    all_reduce_seconds,
    bare_seconds,
    formula_of,
    greatest_memory,
    links_of,
)
from lockstep.tools.scaling.results import Budget, ScalingSetting, SettingResult
from lockstep.tools.scaling.training_task import TrainingTask, work_of

__all__ = ["is_higher_better", "measure"]

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
    with meters_observed() as meters:
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
    owner = trainer.adopted_by(model)
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
        placed = strategy._placement.hand_over(work.first)
    else:
        placed = jax.device_put(work.first) if is_compiled else work.first
    return bare_seconds(model, model.train_function, placed)


def _notes_of(clock: BlockTimer, budget: Budget) -> list[str]:
    cut = f"stopped after {clock.steps:,} steps, as the limit of {budget.limit:g} s would have been passed"
    few = f"only {len(clock.seconds)} blocks of steps could be timed, so the spread says little"
    return [*[cut] * clock.is_cut, *[few] * (len(clock.seconds) < 3)]
