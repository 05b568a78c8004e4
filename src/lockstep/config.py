"""Settings of the process, to be made before JAX starts: ``lockstep.config``."""

from lockstep.devices.cpu_devices import set_logical_cpu_devices
from lockstep.devices.xla_flags import set_deterministic
from lockstep.doctor.base import set_doctor

__all__ = ["set_deterministic", "set_doctor", "set_logical_cpu_devices"]
