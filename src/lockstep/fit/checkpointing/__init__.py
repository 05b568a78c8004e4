"""Checkpoints of ``fit`` and of custom training loops, exact resume, and preemption."""
