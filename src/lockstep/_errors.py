"""Every error that Lockstep raises on purpose.

LockstepError
├── BackendError    Keras is not what we need: another backend, an unknown version        (RuntimeError)
├── DeviceError     a device is unknown, absent, named twice, or it is too late to make it  (ValueError)
├── InputError      a batch cannot be split into replicas                                   (ValueError)
├── ModelError      a model cannot be split into replicas                                   (ValueError)
├── OptionError     an argument is out of its range                                         (ValueError)
└── ScopeError      strategies are mixed, or a scope is used where it cannot work           (RuntimeError)

Each message says what happened, where, what was expected, what was found and what to do.
"""


class LockstepError(Exception):
    """Base class: ``except lockstep.LockstepError`` catches everything that Lockstep raises on purpose."""


class BackendError(LockstepError, RuntimeError):
    """Keras runs on another backend, or has a shape that this version of Lockstep does not know."""


class DeviceError(LockstepError, ValueError):
    """A device is unknown, absent, named twice, or it is too late to make it."""


class InputError(LockstepError, ValueError):
    """A batch cannot be split into replicas."""


class ModelError(LockstepError, ValueError):
    """A model cannot be split into replicas."""


class OptionError(LockstepError, ValueError):
    """An argument is out of its range."""


class ScopeError(LockstepError, RuntimeError):
    """Strategies are mixed, or a scope is used where it cannot work."""
