"""A loop of one's own over the processes of a job with servers, as each of them runs it: what is the same for all.

Every process runs the same script, so each comes to the same ``schedule``, ``join``, ``done`` and ``fetch``, in the same order.
``schedule`` numbers a function; the others are *points*: there the chief decides how the script goes on, and tells all others, who
work until then. What is told at a point is kept for those who come late. No code travels.
"""

import atexit
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import keras
import numpy as np

from lockstep._errors import OptionError, ScopeError
from lockstep.fit.checkpointing.model_state import variables_of
from lockstep.parameter_server.gradient_step import GradientStep
from lockstep.parameter_server.process_context import ProcessContext

__all__ = ["Arguments", "Outcome", "SchedulerBase", "TrainingModels", "take_over_weights", "weights_of"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Outcome = Future[Mapping[str, np.ndarray]]  # of a scheduled function, at the chief, as it travels


class TrainingModels(Protocol):
    """What the strategy knows of models."""

    def gradient_step(self, model: keras.Model) -> GradientStep:
        """Computes gradients on the devices of this process."""

    def steps_by(
        self, model: keras.Model, step: Callable[[Any, Any], Any], settle: Callable[[], Any] = lambda: None
    ) -> Any:
        """A context in which this makes the training steps of the model; ``settle`` gives the state that they have left elsewhere."""

    def model_of_loop(self) -> keras.Model:
        """The model whose variables the servers hold while functions are scheduled; ModelError where there is none."""


class SchedulerBase(ABC):
    """One process in loops of one's own.

    Args:
        member: this process.
        training: the strategy.
        next_call: gives the number of the next call.

    Attributes:
        is_open: whether something was scheduled since the last call of ``fit``, so that servers serve.
        is_in_function: whether a scheduled function runs in this process just now.
    """

    def __init__(self, member: ProcessContext, training: TrainingModels, next_call: Callable[[], int]) -> None:
        self._member, self._training, self._next_call = member, training, next_call
        self.is_open = self.is_in_function = False
        self._trained: tuple[Any, Any] = None, None  # the model and its optimizer, while it is open
        self._scheduled = 0

    def begin(self) -> None:
        """Be ready for functions: the model is known, and servers serve its variables."""
        if self.is_in_function:
            raise ScopeError("A scheduled function cannot schedule, join or fetch: that is for the loop around it.")
        if self._member.max_staleness == 0:
            raise OptionError(
                "ClusterCoordinator: max_staleness=0 is for fit, which divides each batch among the workers. Functions are done one by one: "
                "give the strategy None, or a number from 1."
            )
        model = self._training.model_of_loop()
        model_before, optimizer_before = self._trained
        if model_before is not model or optimizer_before is not model.optimizer:
            self.end()  # It is another one, or was compiled again.
        if not self.is_open:
            model.optimizer.build(model.trainable_variables)
            self._trained, self._scheduled = (model, model.optimizer), 0
            self._begin(model, self._next_call())
            self.is_open = True
            atexit.register(self._end_at_exit)

    def end(self) -> None:
        """Everything that was scheduled is done, and nothing more will be, until it begins anew."""
        if self.is_open:
            self.is_open, self._trained = False, (None, None)
            atexit.unregister(self._end_at_exit)
            self._end()

    def _end_at_exit(self) -> None:
        try:
            self.end()
        except Exception as error:  # Else the process would end as if all was well.
            sys.excepthook(type(error), error, error.__traceback__)

    @abstractmethod
    def _begin(self, model: keras.Model, call: int) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    @abstractmethod
    def schedule(self, function: Callable[..., Any], arguments: Arguments) -> Outcome | None:
        """Have a function done by a worker; gives its outcome at the chief, and None elsewhere."""

    @abstractmethod
    def join(self) -> None:
        """Until everything that was scheduled is done."""

    @abstractmethod
    def done(self) -> bool:
        """Whether everything that was scheduled is done at the chief."""

    @abstractmethod
    def fetch(self, outcomes: Sequence[Outcome | None]) -> list[Any]:
        """What scheduled functions have returned."""

    @abstractmethod
    def evaluated(self, proceed: Callable[[], Any]) -> Any:
        """What the chief's evaluation gives, which is Keras's."""

    @abstractmethod
    def pull(self, model: keras.Model) -> list[np.ndarray]:
        """The newest values of the trainable variables."""

    @abstractmethod
    def push(self, model: keras.Model, gradients: Sequence[Any]) -> None:
        """Have servers apply gradients."""


def weights_of(model: keras.Model) -> dict[str, np.ndarray]:
    """What all processes have alike after a join, by number."""
    trainable, others, *_ = variables_of(model)
    return {str(number): np.asarray(variable.value) for number, variable in enumerate([*trainable, *others])}


def take_over_weights(model: keras.Model, weights: Mapping[str, np.ndarray]) -> None:
    """Give a model the values of :func:`weights_of`; none where there are none."""
    trainable, others, *_ = variables_of(model)
    for number, variable in enumerate([*trainable, *others]):
        if str(number) in weights:
            variable.assign(weights[str(number)])
