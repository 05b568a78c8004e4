"""Callbacks for ``fit``."""

from lockstep.guard.callback import NanGuard
from lockstep.monitor.progress import RichProgress
from lockstep.monitor.tensorboard import TensorBoard
from lockstep.monitor.throughput import ThroughputMonitor
from lockstep.resume.backup import BackupAndRestore
from lockstep.tuning.learning_rate import LearningRateScaling

__all__ = [
    "BackupAndRestore",
    "LearningRateScaling",
    "NanGuard",
    "RichProgress",
    "TensorBoard",
    "ThroughputMonitor",
]
