"""Settings of the process, to be made before JAX starts: ``lockstep.config``."""

# First: its error says what to do if Keras cannot be imported.
from lockstep import _keras as _keras
from lockstep.devices.cpu_devices import set_logical_cpu_devices
from lockstep.devices.xla_flags import set_deterministic
from lockstep.doctor.base import set_doctor

__all__ = ["set_deterministic", "set_doctor", "set_logical_cpu_devices"]
