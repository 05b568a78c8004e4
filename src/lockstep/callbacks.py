"""Callbacks for ``fit``."""

from lockstep.resume.backup import BackupAndRestore

__all__ = ["BackupAndRestore"]
