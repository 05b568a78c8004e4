"""Settings of the process, to be made before anything else: ``lockstep.config``."""

from lockstep.topology.cpu import set_logical_cpu_devices

__all__ = ["set_logical_cpu_devices"]
