"""Every error that Lockstep raises on purpose.

LockstepError
├── BackendError      Keras has another backend or an unknown version                       (RuntimeError)
├── CheckpointError   a checkpoint cannot be written, or none can be read                    (OSError)
├── ClusterError      the workers of a job cannot start, agree or continue                  (RuntimeError)
├── ContractError     a cross-device operation breaks its contract                           (AssertionError)
├── DeterminismError  the same step gave different bits                                     (RuntimeError)
├── DeviceError       a device is unknown, absent, named twice, or it is too late to make it  (ValueError)
├── InputError        a batch cannot be split into replicas                                   (ValueError)
├── ModelError        a model cannot be split into replicas                                   (ValueError)
├── NonFiniteError    a training step gave NaN or Inf                                  (FloatingPointError)
├── OptionError       an argument is out of its range                                         (ValueError)
└── ScopeError        strategies are mixed, or a scope is used in a place that does not allow it (RuntimeError)

Each message names the component, what failed, what was expected and found, and a fix.
"""

import enum
from operator import index
from typing import TypeVar

Member = TypeVar("Member", bound=enum.Enum)


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
    """A batch cannot be split into replicas."""


class ModelError(LockstepError, ValueError):
    """A model cannot be split into replicas."""


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


def whole_number(name: str, value: object, least: int = 1) -> int:
    """Return ``value`` as an int if it is a whole number of at least ``least``, also of NumPy.

    Raises:
        OptionError: it is not; the message names the argument.
    """
    try:
        number = -1 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]  # index raises TypeError for other types
    except TypeError:
        number = -1
    if number < least:
        raise OptionError(f"{name}: expected a whole number of at least {least}, got {value!r}.")
    return number


def member_of(kind: type[Member], name: str, value: object) -> Member:
    """Return a member of an enumeration, given as such or by its name in upper or lower case.

    Raises:
        OptionError: it is neither; the message lists the names.
    """
    if isinstance(value, kind):
        return value
    names = list(kind.__members__)
    if isinstance(value, str) and value.upper() in names:
        return kind[value.upper()]
    raise OptionError(f"{name}: expected one of {', '.join(names)}, got {value!r}.")
