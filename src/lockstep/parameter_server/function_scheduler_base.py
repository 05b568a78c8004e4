"""Custom training loops with servers: what each process of the job does in ``schedule``, ``join``, ``done`` and ``fetch``.

Every process runs the same script, so each comes to the same calls in the same order. ``schedule`` numbers a function. The other calls are
*sync points*: the chief decides there how the script continues, and publishes it to the other processes, which work until then. What was
published is kept for processes that come late. Code is never transferred.
"""

import atexit
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import jax
import keras
import numpy as np

from lockstep._array_encoding import decode_tree, encode_tree
from lockstep._errors import OptionError, ScopeError
from lockstep.data.keras_adapter import KerasInput
from lockstep.data.random_state import capture_random_state, restore_random_state
from lockstep.fit.checkpointing.model_state import named_variables
from lockstep.parameter_server.gradient_step import GradientStep
from lockstep.parameter_server.process_role import ProcessContext

VALUE = "value/"  # Prefix of the names of the arrays of an encoded result.
_PUSHES_PER_FUNCTION = 2**20  # more than any function makes

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Outcome = Future[Mapping[str, np.ndarray]]  # encoded result of a scheduled function, at the chief


def push_number(task: int, push: int) -> int:
    """Return the number of a push of a function; servers apply each number once, even if the function was reassigned."""
    return task * _PUSHES_PER_FUNCTION + push


def state_after_evaluation(data: KerasInput) -> dict[str, Any]:
    """Return where the chief's data and random numbers are after an evaluation, which it makes alone."""
    return {"taken": data.total_taken, "hooks": data.epoch_hooks, "random": capture_random_state()}


def follow_evaluation(data: KerasInput, chiefs: Mapping[str, Any]) -> None:
    """Bring the data and random numbers of another process to where the chief's are: see :func:`state_after_evaluation`."""
    data.indexed_batches().follow(chiefs["hooks"], chiefs["taken"])
    restore_random_state(chiefs["random"])


class TrainingModels(Protocol):
    """What schedulers need of the strategy."""

    def gradient_step(self, model: keras.Model) -> GradientStep:
        """Return the step that computes gradients on the devices of this process."""

    def steps_by(
        self, model: keras.Model, step: Callable[[Any, Any], Any], wait_for_steps: Callable[[], Any] = lambda: None
    ) -> AbstractContextManager[None]:
        """Return a context in which ``step`` makes the model's training steps; ``wait_for_steps`` returns the state that they have left on servers."""

    def model_of_loop(self) -> keras.Model:
        """Return the model whose variables the servers hold while functions are scheduled; raise ModelError if there is none."""

    def _log_once(self, model: keras.Model, sentence: str) -> None:
        """Log a sentence about a model, once."""


class SchedulerBase(ABC):
    """One process in a custom training loop.

    Attributes:
        is_open: whether a function was scheduled since the last call of ``fit``, so that servers run.
        is_in_function: whether this process is running a scheduled function.
    """

    def __init__(self, context: ProcessContext, training: TrainingModels, next_call: Callable[[], int]) -> None:
        self._context, self._training, self._next_call = context, training, next_call
        self.is_open = self.is_in_function = False
        self._trained: tuple[Any, Any] = None, None  # the model and its optimizer, while it is open
        self._scheduled = 0

    def begin(self) -> None:
        """Start the servers for the newest compiled model, unless they run."""
        if self.is_in_function:
            raise ScopeError(
                "A scheduled function cannot schedule, join or fetch. Fix: call them in the loop that schedules it."
            )
        if self._context.max_staleness == 0:
            raise OptionError(
                "ClusterCoordinator: max_staleness=0 is for fit, which divides each batch among the workers. Functions are done one by one. "
                "Fix: give the strategy None, or a number from 1."
            )
        model = self._training.model_of_loop()
        model_before, optimizer_before = self._trained
        if model_before is not model or optimizer_before is not model.optimizer:
            self.end()  # It is another model, or was compiled again.
        if not self.is_open:
            model.optimizer.build(model.trainable_variables)
            self._trained, self._scheduled = (model, model.optimizer), 0
            self._begin(model, self._next_call())
            self.is_open = True
            atexit.register(self._end_at_exit)

    def end(self) -> None:
        """Wait until all scheduled functions are done, and stop the servers."""
        if self.is_open:
            self.is_open, self._trained = False, (None, None)
            atexit.unregister(self._end_at_exit)
            self._end()

    def _end_at_exit(self) -> None:
        try:
            self.end()
        except Exception as error:  # Otherwise the error would not be shown.
            sys.excepthook(type(error), error, error.__traceback__)

    @abstractmethod
    def _begin(self, model: keras.Model, call: int) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    @abstractmethod
    def schedule(self, function: Callable[..., Any], arguments: Arguments) -> Outcome | None:
        """Schedule a function for a worker; return its outcome at the chief, and None on other processes."""

    @abstractmethod
    def join(self) -> None:
        """Wait until all scheduled functions are done."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether all scheduled functions are done at the chief."""

    @abstractmethod
    def fetch(self, outcomes: Sequence[Outcome | None]) -> list[Any]:
        """Return the results of scheduled functions."""

    @abstractmethod
    def evaluate(self, data: KerasInput, proceed: Callable[[], Any]) -> Any:
        """Return the result of the chief's evaluation on ``data``, which is Keras's, after all scheduled functions are done."""

    def newest_values(self, model: keras.Model) -> AbstractContextManager[None]:
        """Return a context in which a model has the servers' newest values, if a scheduled function evaluates it or predicts with it."""
        return nullcontext()

    @abstractmethod
    def pull(self, model: keras.Model) -> list[np.ndarray]:
        """Return the newest values of the trainable variables."""

    @abstractmethod
    def push(self, model: keras.Model, gradients: Sequence[Any]) -> None:
        """Have the servers apply gradients."""


def weights_of(model: keras.Model) -> dict[str, keras.Variable]:
    """Return by name a model's variables, which are equal on all processes after a join."""
    return named_variables(model, "trainable", "non_trainable")


def optimizer_numbers_of(model: keras.Model) -> dict[str, keras.Variable]:
    """Return by name the optimizer's variables that are one number, such as its count of steps; they are equal after a join, too."""
    return {name: variable for name, variable in named_variables(model, "optimizer").items() if not variable.shape}


WEIGHTS_DROPPED = (
    "it has come to the end of a call after the end of a later one, whose weights the chief holds now: its model has the weights "
    "that it had, until the end of that later call"
)


def values_of(variables: Mapping[str, keras.Variable]) -> dict[str, np.ndarray]:
    """Return the values of variables, by name."""
    return {name: np.asarray(variable.value) for name, variable in variables.items()}


def set_values(variables: Mapping[str, keras.Variable], values: Mapping[str, np.ndarray]) -> bool:
    """Give variables the values of the chief's; those without a value stay as they are. Return whether one of them has a value."""
    found = [name for name in variables if name in values]
    for name in found:
        variables[name].assign(values[name])
    return bool(found)


def encode_result(value: Any, source: str) -> dict[str, np.ndarray]:
    """Return the result of a scheduled function as arrays.

    Its structure is JSON in an array of bytes, so it may be as large as arrays may be.

    Args:
        value: a number, a string, None, an array, or dicts, lists and tuples of these.
        source: the function that returned it, for errors.

    Raises:
        OptionError: the value holds something else.

    Example:
        >>> decode_result(encode_result({"loss": 0.5, "rows": (np.arange(2), [True, None])}, "step"))
        {'loss': 0.5, 'rows': (array([0, 1]), [True, None])}
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        text = json.dumps(encode_tree(value, VALUE, arrays, _as_array))
    except TypeError as error:
        raise OptionError(
            f"{source} returned {error}. What a scheduled function returns travels to the chief. Fix: return None, numbers, "
            "strings and arrays, in dicts, lists and tuples."
        ) from None
    return {VALUE: np.frombuffer(text.encode(), np.uint8), **arrays}


def decode_result(arrays: Mapping[str, np.ndarray]) -> Any:
    """Return the value that :func:`encode_result` was given; arrays of JAX and variables become NumPy's arrays."""
    return decode_tree(json.loads(arrays[VALUE].tobytes()), arrays)


def _as_array(leaf: Any) -> Any:
    if isinstance(leaf, (jax.Array, keras.Variable)):
        return np.asarray(leaf.value if isinstance(leaf, keras.Variable) else leaf)
    return leaf
