"""Callbacks for ``fit``."""

from lockstep.guard.callback import NanGuard
from lockstep.monitor.tensorboard import TensorBoard
from lockstep.monitor.throughput import ThroughputMonitor
from lockstep.resume.backup import BackupAndRestore

__all__ = ["BackupAndRestore", "NanGuard", "TensorBoard", "ThroughputMonitor"]
