"""Exit codes of a worker's process, for launchers and schedulers."""

DONE = 0
USER_ERROR = 13  # An exception in the user's program, here or on another worker: a restart would not help.
PEER_LOST = 75  # A worker died, was cut off or preempted: restart the job. EX_TEMPFAIL of sysexits.h.
NO_PROGRESS = 124  # A worker is alive and stuck. The exit code of timeout(1).
INTERRUPTED = 130  # Ctrl-C: 128 and the number of the signal, as in shells.
