"""What surrounds a call of ``fit``: checkpointing, the guard against non-finite steps, monitoring."""
