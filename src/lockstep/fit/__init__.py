"""Hooks around ``fit``: checkpoints, the NaN guard and monitoring."""
