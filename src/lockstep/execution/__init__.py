"""Execution of one step by replicas on devices. Start with ``replica.py``."""
