"""Memory and time of training steps outside Keras's loop, compiled for a given batch and run on copies of the model's state.

The model is only read. Memory is the compiler's figure for its program: arguments, results and temporaries. An executor of several
programs has no such figure; for it the one program of the default executor is compiled, and ``is_estimate`` is True.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from lockstep._keras import trainer
from lockstep.devices.placement import Placement
from lockstep.execution.compiled_step import Step, dispatch_lock, padded_state, state_lists, without_aliases
from lockstep.execution.executors import Executor, SpmdExecutor
from lockstep.execution.step_functions import StepFunctions


class StepProbe:
    """A training step compiled for one batch; ``state`` and ``batch`` return the arguments of a run.

    Attributes:
        memory: bytes that the step takes on each device.
    """

    def __init__(
        self, program: jax.stages.Compiled, state: Callable[[], Any], batch: Callable[[], Any], step: Step
    ) -> None:
        self._state, self._batch, self._step = state, batch, step
        analysis: Any = program.memory_analysis()
        self.memory = int(
            analysis.argument_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
            + analysis.temp_size_in_bytes
        )

    def run(self, steps: int) -> tuple[float, Any]:
        """Run steps as :func:`run_steps`."""
        return run_steps(self._step, self._state(), self._batch(), steps)


class StrategyProbes:
    """Compiles the training step of a compiled model that has a strategy, for batches; memory is that of the program of ``default``, which may
    be ``executor``.

    Attributes:
        devices: devices of this process.
        replicas: their number.
        is_estimate: whether memory is that of another program than those that run.
    """

    def __init__(self, model: keras.Model, placement: Placement, executor: Executor, default: SpmdExecutor) -> None:
        self._model, self._placement, self._executor, self._default = model, placement, executor, default
        self._functions = StepFunctions(model, placement, executor, lambda _: None)
        self.devices = tuple(placement.devices[place] for place in placement.local_indices)
        self.replicas, self.is_estimate = placement.replicas, executor is not default

    def compile(self, batch: Any) -> StepProbe:
        """Compile the step for a batch on the host, without running it."""
        with jax.default_device(self._executor.eager_device):  # the device of variables that Keras has not built yet
            state = trainer.training_state(self._model, batch)
        self._default.prepare(batch)
        train_step = self._default.train_step(self._functions.build_step(self._default, "train"))
        program = train_step.compile_for(state, self._placement.abstract_batch(batch))
        if not self.is_estimate:
            shardings = self._default.state_shardings(state)
            return StepProbe(
                program,
                lambda: self._placement.put(padded_state(copies(state), shardings), shardings),
                lambda: self._placement.place(batch),
                program,
            )
        step = self._executor.compile(self._functions.build_step(self._executor, "train"), "train")
        return StepProbe(program, lambda: copies(state), lambda: self._placement.place(batch), step)


class KerasProbes:
    """Compiles the training step of a plain Keras model on JAX's default device."""

    replicas, is_estimate = 1, False

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.devices = (jax.local_devices()[0],)

    def compile(self, batch: Any) -> StepProbe:
        """See :class:`StrategyProbes`."""
        state = trainer.training_state(self._model, batch)
        described = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.typeof(leaf).dtype), batch)
        program = jax.jit(self._model.train_step, donate_argnums=0).lower(state, described).compile()
        return StepProbe(program, lambda: copies(state), lambda: jax.device_put(batch), program)


def run_steps(step: Step, state: Any, batch: Any, steps: int) -> tuple[float, Any]:
    """Return the median time of this many steps in a row on one batch, after one that does not count, and the last logs.

    The state may be donated.
    """
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        with dispatch_lock:
            logs, state = step(state, batch)
        jax.block_until_ready((logs, state))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), logs


def copies(state: Any) -> Any:
    """Return a copy of a state, which a step may donate."""
    return state_lists(jax.tree.map(jnp.copy, without_aliases(state)))
