"""Callbacks for ``fit``."""

from lockstep.guard.callback import NanGuard
from lockstep.resume.backup import BackupAndRestore

__all__ = ["BackupAndRestore", "NanGuard"]
