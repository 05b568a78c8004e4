"""A program's end of the talk with the driver: JSON lines on standard output, "go" and "stop" on standard input."""

import json
import os
import sys
import time


class Turns:
    """Make it first of all: from then on whatever else prints goes to standard error."""

    def __init__(self):
        self._output = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._start = None

    def ready(self, trainable):
        """Say that all is compiled, and how many parameters are trained."""
        self._say({"trainable": int(trainable)})

    def wait(self):
        """Wait for this program's turn; at "stop", or without a driver, end at once."""
        if sys.stdin.readline() != "go\n":
            os._exit(0)  # Nothing is kept, and nobody is waited for: other processes hear the same word.
        self._start = time.perf_counter()

    def done(self, steps):
        """Say what a step took since ``wait``."""
        self._say({"ms": 1e3 * (time.perf_counter() - self._start) / steps})

    def _say(self, content):
        self._output.write(json.dumps(content) + "\n")
