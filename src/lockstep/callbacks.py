"""Callbacks for ``fit``."""

from lockstep.guard.callback import NanGuard
from lockstep.resume.backup import BackupAndRestore
from lockstep.tuning.learning_rate import LearningRateScaling

__all__ = ["BackupAndRestore", "LearningRateScaling", "NanGuard"]
