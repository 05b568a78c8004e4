"""Every error that Lockstep raises on purpose, the exit codes of processes, and checks of arguments.

LockstepError
├── BackendError      Keras has another backend or an unknown version                       (RuntimeError)
├── CheckpointError   a checkpoint cannot be written, or none can be read                    (OSError)
├── ClusterError      the workers of a job cannot start, agree or continue                  (RuntimeError)
├── ContractError     a cross-device operation breaks its contract                           (AssertionError)
├── DeterminismError  the same step gave different bits                                     (RuntimeError)
├── DeviceError       a device is unknown, absent, named twice, or it is too late to make it  (ValueError)
├── InputError        an input is not what was expected                                       (ValueError)
├── ModelError        a model or a function cannot run this way                                (ValueError)
├── NonFiniteError    a training step gave NaN or Inf                                  (FloatingPointError)
├── OptionError       an argument is out of its range                                         (ValueError)
└── ScopeError        strategies are mixed, or a scope is used in a place that does not allow it (RuntimeError)

Each message names the component, what failed, what was expected and found, and ends with "Fix: …".
"""

import contextlib
import enum
import math
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, TypeVar

Member = TypeVar("Member", bound=enum.Enum)
Kind = TypeVar("Kind")
Function = TypeVar("Function", bound=Callable[..., Any])

# Exit codes of a worker's process, for launchers and schedulers.
DONE = 0
USER_ERROR = 13  # An exception in the user's program, here or on another worker: a restart would not help.
PEER_LOST = 75  # A worker died, was cut off or preempted: restart the job. EX_TEMPFAIL of sysexits.h.
NO_PROGRESS = 124  # A worker is alive and stuck. The exit code of timeout(1).
INTERRUPTED = 130  # Ctrl-C: 128 and the number of the signal, as in shells.

MAX_SECONDS = 1e9  # 31 years, of an argument
MAX_WAIT_SECONDS = (2**31 - 1) / 1000  # of one wait of the operating system: 25 days
_MAX_DEPTH = 100  # levels of nested values
_MAX_SHOWN = 200  # characters of a value in a message
_MAX_DIGITS = 18  # of numbers in variables and addresses


class LockstepError(Exception):
    """Base class: ``except lockstep.LockstepError`` catches everything that Lockstep raises on purpose."""


class BackendError(LockstepError, RuntimeError):
    """Keras runs on another backend, or its trainer differs from the one that this version of Lockstep knows."""


class CheckpointError(LockstepError, OSError):
    """A checkpoint cannot be written, or cannot be read, or is not what was written.

    Attributes:
        errno: error number of the operating system, as in every OSError; None if the system reported no failure.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class ClusterError(LockstepError, RuntimeError):
    """The workers of a job cannot start, agree or continue.

    Attributes:
        exit_code: exit code of the process if this error is not caught; None: as after any other error.
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ContractError(LockstepError, AssertionError):
    """A cross-device operation breaks its contract: ``lockstep.testing``."""


class DeterminismError(LockstepError, RuntimeError):
    """The same step from the same state gave different bits."""


class DeviceError(LockstepError, ValueError):
    """A device is unknown, absent, named twice, or it is too late to make it."""


class InputError(LockstepError, ValueError):
    """An input is not what was expected, or cannot be split into replicas."""


class ModelError(LockstepError, ValueError):
    """A model or a function cannot run this way."""


class NonFiniteError(LockstepError, FloatingPointError):
    """A training step gave NaN or Inf.

    Attributes:
        epoch: number of the epoch, from 0, as callbacks get it.
        batch: number of the batch in it, from 0.
        replicas: replicas with non-finite numbers; empty if they are not known.
        layer: path of the first layer with non-finite outputs, or None.
        variable: path of the first variable with a non-finite gradient, or None.
        rows: rows of the batch with non-finite numbers, from 0; empty if they are not known.
    """

    def __init__(
        self,
        message: str,
        epoch: int,
        batch: int,
        replicas: tuple[int, ...] = (),
        layer: str | None = None,
        variable: str | None = None,
        rows: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.epoch, self.batch, self.replicas = epoch, batch, replicas
        self.layer, self.variable, self.rows = layer, variable, rows


class OptionError(LockstepError, ValueError):
    """An argument is out of its range."""


class ScopeError(LockstepError, RuntimeError):
    """Strategies are mixed, or a scope is used in a place that does not allow it."""


def outside_of_strategy(callback: object) -> ScopeError:
    """Return the error of a callback whose model belongs to no strategy."""
    return ScopeError(
        f"lockstep.callbacks.{type(callback).__name__} works for models of a strategy. Fix: build, load or compile the model in "
        "lockstep.MirroredStrategy().scope(), call super().fit in a fit of its own class, and pass callbacks=[…] as a list or one "
        "callback, not as a keras.callbacks.CallbackList."
    )


def _is_bool(value: object) -> bool:
    return type(value).__name__ == "bool"  # Also NumPy's, which is not imported here.


def shown(value: object) -> str:
    """Return a value as text for a message: cut if it is long, its type if it has no text of its own."""
    try:
        text = repr(value)
    except Exception:  # Nested too deeply, a number of too many digits, or an error in code of the user's.
        return f"a value of type {type(value).__name__}"
    return shortened(text)


def shortened(text: str) -> str:
    """Return a text for a message, cut if it is long."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _instead(what: str, value: object) -> str:
    return f"Fix: pass {what} instead of this {type(value).__name__}."


def signal_name(number: int) -> str:
    """Return the name of a signal; Python has names for the first and the last of the real-time signals only.

    Example:
        >>> signal_name(9), signal_name(40)
        ('SIGKILL', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_error(error: BaseException) -> str:
    """Return the text of an error of Lockstep, and any other error with its type.

    Example:
        >>> describe_error(OptionError("batch_size: expected 1 or more, got 0.")), describe_error(KeyError("x"))
        ('batch_size: expected 1 or more, got 0.', "KeyError: 'x'")
    """
    return str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {error_text(error)}"


def without_fix(error: BaseException) -> str:
    """Return the text of an error without its "Fix: …" and last full stop, for a message that has its own.

    Example:
        >>> without_fix(OptionError("step: expected 1 or more, got 0. Fix: pass 1 or more."))
        'step: expected 1 or more, got 0'
    """
    return error_text(error).partition(" Fix: ")[0].removesuffix(".")


def error_text(error: BaseException) -> str:
    """Return the text of an exception of any class; a user's class may fail to give one."""
    try:
        return str(error)
    except Exception as failure:
        return f"(no text: its __str__ raises {type(failure).__name__})"


def summary_of(error: BaseException) -> str:
    """Return an exception as in the last line of its traceback, also one of Lockstep with its type.

    Example:
        >>> summary_of(ValueError("no labels"))
        'ValueError: no labels'
    """
    name, text = type(error).__name__, error_text(error)
    return f"{name}: {text}" if text else name


def exit_code_of(error: BaseException, others: int = USER_ERROR) -> int:
    """Return the exit code of a process that ends with an exception; ``others`` is that of exceptions that have no code of their own."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, ClusterError) and error.exit_code is not None:
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else others


def install_extra(extra: str) -> str:
    """Return how to install what an extra of this package needs, for the end of a message; no release is on a package index yet.

    Example:
        >>> install_extra("orbax")
        "pip install '.[orbax]' in a checkout of Lockstep"
    """
    return f"pip install '.[{extra}]' in a checkout of Lockstep"


def is_decimal(text: str) -> bool:
    """Return whether a text is a whole number in decimal digits, not so many that Python refuses to read them."""
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def whole_number(name: str, value: object, minimum: int | None = 1, maximum: int | None = None) -> int:
    """Return ``value`` as an int if it is a whole number from ``minimum`` to ``maximum``, also of NumPy; None: no limit.

    Raises:
        OptionError: it is not; the message names the argument.
    """
    try:
        number = None if _is_bool(value) else index(value)  # type: ignore[arg-type]  # index raises TypeError for other types
    except TypeError:
        number = None
    if number is None or (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
        is_large = number is not None and maximum is not None and number > maximum
        allowed = f" of at most {maximum:,}" if is_large else "" if minimum is None else f" of at least {minimum}"
        fix = f"Fix: pass {maximum:,} or less." if is_large else f"Fix: pass {minimum} or more."
        if number is None:
            fix = _instead("an int", value)
        raise OptionError(f"{name}: expected a whole number{allowed}, got {shown(value)}. {fix}")
    return number


def real_number(name: str, value: object, *, above: float | None = None, what: str = "a number") -> float:
    """Return ``value`` as a float if it is a finite number, also of NumPy: larger than ``above``, or at least 0 if that is None.

    Raises:
        OptionError: it is not; the message names the argument.
    """
    number = math.nan
    if not _is_bool(value) and not isinstance(value, (str, bytes)):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # type: ignore[arg-type]  # float raises TypeError for other types
    if not (0 <= number < math.inf if above is None else above < number < math.inf):
        bound = "0 or more" if above is None else f"more than {above:g}"
        raise OptionError(f"{name}: expected {what}, {bound}, got {shown(value)}. Fix: pass a finite number, {bound}.")
    return number


def seconds(name: str, value: object, *, above: float | None = 0) -> float:
    """Return ``value`` as a float if it is a number of seconds that a wait can last, by default more than 0.

    Raises:
        OptionError: it is not; the message names the argument.
    """
    number = real_number(name, value, above=above, what="a number of seconds")
    if number > MAX_SECONDS:
        raise OptionError(
            f"{name}: expected at most {MAX_SECONDS:,.0f} seconds, got {shown(value)}. Fix: pass a smaller number."
        )
    return number


def flag(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False, also of NumPy.

    Raises:
        OptionError: it is something else, such as a text, which would count as True.
    """
    if not _is_bool(value):
        raise OptionError(f"{name}: expected True or False, got {shown(value)}. {_instead('a bool', value)}")
    return bool(value)


def named_arguments(name: str, value: object) -> dict[str, Any]:
    """Return keyword arguments, None for none, as a dict.

    Raises:
        OptionError: they are no dict with texts as keys.
    """
    given: Any = {} if value is None else value
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise OptionError(
            f"{name}: expected a dict from names to values, got {shown(value)}. Fix: pass a dict whose keys are str."
        )
    return dict(given)


def check_depth(name: str, value: object) -> None:
    """Refuse lists, tuples and dicts that are nested deeper than libraries can follow: JAX counts recursion wrongly after one.

    Raises:
        InputError: they are.
    """
    level: list[Any] = [[value]]
    for _ in range(_MAX_DEPTH):
        inner = [leaf for outer in level for leaf in (outer.values() if isinstance(outer, dict) else outer)]
        level = [leaf for leaf in inner if isinstance(leaf, (list, tuple, dict))]
        if not level:
            return
    raise InputError(
        f"{name}: expected at most {_MAX_DEPTH} levels of lists and dicts, got more. Fix: flatten lists, tuples and dicts in it."
    )


def file_path(name: str, value: object, what: str = "a path") -> Path:
    """Return ``value`` as a path if it is a text or a path.

    Raises:
        OptionError: it is something else, or empty.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise OptionError(
            f"{name}: expected {what}, got {shown(value)}. Fix: pass a path that is not empty, as a str or Path."
        )
    return Path(text)


def truth(name: str, value: object) -> bool:
    """Return whether ``value`` counts as true, as Keras takes it.

    Raises:
        OptionError: it has no truth, such as an array.
    """
    try:
        return bool(value)
    except Exception:
        raise OptionError(f"{name}: expected True or False, got {shown(value)}. {_instead('a bool', value)}") from None


def function(name: str, value: Function, what: str = "a function") -> Function:
    """Return ``value`` if it can be called.

    Raises:
        OptionError: it cannot.
    """
    if not callable(value):
        raise OptionError(f"{name}: expected {what}, got {shown(value)}. {_instead('a callable', value)}")
    return value


def instance_of(kind: type[Kind] | tuple[type[Kind], ...], name: str, value: object, what: str) -> Kind:
    """Return ``value`` if it is of a class.

    Raises:
        OptionError: it is not; the message says ``what`` was expected.
    """
    if not isinstance(value, kind):
        kinds = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise OptionError(f"{name}: expected {what}, got {shown(value)}. {_instead(f'an instance of {kinds}', value)}")
    return value


def sequence_of(name: str, value: object, what: str) -> Sequence[Any]:
    """Return ``value`` if it is a list, a tuple or another sequence, but no text.

    Raises:
        OptionError: it is not; the message says ``what`` was expected.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise OptionError(f"{name}: expected {what}, got {shown(value)}. {_instead('a list or tuple', value)}")
    return value


def one_of(names: Iterable[str], name: str, value: object) -> str:
    """Return ``value`` if it is one of some texts.

    Raises:
        OptionError: it is not; the message lists them.
    """
    allowed = tuple(names)
    if not isinstance(value, str) or value not in allowed:
        raise OptionError(
            f"{name}: expected one of {', '.join(allowed)}, got {shown(value)}. Fix: pass one of these names."
        )
    return value


def member_of(kind: type[Member], name: str, value: object) -> Member:
    """Return a member of an enumeration, given as such or by its name in upper or lower case.

    Raises:
        OptionError: it is neither; the message lists the names.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    return kind[one_of(kind.__members__, name, value)]
