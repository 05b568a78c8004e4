"""What a strategy offers to look at a program before it trains: the same bits, and what may be wrong with it."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras

from lockstep._errors import ModelError
from lockstep._keras import trainer
from lockstep.custom_loops.strategy_api import StrategyApi
from lockstep.data.device_placement import Placement
from lockstep.data.fit_entry import InputFactory
from lockstep.doctor.finding import Report
from lockstep.doctor.fit_call import FitCall, RuntimeSettings, caller
from lockstep.doctor.full_check import examine
from lockstep.execution.executors import Executor
from lockstep.execution.train_functions import StepFunctions
from lockstep.strategies.determinism_check import compare_steps, reference_batch, reference_model

__all__ = ["Diagnostics", "examined"]


class Diagnostics(StrategyApi):
    """Base of the strategies: checks of a machine and of a program."""

    _inputs: InputFactory
    scope: Callable[[], contextlib.AbstractContextManager[Any]]
    _functions_of: Callable[[keras.Model], StepFunctions]
    _executor_for: Callable[[Placement, keras.Model], Executor]

    def self_check(
        self, model: keras.Model | None = None, x: Any = None, y: Any = None, sample_weight: Any = None
    ) -> str:
        """Run one training step twice from the same state and compare every bit.

        Under ``deterministic=True`` the first device alone repeats it too, with the same number of replicas. The model, its
        optimizer and the random state stay as they are. Worth a minute on a new machine: there are reports of compiled
        programs whose result differs from call to call (https://github.com/jax-ml/jax/issues/39741).

        Args:
            model: a compiled model of this strategy. By default a small one with a convolution, BatchNormalization
                and Dropout, for which no data are needed.
            x: one batch of inputs, a tree of arrays ``(rows, …)``.
            y: its targets.
            sample_weight: its weights.

        Returns:
            SHA-256 of the logs and of the state after the step, in hex: it may be compared between machines.

        Raises:
            DeterminismError: a variable or a log differs; it is named.
            ModelError: the model belongs to another strategy or is not compiled.

        Example:
            >>> import lockstep
            >>> len(lockstep.MirroredStrategy(replicas=2, deterministic=True).self_check())
            64
        """
        if model is None:
            with self.scope():
                model = reference_model()
            x, y = reference_batch(4 * self.num_replicas_in_sync)
        self._refuse_foreign(model, "self_check")
        placements = [self._placement, self._placement]
        if self._deterministic and len(self._placement.devices) > 1:
            placements.append(self._placement.on_first_device())
        return compare_steps(model, (x, y, sample_weight), [(p, self._executor_for(p, model)) for p in placements])

    def doctor(
        self,
        model: keras.Model,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int | None = None,
        shuffle: bool | str = True,
        class_weight: dict[int, float] | None = None,
        steps_per_epoch: int | None = None,
    ) -> Report:
        """Look for what would make ``model.fit`` with these arguments wrong or slow without an error.

        Loss, labels, order, batch, precision, memory and versions are looked at, and six training steps are measured, on a copy of the
        state: model, optimizer, metrics and random numbers stay as they are, and rows that were read come again. ``docs/doctor.md``
        lists all findings.

        Args:
            model: a compiled model of this strategy.
            x: inputs, of any kind that ``fit`` takes.
            y: their targets.
            sample_weight: their weights.
            batch_size: rows of a global batch, where x is arrays.
            shuffle: as in ``fit``.
            class_weight: as in ``fit``.
            steps_per_epoch: as in ``fit``.

        Returns:
            The findings, and what was looked at; it is true where there are findings, and ``str`` of it is to be read.

        Raises:
            ModelError: the model belongs to another strategy or is not compiled.

        Example:
            >>> import keras, lockstep, numpy as np
            >>> strategy = lockstep.MirroredStrategy(["cpu:0"])
            >>> with strategy.scope():
            ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
            ...     model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            >>> report = strategy.doctor(model, np.ones((64, 4)), np.zeros(64, int))
            >>> [finding.name for finding in report.findings]
            ['softmax-from-logits']
        """
        self._refuse_foreign(model, "doctor")
        options = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "class_weight": class_weight,
            "steps_per_epoch": steps_per_epoch,
        }
        data = (x, y, sample_weight)
        return examined(self, FitCall(model, *data, options, fit_at=caller()))

    def _refuse_foreign(self, model: keras.Model, call: str) -> None:
        if trainer.strategy_of(model) is not self or not model.compiled:
            raise ModelError(
                f"{call}: {model.name!r} is not a compiled model of {self}. Build and compile it in scope()."
            )

    def _runtime_settings(self) -> RuntimeSettings:
        """What the checks of a program need to know."""
        placement = self._placement
        processes = len({device.process_index for device in placement.devices})
        return RuntimeSettings(placement.replicas, placement.devices, processes, self._input_options)

    def _log_once(self, model: keras.Model, sentence: str) -> None:
        """Say something about a model, once."""
        self._functions_of(model).log(sentence)


def examined(strategy: Diagnostics, program: FitCall) -> Report:
    """As :meth:`Diagnostics.doctor`, of a call of ``fit`` that somebody has written down.

    Raises:
        ModelError: the model is not compiled.
    """
    model, placement = program.model, strategy._placement
    executor = strategy._executor_for(placement, model)
    functions = StepFunctions(model, placement, executor, lambda _: None)
    return examine(replace(program, setting=strategy._runtime_settings()), functions, strategy._inputs, os.environ)
