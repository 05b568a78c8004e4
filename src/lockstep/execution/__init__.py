"""What one step does: start with ``replica.py``."""
