"""A process that imports once what all processes of tests need, and forks one of them for each request.

Importing Keras and JAX takes seconds, which a job of four processes would spend four times. A fork has imported them and
no more: JAX has not started in it, and its program runs as ``__main__``, as if Python had been given the file.

A request is a line of JSON on standard input: ``number``, ``program``, ``arguments``, ``environ``, ``out``, ``err``. Answers
on standard output are ``{"number", "pid"}`` and, at the end of that process, ``{"number", "code"}``. At the end of standard
input all that still run are ended.
"""

import json
import os
import runpy
import select
import signal
import sys
from pathlib import Path

import keras  # noqa: F401

import lockstep  # noqa: F401

POLL_SECONDS = 0.01


def serve():
    """Gives None in this process, at the end, and in each fork its request."""
    running, unread = {}, b""
    while True:
        if select.select([0], [], [], POLL_SECONDS if running else None)[0]:
            received = os.read(0, 1 << 16)
            if not received:
                return end(running)
            *lines, unread = (unread + received).split(b"\n")
            for request in map(json.loads, lines):
                pid = os.fork()
                if pid == 0:
                    return request
                running[pid] = request["number"]
                tell(number=request["number"], pid=pid)
        tell_of_ends(running)


def tell_of_ends(running):
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        tell(number=running.pop(pid), code=os.waitstatus_to_exitcode(status))


def tell(**values):
    os.write(1, json.dumps(values).encode() + b"\n")


def end(running):
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def become(request):
    """What a shell does between fork and exec: a group, streams and an environment of its own."""
    os.setpgid(0, 0)
    for descriptor, path in enumerate((os.devnull, request["out"], request["err"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.update(request["environ"])
    sys.argv = [request["program"], *request["arguments"]]
    sys.path[0] = str(Path(request["program"]).parent)


if __name__ == "__main__":
    asked = serve()
    if asked is not None:
        become(asked)
        runpy.run_path(asked["program"], run_name="__main__")
