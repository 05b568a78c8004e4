"""Callbacks for ``fit``."""

from lockstep.fit.checkpointing.backup_and_restore import BackupAndRestore
from lockstep.fit.monitoring.kubeflow_progress import KubeflowProgress
from lockstep.fit.monitoring.prometheus import PrometheusExporter
from lockstep.fit.monitoring.rich_progress import RichProgress
from lockstep.fit.monitoring.step_timer import ThroughputMonitor
from lockstep.fit.monitoring.tensorboard import TensorBoard
from lockstep.fit.nan_guard.nan_guard import NanGuard
from lockstep.tuning.learning_rate import LearningRateScaling

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
