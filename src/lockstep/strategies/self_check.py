"""Checks that a strategy runs before training: ``self_check`` of determinism, and ``doctor`` for mistakes in a program."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import keras
import numpy as np
from keras import initializers, layers

from lockstep._errors import DeterminismError, ModelError, shown
from lockstep._keras import trainer
from lockstep._keras.graph import layers_of
from lockstep._keras.layer_attributes import attributes_kept
from lockstep._padded_array import padded_shape, without_padding
from lockstep.custom_loops.strategy_api import StrategyApi
from lockstep.data.fit_wrapper import FitWrapper, check_call
from lockstep.data.process_group import ProcessGroup
from lockstep.data.random_state import random_state_kept
from lockstep.data.resumable_iterator import digest_of_batch
from lockstep.data.sources import check_data
from lockstep.devices.names import device_name, listed_devices
from lockstep.devices.placement import Placement, count_rows, gather_on_host, local_values
from lockstep.doctor.base import FitCall, Report, RuntimeSettings, calling_location
from lockstep.doctor.check_lists import examine
from lockstep.execution.executors import Executor, SpmdExecutor
from lockstep.execution.gradient_extraction import GradientPrograms
from lockstep.execution.step_functions import StepFunctions
from lockstep.execution.variable_layout import ModelLayout

Values = dict[str, np.ndarray]


class Diagnostics(StrategyApi):
    """Base of the strategies: checks of the machine and of a program."""

    _fit_wrapper: FitWrapper
    _process_group: ProcessGroup
    _shards_variables: bool
    scope: Callable[[], contextlib.AbstractContextManager[Any]]
    _functions_of: Callable[[keras.Model], StepFunctions]
    _executor_for: Callable[[Placement, keras.Model], Executor]
    layout: Callable[[keras.Model], ModelLayout]

    def self_check(
        self, model: keras.Model | None = None, x: Any = None, y: Any = None, sample_weight: Any = None
    ) -> str:
        """Run one training step twice from the same state and compare every bit.

        With ``deterministic=True`` the step is also repeated on the first device alone, with the same number of replicas. With sharded
        variables, gradients and logs are compared with those of whole variables on a CPU, which may differ by rounding. The model, its
        optimizer and the random state are unchanged. Run it on a new machine: there are reports of compiled programs whose result
        differs from call to call (https://github.com/jax-ml/jax/issues/39741).

        Args:
            model: a compiled model of this strategy. By default a small one with a convolution, BatchNormalization
                and Dropout, which needs no data.
            x: one batch of inputs, a tree of arrays ``(rows, …)``.
            y: its targets.
            sample_weight: its weights.

        Returns:
            SHA-256 of the logs and of the state after the step, in hex; it can be compared between machines.

        Raises:
            DeterminismError: a variable, a gradient or a log differs; the message names it.
            ModelError: the model belongs to another strategy or is not compiled.

        Example:
            >>> import lockstep
            >>> len(lockstep.MirroredStrategy(replicas=2, deterministic=True).self_check())
            64
        """
        if model is None:
            with self._reference_scope():
                model = _reference_model()
            x, y = _reference_batch(4 * self.num_replicas_in_sync)
        self._check_owner(model, "self_check")
        for name, part in {"x": x, "y": y, "sample_weight": sample_weight}.items():
            if part is not None or name == "x":
                check_data(f"self_check: {name}", part, is_arrays=True)
        count_rows((x, y, sample_weight))
        self._process_group.agree("self_check()", {"batch": digest_of_batch((x, y, sample_weight))})
        placements = [self._placement, self._placement]
        if len(self._placement.devices) > 1 and self._deterministic:
            placements.append(self._placement.on_first_device())
        elif len(self._placement.devices) > 1 and self._shards_variables:
            _compare_gradients(self, model, (x, y, sample_weight))
        return _compare_steps(model, (x, y, sample_weight), [(p, self._executor_for(p, model)) for p in placements])

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
        """Find what would make ``model.fit`` with these arguments wrong or slow without an error.

        It checks loss, labels, order, batch, precision, memory and versions, and measures six training steps on a copy of the state:
        model, optimizer, metrics and random state are unchanged, and rows that were read are read again by ``fit``. What is not built,
        such as the optimizer before the first ``fit``, is built; ``fit`` then shuffles the rows in another order. ``docs/doctor.md``
        lists all findings.

        Args:
            model: a compiled model of this strategy.
            x: inputs, of any kind that ``fit`` takes.
            y: their targets.
            sample_weight: their weights.
            batch_size: rows of a global batch, if x is arrays.
            shuffle: as in ``fit``.
            class_weight: as in ``fit``.
            steps_per_epoch: as in ``fit``.

        Returns:
            The findings, and what was checked; true if there are findings; ``str`` makes a readable text.

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
        self._check_owner(model, "doctor")
        options = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "class_weight": class_weight,
            "steps_per_epoch": steps_per_epoch,
        }
        data = (x, y, sample_weight)
        given = {"x": x, "y": y, "sample_weight": sample_weight} | options
        check_call("doctor", given)
        self._process_group.agree("doctor()", {name: given[name] for name in ("batch_size", "steps_per_epoch")})
        return examine_fit(self, FitCall(model, *data, options, fit_at=calling_location()))

    def _reference_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Open the scope for the model of :meth:`self_check`, which has nothing to do with those of the user."""
        return self.scope()

    def _check_owner(self, model: keras.Model, call: str) -> None:
        what = "a compiled model of this strategy"
        if not isinstance(model, keras.Model):
            raise ModelError(
                f"{call}: model: expected {what}, got {shown(model)}. Fix: pass a keras.Model that was compiled in scope()."
            )
        if trainer.strategy_of(model) is not self or not model.compiled:
            raise ModelError(
                f"{call}: {model.name!r} is not a compiled model of {self}. Fix: build and compile it in scope()."
            )

    def _runtime_settings(self) -> RuntimeSettings:
        """Return the settings that the doctor's checks need."""
        placement = self._placement
        processes = len({device.process_index for device in placement.devices})
        return RuntimeSettings(
            placement.replicas, placement.devices, processes, self._input_options, layout=self.layout
        )

    def _log_once(self, model: keras.Model, sentence: str) -> None:
        """Log a sentence about a model, once."""
        self._functions_of(model).log(sentence)


def examine_fit(strategy: Diagnostics, call: FitCall) -> Report:
    """Run :meth:`Diagnostics.doctor` for a recorded call of ``fit``.

    Raises:
        ModelError: the model is not compiled.
    """
    model, placement = call.model, strategy._placement
    executor = strategy._executor_for(placement, model)
    functions = StepFunctions(model, placement, executor, lambda _: None)
    return examine(replace(call, settings=strategy._runtime_settings()), functions, strategy._fit_wrapper, os.environ)


def _compare_gradients(strategy: Diagnostics, model: keras.Model, batch: Any) -> None:
    """Compare the gradients and the logs of a step on shards with those on one CPU.

    Raises:
        DeterminismError: they differ by more than rounding.
    """
    state, outcomes = trainer.training_state(model, batch), []
    for placement in (strategy._placement, strategy._placement.on_one_cpu()):
        executor = strategy._executor_for(placement, model)
        if not isinstance(executor, SpmdExecutor):
            raise TypeError(f"{type(executor).__name__} does not shard variables.")
        executor.prepare(batch)
        step = StepFunctions(model, placement, executor, lambda _: None).build_step(executor, "train")
        whole, placed = without_padding(local_values(state) if placement.is_local else state), placement.place(batch)
        shardings, is_even = _even_shardings(executor, whole)
        programs = GradientPrograms(step, model, placement, donated=False, is_replicated=not is_even)
        own = placement.put(whole, shardings)
        with attributes_kept(model), random_state_kept():
            gradients, logs, _ = programs.program_for(own, placed)(own, placed)
        named = zip(model.trainable_variables, gradients, strict=True)
        found = {f"gradient of {variable.path!r}": gather_on_host(gradient) for variable, gradient in named}
        outcomes.append(found | {name: gather_on_host(value) for name, value in _named_logs(logs).items()})
    ours, expected = outcomes
    # Accelerators multiply matrices in fewer bits, and so do layers of mixed precision.
    is_half = any(layer.compute_dtype in ("float16", "bfloat16") for layer in layers_of(model))
    is_exact = strategy._placement.platform == "cpu" and not is_half
    relative = 1e-3 if is_exact else 5e-2
    sizes = {name: float(np.abs(value).max(initial=0)) for name, value in expected.items()}
    for name, value in expected.items():
        difference = float(np.abs(ours[name] - value).max(initial=0))
        if not difference <= relative * (sizes[name] + 1e-3 * max(sizes.values())):
            raise DeterminismError(
                f"self_check: with sharded variables, {name} differs from that of whole variables on a CPU by {difference:.3g}, and its "
                f"largest value is {sizes[name]:.3g}. Fix: train with whole variables, under MirroredStrategy, and report this program."
            )


def _compare_steps(model: keras.Model, batch: Any, variants: Sequence[tuple[Placement, Executor]]) -> str:
    """Run one training step with each of the placements and executors, from the model's current state.

    Returns:
        SHA-256 of all results.

    Raises:
        DeterminismError: two results differ.
    """
    state = trainer.training_state(model, batch)
    outcomes = []
    for placement, executor in variants:
        step = StepFunctions(model, placement, executor, lambda _: None).make("train")
        own = local_values(state) if placement.is_local else state
        with attributes_kept(model), random_state_kept():
            logs, new = step(jax.tree.map(jax.numpy.copy, own), iter([batch]))
        outcomes.append(_named(model, logs, new))
    for (placement, _), outcome in zip(variants[1:], outcomes[1:], strict=True):
        _compare(outcomes[0], outcome, [device_name(device) for device in placement.devices])
    digest = hashlib.sha256()
    for value in outcomes[0].values():
        digest.update(value.tobytes())
    return digest.hexdigest()


def _even_shardings(executor: SpmdExecutor, state: Any) -> tuple[Any, bool]:
    """Return the shardings of a state, replicated where shards would need padding, and whether none would."""
    shardings = jax.tree.broadcast(executor.state_shardings(state), state)
    is_even = jax.tree.map(lambda value, own: padded_shape(value.shape, own) == value.shape, state, shardings)
    even = jax.tree.map(lambda own, even: own if even else executor.placement.replicated, shardings, is_even)
    return even, all(jax.tree.leaves(is_even))


def _named_logs(logs: dict[str, Any]) -> dict[str, Any]:
    return {f"log {name!r}": value for name, value in keras.tree.flatten_with_path(logs)}


def _named(model: keras.Model, logs: dict[str, Any], state: Sequence[Sequence[Any]]) -> Values:
    found = {name: np.asarray(value) for name, value in _named_logs(logs).items()}
    for variables, values in zip(trainer.variables_of(model), state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            found[f"variable {variable.path!r} ({len(found)})"] = gather_on_host(value)
    return found


def _compare(expected: Values, found: Values, devices: list[str]) -> None:
    for name, value in expected.items():
        different = np.frombuffer(value.tobytes(), "uint8") != np.frombuffer(found[name].tobytes(), "uint8")
        if different.any():
            raise DeterminismError(
                f"self_check: a step repeated from the same state on {listed_devices(devices)} gave a different {name}: "
                f"{different.sum()} of {different.size} bytes differ. The compiled program depends on more than its inputs. Fix: try "
                "another version of jaxlib; on GPUs, XLA_FLAGS=--xla_gpu_deterministic_ops=true in the environment, or deterministic=True in a "
                "program that has not started JAX; on CPUs, lockstep.config.set_deterministic(cpu_threads=1) on one device."
            )


def _reference_model() -> keras.Model:
    """Return a small net with operations whose bits tend to differ: convolution, statistics, randomness, reductions.

    Its seeds and names are fixed, so that making it does not change the process's random state and name counters.
    """

    def start(seed: int) -> initializers.Initializer:
        return initializers.GlorotUniform(seed=seed)

    model = keras.Sequential(
        [
            layers.Input((8, 8, 3), name="self_check_input"),
            layers.Conv2D(8, 3, kernel_initializer=start(0), name="self_check_convolution"),
            layers.BatchNormalization(name="self_check_normalization"),
            layers.Flatten(name="self_check_flatten"),
            layers.Dropout(0.2, seed=1, name="self_check_dropout"),
            layers.Dense(10, kernel_initializer=start(2), name="self_check_dense"),
        ],
        name="self_check",
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def _reference_batch(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images ``(rows, 8, 8, 3)`` and classes ``(rows,)`` for :func:`_reference_model`."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 8, 8, 3)).astype("float32"), rng.integers(0, 10, rows)
