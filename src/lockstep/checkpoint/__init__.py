"""Checkpoints on disk: written atomically, checked when they are read."""
