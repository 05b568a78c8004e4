"""The loop over the steps of one call: one step after the other with hooks, or ``steps_per_execution`` of them as one scan; failed steps.

Keras calls the function once a step, or once for ``steps_per_execution`` steps; callbacks run between two calls. The order within a
step: ``on_fetch``, the next batch, ``on_step_start``, the step or its replacement, ``on_step_end``. On accelerators, and without hooks, the
steps of one call are one compiled loop (:func:`scan_steps`).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras

from lockstep._keras import trainer
from lockstep._keras.variable_placement import stored_value
from lockstep.data.keras_adapter import next_batch
from lockstep.execution.compiled_step import Step, are_lost, start_lock, state_lists
from lockstep.execution.interrupts import InterruptGuard
from lockstep.execution.nonfinite_gate import GatedStep
from lockstep.execution.step_hooks import StepHook

STATE = {
    "train": trainer.STATE_KINDS,
    "test": ("trainable_variables", "non_trainable_variables", "metrics_variables"),
    "predict": ("trainable_variables", "non_trainable_variables"),
}

MultiStep = Callable[[Any, tuple[Any, ...]], tuple[Any, Any]]  # (state, data of each step) -> (last logs, state)

# JAX caches traces of compiled functions, and these may ask for the strategy or the replica. This context is part of the cache's key:
# the number of replicas in a scope, the trace of one replica in ``run``, and None in a step, as without a strategy.
trace_context = jax.make_user_context(None)


@dataclass(frozen=True)
class StepPrograms:
    """The programs of the steps of one kind.

    Args:
        step: the step.
        gated: returns the training step with a gate, and compiles it when it is first called.
        multi_step: returns a program for several training steps at once, and compiles it when it is first called; None: there is none.
    """

    step: Step
    gated: Callable[[], GatedStep]
    multi_step: Callable[[], MultiStep | None]


class StepLoop:
    """Runs the steps of one kind ("train", "test" or "predict"), as Keras calls it: ``(state, iterator) -> (logs or outputs, state)``."""

    def __init__(
        self,
        model: keras.Model,
        kind: str,
        programs: StepPrograms,
        hooks: Callable[[], tuple[StepHook, ...]],
        devices: Sequence[jax.Device],
        interrupts: InterruptGuard,
    ) -> None:
        self._model, self._kind, self._programs, self._hooks, self._devices = model, kind, programs, hooks, devices
        self._interrupts = interrupts
        self._last: Any = None  # result of the last step

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Run the steps of one call; return the logs of the last one, or the outputs of all, and the new state."""
        if self._kind == "train":
            logs = first_result(hook.replayed_logs for hook in reversed(self._hooks()))
            if logs is not None:
                return logs, state
        batches, results = _Batches(iterator), []
        try:
            if (multi_step := self._multi_step()) and (
                together := batches.take_alike(self._model.steps_per_execution, self._last)
            ):
                with self._interrupts.running(state), trace_context(None):
                    self._last, state = multi_step(state, together)
                return self._last, self._handed_over(state)
            for position in range(self._model.steps_per_execution):
                for hook in self._hooks():
                    hook.on_fetch()
                try:
                    batch = batches.take(self._last)
                except StopIteration:
                    if position:
                        break  # The input ends within the steps of one call.
                    raise
                for hook in self._hooks():
                    hook.on_step_start(self._model, self._kind, batch)
                with self._interrupts.running(state), trace_context(None):
                    self._last, state = (self._replaced_step() or self._programs.step)(state, batch)
                for hook in self._hooks():
                    hook.on_step_end(self._model, self._kind, state, self._last)
                results.append(self._last)
        except BaseException as error:
            values = state_lists(state)
            trainer.write_back_values(self._model, STATE[self._kind], values)
            if not isinstance(error, StopIteration):
                _explain(error, values)
            raise
        return (self._concatenated(results) if self._kind == "predict" else self._last), self._handed_over(state)

    def _handed_over(self, state: Any) -> Any:
        """Return the new state; the model also has it already if the call is interrupted before Keras takes it."""
        if self._interrupts.is_installed:
            trainer.set_state(self._model, STATE[self._kind], state)
        return state

    def raise_failure(self) -> None:
        """Wait for the last step, and raise its error if it failed on its device. Keras drops such an error: it makes numbers of logs if it can."""
        try:
            jax.block_until_ready(self._last)
        except Exception as error:
            _explain(error, [stored_value(variable) for variable in self._model.variables])
            raise

    def forget_last(self) -> None:
        """Forget the result of the last step: the next call does not wait for it."""
        self._last = None

    def _concatenated(self, results: list[Any]) -> Any:
        """Return the outputs of several steps as those of one; with several devices these are programs with collectives, too."""
        if len(results) == 1:
            return results[0]
        with start_lock(self._devices):
            return jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)

    def _multi_step(self) -> MultiStep | None:
        """Return the program for all training steps of a call, if there is one and no hook has to see each step."""
        if self._kind == "train" and self._model.steps_per_execution > 1 and not self._hooks():
            return self._programs.multi_step()
        return None

    def _replaced_step(self) -> Step | None:
        if self._kind != "train":
            return None
        gated = self._programs.gated
        return first_result(functools.partial(hook.replaced_step, gated) for hook in reversed(self._hooks()))


def scan_steps(step: Step) -> MultiStep:
    """Return a training step as a function of several batches of equal shapes, with one ``lax.scan``; it returns the logs of the last."""

    def steps(state: Any, batches: Any) -> tuple[Any, Any]:
        def one(state: Any, batch: Any) -> tuple[Any, Any]:
            logs, new = step(state, batch)
            return jax.tree.map(lambda old, value: jnp.asarray(value, old.dtype), state, state_lists(new)), logs

        first = jax.tree.map(lambda value: jnp.asarray(value, value.dtype), state_lists(state))  # No weak types.
        new, logs = jax.lax.scan(one, first, jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches))
        return jax.tree.map(lambda leaf: leaf[-1], logs), new

    return steps


class _Batches:
    """The batches of one call of a function, from the iterator that Keras passed to it."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._ahead: list[Any] = []
        self._error: BaseException | None = None

    def take(self, after: Any) -> Any:
        """Return the next batch; ``after`` is the result of the last step."""
        if self._ahead:
            return self._ahead.pop(0)
        if self._error is not None:
            raise self._error
        return next_batch(self._iterator, after)

    def take_alike(self, count: int, after: Any) -> tuple[Any, ...] | None:
        """Return the next ``count`` batches if all have the same shapes; else None, and ``take`` returns them, then the error if there was one."""
        try:
            while len(self._ahead) < count:
                self._ahead.append(next_batch(self._iterator, after))
        except BaseException as error:  # It is raised after the steps before it.
            self._error = error
            return None
        if len({_kind(batch) for batch in self._ahead}) > 1:
            return None
        found, self._ahead = tuple(self._ahead), []
        return found


def _kind(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, *map(jax.typeof, leaves)


def first_result(calls: Iterable[Callable[[], Any]]) -> Any:
    """Return the first result that is not None. A StopIteration of a call propagates, as it would not from a generator."""
    for call in calls:
        found = call()
        if found is not None:
            return found
    return None


def _explain(error: BaseException, values: Any) -> None:
    """Add to the error of a step what to do, if its device had no memory, or if it took the values of the model's variables with it."""
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        error.add_note(
            "lockstep: a device ran out of memory in this step. Fix: a smaller batch_size, which lockstep.batch_size_finder finds; on "
            'several devices also shard="variables", with recompute="blocks".'
        )
    if isinstance(error, Exception) and are_lost(values):
        error.add_note(
            "lockstep: the step had begun, so the values of the model's variables are lost. Fix: build the model again and load a "
            "checkpoint, which lockstep.callbacks.BackupAndRestore writes and restores."
        )
