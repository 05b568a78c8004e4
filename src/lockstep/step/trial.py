"""A few training steps on a copy of a model's state, to be measured: the model, its variables and random numbers stay as they are."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lockstep.step.functions import StepFunctions
from lockstep.step.plans import FastPlan
from lockstep.step.states import dispatch_lock, without_aliases

__all__ = ["Trial", "try_steps"]


@dataclass(frozen=True)
class Trial:
    """What was measured.

    Args:
        seconds: of the usual step; None where there was one batch only.
        bytes: that the program needs on a device: arguments, results and what it keeps between; None where JAX does not say.
    """

    seconds: float | None
    bytes: int | None


def try_steps(
    functions: StepFunctions, state: Any, batches: Sequence[Any], clock: Callable[[], float] = time.perf_counter
) -> Trial:
    """Run a training step for each batch, one after the other.

    Args:
        functions: of the model.
        state: the values of its variables, which are copied.
        batches: on the host, with equally many rows each.
        clock: gives seconds.
    """
    copied = jax.tree.map(jax.numpy.copy, tuple(state))
    plan, placement = functions.plan, functions.placement
    if not isinstance(plan, FastPlan) or functions.model.run_eagerly or not functions.model.jit_compile:
        run = functions.make("train")
        return Trial(_timed(lambda state, batch: run(state, iter([batch])), copied, batches, clock)[0], None)
    training = plan.training(functions.step_by(plan, "train"), donated=True)

    def step(state: Any, batch: Any) -> Any:
        with dispatch_lock:
            return training(state, placement.hand_over(batch))

    first = tuple(list(part) for part in placement.put(without_aliases(copied), plan.places(copied)))
    seconds, last = _timed(step, first, batches, clock)
    return Trial(seconds, _bytes(training.memory(last, placement.hand_over(batches[-1]))))


def _timed(step: Any, state: Any, batches: Sequence[Any], clock: Callable[[], float]) -> tuple[float | None, Any]:
    """Seconds of the usual step, without the first, which is compiled; and the last state."""
    seconds = []
    for batch in batches:
        begun = clock()
        logs, state = step(state, batch)
        jax.block_until_ready((logs, state))
        seconds.append(clock() - begun)
    return (float(np.median(seconds[1:])) if len(seconds) > 1 else None), state


def _bytes(memory: Any) -> int | None:
    if memory is None:
        return None
    kinds = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    return int(sum(kinds) - memory.alias_size_in_bytes)
