"""What surrounds a call of ``fit``: with a NanGuard among its callbacks, the training steps are guarded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lockstep._errors import OptionError
from lockstep.data.fit_entry import ProcessGroup
from lockstep.execution.train_functions import StepFunctions
from lockstep.fit.checkpointing.fit_checkpoint import FitCheckpoint
from lockstep.fit.checkpointing.model_state import KINDS, variables_of
from lockstep.fit.nan_guard.nan_guard import NanGuard
from lockstep.fit.nan_guard.step_guard import StepGuard

__all__ = ["guard_among", "guarded"]


def guard_among(callbacks: Any) -> NanGuard | None:
    """The guard among the callbacks of a call of ``fit``.

    Raises:
        OptionError: there are several.
    """
    given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    found = [callback for callback in given if isinstance(callback, NanGuard)]
    if len(found) > 1:
        raise OptionError(f"fit: callbacks: expected one NanGuard, got {len(found)}.")
    return found[0] if found else None


@contextmanager
def guarded(
    guard: NanGuard | None,
    functions: StepFunctions,
    run: FitCheckpoint | None,
    process_group: ProcessGroup,
    announce: Callable[[str], None],
) -> Iterator[None]:
    """Is open during a call of ``fit``.

    Args:
        guard: what was asked for, if anything.
        functions: of the model.
        run: keeps the checkpoints of this call, if anything does.
        process_group: the processes.
        announce: takes a line for the user.

    Raises:
        OptionError: there are no checkpoints to go back to.
    """
    if guard is None:
        yield
        return
    if guard.asked.action == "rollback" and run is None:
        raise OptionError(
            'NanGuard("rollback") goes back to the newest checkpoint of a lockstep.callbacks.BackupAndRestore, and there is none among the '
            "callbacks of fit. Add one, or take another action."
        )
    watch = StepGuard(guard, functions, lambda: _newest(functions, run, process_group), announce)
    guard.watch, functions.watch = watch, watch.step
    if run:
        run.may_save = watch.may_save
    try:
        yield
    finally:
        guard.watch = functions.watch = None


def _newest(
    functions: StepFunctions, run: FitCheckpoint | None, process_group: ProcessGroup
) -> tuple[int, list[list[Any]]] | None:
    found = process_group.broadcast_from_chief(run.newest() if run else None)
    if found is None:
        return None
    step, arrays, _ = found
    kinds = zip(KINDS[:-1], variables_of(functions.model)[:-1], strict=True)  # all but the metrics
    return step, [[arrays[f"{kind}/{n}"] for n in range(len(variables))] for kind, variables in kinds]
