"""The matrix of faults."""

collect_ignore = ["training.py"]  # It is for processes of its own.
