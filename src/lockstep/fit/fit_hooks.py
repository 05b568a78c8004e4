"""Hooks around a call of ``fit``: what a hook is, what it is given, and how several are entered.

Hooks around a step are in ``execution/step_hooks``, and the order within a step in ``execution/step_loop``.

Each strategy lists its hooks in one tuple, ``Strategy._fit_hooks``, with the reason for their order. A callback of ``fit`` that has a
method ``around_fit`` is a hook, too (:class:`CallbackHooks`); ``docs/extending.md`` has an example.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import keras

from lockstep._errors import OptionError
from lockstep.data.fit_wrapper import callbacks_in
from lockstep.data.keras_adapter import KerasInput
from lockstep.data.process_group import ProcessGroup
from lockstep.devices.placement import Placement
from lockstep.execution.step_functions import StepFunctions

if TYPE_CHECKING:
    from lockstep.fit.checkpointing.fit_checkpoint import FitCheckpoint

Kind = TypeVar("Kind")


@dataclass
class FitContext:
    """One call of ``fit``, as its hooks see it.

    Args:
        model: a model of a strategy.
        arguments: arguments of Keras's ``fit``, by name; hooks may change them.
        functions: run the steps of the model; step hooks are added with ``functions.hooked``.
        placement: devices and number of replicas.
        process_group: all processes of the job.
        setup: settings that a resumed run must share with the run before, as they determine its numbers.
        log: takes a line for the user.

    Attributes:
        callbacks: those that the user gave to ``fit``, whatever hooks make of ``arguments["callbacks"]``.
        checkpoint: writes the checkpoints of this call; ``CheckpointHook`` sets it, for the hooks after it.
    """

    model: keras.Model
    arguments: dict[str, Any]
    functions: StepFunctions
    placement: Placement
    process_group: ProcessGroup
    setup: dict[str, Any]
    log: Callable[[str], None]
    checkpoint: "FitCheckpoint | None" = None

    def __post_init__(self) -> None:
        self.callbacks = callbacks_in(self.arguments)

    @property
    def data(self) -> KerasInput:
        """The input of the call."""
        data: KerasInput = self.arguments["x"]
        return data


@runtime_checkable
class FitHook(Protocol):
    """Surrounds a call of ``fit``."""

    def around_fit(self, context: FitContext) -> AbstractContextManager[Any]:
        """Return a context manager that is open during the call.

        It is called for all hooks before the first context is entered, so a hook that refuses an argument raises here.
        """


def single_callback(callbacks: Iterable[Any], kind: type[Kind]) -> Kind | None:
    """The one callback of a class; None if there is none.

    Raises:
        OptionError: there are several.
    """
    found = [callback for callback in callbacks if isinstance(callback, kind)]
    if len(found) > 1:
        raise OptionError(f"fit: callbacks: expected one {kind.__name__}, got {len(found)}. Fix: leave the others out.")
    return found[0] if found else None


def entered(hooks: Iterable[FitHook], context: FitContext) -> AbstractContextManager[None]:
    """The contexts of some hooks in one; the first hook is the outermost."""
    return _nested([hook.around_fit(context) for hook in hooks])


@contextmanager
def _nested(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class CallbackHooks:
    """The hooks among the callbacks of ``fit``, in their order there: those that have a method ``around_fit``."""

    def around_fit(self, context: FitContext) -> AbstractContextManager[None]:
        """See :class:`FitHook`."""
        return entered([callback for callback in context.callbacks if isinstance(callback, FitHook)], context)
