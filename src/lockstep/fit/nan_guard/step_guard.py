"""The steps of one call of ``fit`` that are guarded: what was found is looked at one step late, and answered.

While the host looks at step t, the devices compute step t + 1 already. Where t was bad, the gate has closed, so that t + 1 has changed
nothing either: the state is still that before t. After the answer t + 1 is computed again, with the batch that it had.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep._errors import NonFiniteError
from lockstep.execution.nonfinite_gate import GatedStep, NonFiniteGate
from lockstep.execution.train_functions import StepFunctions
from lockstep.fit.checkpointing.model_state import variables_of
from lockstep.fit.nan_guard.diagnosis import Diagnosis, described_facts, diagnose
from lockstep.fit.nan_guard.nan_guard import NanGuard

__all__ = ["Rollback", "StepGuard"]

_EXPLAINED = 5  # bad steps of a fit that are run again although training goes on: it takes long

Rollback = Callable[[], tuple[int, list[list[Any]]] | None]  # number of steps, and the values of all but the metrics


@dataclass(frozen=True)
class _PendingStep:
    """A step that was started; its batch is kept until it is known to be good."""

    epoch: int
    number: int
    batch: Any
    gate: NonFiniteGate
    names: list[Any]
    flags: Any

    def bad(self) -> list[Any]:
        """What is not finite; waits for the step."""
        flags = np.asarray(self.flags)
        return [name for name, flag in zip(self.names, flags, strict=True) if flag]


@dataclass
class StepGuard:
    """Guards the steps.

    Args:
        guard: what was asked for; counts what is done.
        functions: of the model.
        rollback: gives the newest checkpoint, on every process.
        announce: takes a line for the user.
        epoch: that is running.
        batch: number of the step in it that begins next.
    """

    guard: NanGuard
    functions: StepFunctions
    rollback: Rollback
    announce: Callable[[str], None]
    epoch: int = 0
    batch: int = 0
    _started: _PendingStep | None = None
    _state: Any = None  # what the last step has left
    _in_a_row: int = 0
    _explained: int = 0

    def step(self, gated: GatedStep, state: Any, batch: Any) -> tuple[Any, Any]:
        """Logs and state of a training step, after the one before it was looked at."""
        if self._started is None:
            gated.gate.open()
        logs, new = gated(state, batch)
        answered = self._look(new)
        if answered is not None:
            gated.gate.open()
            logs, new = gated(answered, batch)
        flags = gated.gate.nonfinite
        flags.copy_to_host_async()
        self._state = new
        self._started = _PendingStep(self.epoch, self.batch, batch, gated.gate, gated.gate.names, flags)
        self.batch += 1
        return logs, new

    def settle(self) -> None:
        """Look at the last step too, where none follows at once; a state to go back to is put into the model's variables."""
        state, self._state = self._state, None
        answered = self._look(state)
        if answered is not None and answered is not state:
            for kind, values in zip(variables_of(self.functions.model), answered, strict=True):
                for variable, value in zip(kind, values, strict=True):
                    variable.assign(value)

    def may_save(self) -> bool:
        """Whether a checkpoint may be written now: none counts a step as done that will end the training, or have it go back."""
        if self.guard.asked.action == "stop":
            self.settle()
        return self.guard.asked.action != "rollback" or self._started is None or not self._started.bad()

    def _look(self, state: Any) -> Any:
        """The state to go on from where the step before was bad, else None; ``state`` is that before it, if it was."""
        before, self._started = self._started, None
        bad = before.bad() if before else []
        if before is None or not bad:
            self._in_a_row = 0 if before else self._in_a_row
            return None
        self._in_a_row += 1
        self.functions.listener.on_pause()
        return self._answer(before, bad, state)

    def _answer(self, step: _PendingStep, bad: list[Any], state: Any) -> Any:
        asked, model = self.guard.asked, self.functions.model
        cause = self._cause(step, state)
        text = f"epoch {step.epoch + 1}, step {step.number + 1}: {described_facts(model, bad)} {cause.sentence}"
        found = self.rollback() if asked.action == "rollback" else None
        reason = self._reason_to_stop(found is not None)
        if reason:
            raise NonFiniteError(
                f"NanGuard: {text} The variables are those before this step. {reason}",
                *(step.epoch, step.number, cause.replicas, cause.layer, cause.variable, cause.rows),
            )
        if found is None:
            self.guard.skipped += 1
            self.announce(f"NanGuard: {text} The step is left out, the {_ordinal(self.guard.skipped)} so far.")
            return state
        self.guard.rollbacks += 1
        self.announce(
            f"NanGuard: {text} Training goes back to the checkpoint of step {found[0]} and on with the next batch; this is rollback "
            f"{self.guard.rollbacks} of at most {asked.max_rollbacks}."
        )
        return (*found[1], list(state[-1]))

    def _cause(self, step: _PendingStep, state: Any) -> Diagnosis:
        if self._explained >= _EXPLAINED and not self._reason_to_stop(True):
            return Diagnosis(f"It was not run again to see where that comes from, as the first {_EXPLAINED} were.")
        self._explained += 1
        return diagnose(self.functions, tuple(list(part) for part in state), step.batch)

    def _reason_to_stop(self, has_checkpoint: bool) -> str | None:
        asked = self.guard.asked
        if asked.action == "stop":
            return 'To go on without such steps, say NanGuard("skip") or NanGuard("rollback").'
        if self._in_a_row >= asked.max_in_a_row:
            return f"It is the {_ordinal(self._in_a_row)} such step in a row (max_in_a_row={asked.max_in_a_row})."
        if asked.action == "rollback" and self.guard.rollbacks >= asked.max_rollbacks:
            return f"Training has gone back {self.guard.rollbacks} times already (max_rollbacks={asked.max_rollbacks})."
        if asked.action == "rollback" and not has_checkpoint:
            return "There is no checkpoint to go back to yet: save more often, BackupAndRestore(save_freq=…)."
        return None


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
