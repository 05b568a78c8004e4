"""Callbacks for ``fit``."""

# First: its error says what to do if Keras cannot be imported.
from lockstep import _keras as _keras
from lockstep.fit.checkpointing.backup_and_restore import BackupAndRestore
from lockstep.fit.monitoring.exporters import KubeflowProgress, PrometheusExporter
from lockstep.fit.monitoring.rich_progress import RichProgress
from lockstep.fit.monitoring.step_timer import ThroughputMonitor
from lockstep.fit.monitoring.tensorboard import TensorBoard
from lockstep.fit.nan_guard import NanGuard
from lockstep.tuning.learning_rate_scaling import LearningRateScaling

__all__ = [
    "BackupAndRestore",
    "KubeflowProgress",
    "LearningRateScaling",
    "NanGuard",
    "PrometheusExporter",
    "RichProgress",
    "TensorBoard",
    "ThroughputMonitor",
]
