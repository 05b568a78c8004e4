"""Lockstep: train Keras 3 models on many devices at once, on JAX, with the names of ``tf.distribute``.

The numbers are those of one device, whatever the devices: see ``ARCHITECTURE.md``.
"""

from lockstep import config
from lockstep._errors import (
    BackendError,
    DeviceError,
    InputError,
    LockstepError,
    ModelError,
    OptionError,
    ScopeError,
)
from lockstep._version import __version__
from lockstep.collectives import AutoAllReduce, CrossDeviceOps, ReductionToOneDevice
from lockstep.strategies.mirrored import MirroredStrategy

__all__ = [
    "AutoAllReduce",
    "BackendError",
    "CrossDeviceOps",
    "DeviceError",
    "InputError",
    "LockstepError",
    "MirroredStrategy",
    "ModelError",
    "OptionError",
    "ReductionToOneDevice",
    "ScopeError",
    "__version__",
    "config",
]
