"""What pytest leaves alone in this folder."""

collect_ignore = ["programs", "program.py"]  # They are for processes of their own.
