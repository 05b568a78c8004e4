"""Training steps outside of Keras's loop: compiled for a batch before one is run, and run from copies of the model's state.

The model is only read. Memory is what the compiler says that its program takes: arguments, results and temporaries. A plan of several
programs has no such figure; for it the one program of the default plan is compiled, and the result says that this is an estimate.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import keras

from lockstep._keras import trainer
from lockstep.data.device_placement import Placement
from lockstep.execution.executors import Executor, SpmdExecutor
from lockstep.execution.train_functions import StepFunctions, StepListener
from lockstep.execution.train_state import dispatch_lock, without_aliases

__all__ = ["KerasProbes", "StepProbe", "StepProbes", "StrategyProbes", "copies", "usual_seconds"]

Step = Callable[[Any, Any], tuple[Any, Any]]


class StepProbe(Protocol):
    """One batch: its memory is known, and it can be run."""

    memory: int  # bytes that the step takes on each device

    def seconds(self, steps: int) -> float:
        """Median time of so many training steps in a row, after one that does not count."""


class StepProbes(Protocol):
    """The training step of a model.

    Attributes:
        devices: of this process.
        replicas: their number.
        is_estimate: whether memory is that of another program than those that run.
    """

    devices: tuple[jax.Device, ...]
    replicas: int
    is_estimate: bool

    def of(self, batch: Any) -> StepProbe:
        """Compile the step for a batch on the host, and do not run it."""


class StrategyProbes:
    """Of a model of a strategy.

    Args:
        model: compiled.
        placement: devices and replicas.
        plan: how its steps are run.
        default: the plan whose one program says how much memory is needed; it may be ``plan``.
    """

    def __init__(self, model: keras.Model, placement: Placement, plan: Executor, default: SpmdExecutor) -> None:
        self._model, self._placement, self._plan, self._default = model, placement, plan, default
        self._functions = StepFunctions(model, placement, plan, lambda _: None, StepListener())
        self.devices = tuple(placement.devices[place] for place in placement.own_places)
        self.replicas, self.is_estimate = placement.replicas, plan is not default

    def of(self, batch: Any) -> StepProbe:
        """See :class:`StepProbes`."""
        with jax.default_device(self._plan.uncompiled_on):  # where Keras makes variables that are not made yet
            state = trainer.training_state(self._model, batch)
        functions = StepFunctions(self._model, self._placement, self._default, lambda _: None, StepListener())
        training = self._default.training(functions.step_by(self._default, "train"))
        program = training.ahead(state, self._placement.described(batch))
        if not self.is_estimate:
            places = program.input_shardings[0][0]
            return _CompiledProbe(
                program,
                lambda: self._placement.put(copies(state), places),
                lambda: self._placement.place(batch),
                program,
            )
        step = self._plan.compile(self._functions.step_by(self._plan, "train"), "train")
        return _CompiledProbe(program, lambda: copies(state), lambda: self._placement.place(batch), step)


class KerasProbes:
    """Of a model in plain Keras, on JAX's default device."""

    replicas, is_estimate = 1, False

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.devices = (jax.local_devices()[0],)

    def of(self, batch: Any) -> StepProbe:
        """See :class:`StepProbes`."""
        state = trainer.training_state(self._model, batch)
        described = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.typeof(leaf).dtype), batch)
        program = jax.jit(self._model.train_step, donate_argnums=0).lower(state, described).compile()
        return _CompiledProbe(program, lambda: copies(state), lambda: jax.device_put(batch), program)


class _CompiledProbe:
    """See :class:`StepProbe`; ``state`` and ``batch`` make what the step is run on."""

    def __init__(
        self, program: jax.stages.Compiled, state: Callable[[], Any], batch: Callable[[], Any], step: Step
    ) -> None:
        self._state, self._batch, self._step = state, batch, step
        found: Any = program.memory_analysis()
        self.memory = int(
            found.argument_size_in_bytes
            + found.output_size_in_bytes
            - found.alias_size_in_bytes
            + found.temp_size_in_bytes
        )

    def seconds(self, steps: int) -> float:
        """See :class:`StepProbe`."""
        return usual_seconds(self._step, self._state(), self._batch(), steps)


def usual_seconds(step: Step, state: Any, batch: Any, steps: int) -> float:
    """Median time of so many steps in a row on one batch, after one that does not count; the state may be used up."""
    times = []
    for _ in range(steps + 1):
        begun = time.perf_counter()
        with dispatch_lock:
            logs, state = step(state, batch)
        jax.block_until_ready((logs, state))
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def copies(state: Any) -> Any:
    """What a step may use up."""
    return tuple(list(part) for part in jax.tree.map(jnp.copy, without_aliases(state)))
