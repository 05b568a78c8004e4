"""A listener in a process that may open few files; it says how it fares while strangers are there, or while it can open none.

Arguments: name of the listener, and a folder in which the test puts files that say how far it is.
"""

import os
import resource
import socket
import sys
import time
from pathlib import Path

from tests.distributed import test_handshake
from tests.support.telling import tell
from tests.support.waiting import wait_until

FEW = 96  # Descriptors besides those that are open at the start.


def count_failures(seconds=1.0):
    """How many of the files that the process tries to open meanwhile cannot be opened."""
    failures, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            Path("/dev/null").open().close()
        except OSError:
            failures += 1
        time.sleep(0.005)
    return failures


def use_up():
    """Open files until there is no descriptor left for a connection."""
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return held


def main(name, folder):
    open_now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + FEW, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with getattr(test_handshake, name)() as listener:
        tell(address=listener.address)
        wait_until((Path(folder) / "strangers").exists, "the strangers")
        tell(failures=count_failures(), lines=listener.lines)
        held = use_up()
        tell(full=True)
        wait_until((Path(folder) / "one more").exists, "one more stranger")
        before = time.process_time()
        time.sleep(1.5)
        tell(cpu_seconds=time.process_time() - before)
        for descriptor in held:
            os.close(descriptor)
        tell(free=True, all_lines=listener.lines)
        wait_until((Path(folder) / "end").exists, "the end")


if __name__ == "__main__":
    socket.setdefaulttimeout(test_handshake.DEADLINE)
    main(*sys.argv[1:])
