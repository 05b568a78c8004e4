"""How the threads of a worker take turns on its cores, where the workers train on CPUs.

Gloo, which carries the collectives then, has a thread for its sockets. Where an answer comes while another thread still sends, that
thread wakes, finds the connection locked, and asks for it again and again. If it has pushed the sender off its core, this goes on
until the kernel's next tick, some milliseconds later. So no thread of a worker pushes another one off: ``SCHED_BATCH`` says that.
"""

import contextlib
import os
import sys

__all__ = ["wake_without_preempting"]


def wake_without_preempting() -> None:
    """Have this thread, and those that it starts from now on, take no core from a thread that runs.

    Nothing happens where the kernel is not Linux or does not allow it, or where somebody has chosen another way of scheduling.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
