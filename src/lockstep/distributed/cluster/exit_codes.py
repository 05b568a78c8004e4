"""What the process of a worker ends with, for launchers and schedulers; nobody else writes these numbers."""

__all__ = ["DONE", "INTERRUPTED", "NO_PROGRESS", "PEER_LOST", "USER_ERROR"]

DONE = 0
USER_ERROR = 13  # An exception in the user's program, here or on another worker: starting again would not help.
PEER_LOST = 75  # A worker died, was cut off or preempted: try again. EX_TEMPFAIL of sysexits.h.
NO_PROGRESS = 124  # A worker is alive and stuck. What timeout(1) ends with.
INTERRUPTED = 130  # Ctrl-C: 128 and the number of the signal, as shells count.
