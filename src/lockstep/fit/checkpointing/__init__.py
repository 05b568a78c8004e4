"""Exact resume of ``fit``: what is kept of a run, when, and how another process goes on with the very next batch."""
