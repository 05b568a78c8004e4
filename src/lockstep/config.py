"""Settings of the process, to be made before anything else: ``lockstep.config``."""

from lockstep.doctor.switch import set_doctor
from lockstep.topology.cpu import set_logical_cpu_devices
from lockstep.topology.determinism import set_deterministic

__all__ = ["set_deterministic", "set_doctor", "set_logical_cpu_devices"]
