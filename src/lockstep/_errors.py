"""Every error that Lockstep raises on purpose.

LockstepError
├── BackendError      Keras is not what we need: another backend, an unknown version        (RuntimeError)
├── CheckpointError   a checkpoint cannot be written, or none can be read                    (OSError)
├── ClusterError      the workers of a job cannot start, agree or go on together          (RuntimeError)
├── ContractError     a cross-device operation does not do what it promises                  (AssertionError)
├── DeterminismError  the same step gave different bits                                     (RuntimeError)
├── DeviceError       a device is unknown, absent, named twice, or it is too late to make it  (ValueError)
├── InputError        a batch cannot be split into replicas                                   (ValueError)
├── ModelError        a model cannot be split into replicas                                   (ValueError)
├── NonFiniteError    a training step gave NaN or Inf                                  (FloatingPointError)
├── OptionError       an argument is out of its range                                         (ValueError)
└── ScopeError        strategies are mixed, or a scope is used where it cannot work           (RuntimeError)

Each message says what happened, where, what was expected, what was found and what to do.
"""

import enum
from operator import index
from typing import TypeVar

Member = TypeVar("Member", bound=enum.Enum)


class LockstepError(Exception):
    """Base class: ``except lockstep.LockstepError`` catches everything that Lockstep raises on purpose."""


class BackendError(LockstepError, RuntimeError):
    """Keras runs on another backend, or has a shape that this version of Lockstep does not know."""


class CheckpointError(LockstepError, OSError):
    """A checkpoint cannot be written, or cannot be read, or is not what was written.

    Attributes:
        errno: what the operating system said, as in every OSError; None where it is no failure of it.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class ClusterError(LockstepError, RuntimeError):
    """The workers of a job cannot start, agree or go on together.

    Attributes:
        exit_code: what the process ends with where nobody catches this; None: as after any error of the program.
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ContractError(LockstepError, AssertionError):
    """A cross-device operation does not do what it promises: ``lockstep.testing``."""


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
        epoch: number of the epoch, from 0, as callbacks hear it.
        batch: number of the batch in it, from 0.
        replicas: whose numbers were bad; empty where that cannot be told.
        layer: path of the first bad layer, or None.
        variable: path of the variable whose gradient was bad first, or None.
        rows: rows of the batch that were bad, from 0, where they can be told.
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
    """Strategies are mixed, or a scope is used where it cannot work."""


def whole_number(name: str, value: object, least: int = 1) -> int:
    """``value`` as an int where it is a whole number of at least ``least``, NumPy's too; else an error that names it."""
    try:
        number = -1 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]  # index refuses what it must
    except TypeError:
        number = -1
    if number < least:
        raise OptionError(f"{name}: expected a whole number of at least {least}, got {value!r}.")
    return number


def member_of(kind: type[Member], name: str, value: object) -> Member:
    """A member of an enumeration, given as such or by its name in any case; else an error that lists the names."""
    if isinstance(value, kind):
        return value
    names = list(kind.__members__)
    if isinstance(value, str) and value.upper() in names:
        return kind[value.upper()]
    raise OptionError(f"{name}: expected one of {', '.join(names)}, got {value!r}.")
