"""Callbacks for ``fit``."""

from lockstep.guard.callback import NanGuard
from lockstep.monitor.progress import RichProgress
from lockstep.monitor.tensorboard import TensorBoard
from lockstep.monitor.throughput import ThroughputMonitor
from lockstep.resume.backup import BackupAndRestore

__all__ = ["BackupAndRestore", "NanGuard", "RichProgress", "TensorBoard", "ThroughputMonitor"]
