"""A process that imports once what all processes of tests need, and forks one of them for each request.

Importing Keras and JAX takes seconds, which a job of four processes would spend four times. A fork has imported them and
no more: JAX has not started in it, and its program runs as ``__main__``, as if Python had been given the file.

A request is a line of JSON on standard input: ``number``, ``program``, ``arguments``, ``environ``, ``out``, ``err``, and
``compiled``, the process's own folder of compiled programs. Answers
on standard output are ``{"number", "pid"}`` and, at the end of that process, ``{"number", "code"}``. At the end of standard
input all that still run are ended.

A request with ``kind`` is one of `run_python`: ``program`` is code, the path of a script or the name of a module, and
``environ`` is the whole environment.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import types
import warnings
from pathlib import Path

import numpy as np

from tests.support.startup import extras

with extras.blocked():
    import keras

    import lockstep
    from tests.support import compile_cache

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
    compile_cache.use(request["compiled"])


def run_python(request):
    """Run code, a script or a module to its end, as ``python`` does with ``-c``, a path or ``-m``.

    An uncaught exception goes to ``sys.excepthook`` without the frames of this file. What follows (joining threads,
    ``atexit``, flushing) is the interpreter's own end.
    """
    end_with_the_server()
    os.environ.clear()
    become(request)
    os.chdir(request["cwd"])
    for action in request["warnings"]:
        warnings.simplefilter(action)
    read_environment_anew()
    try:
        run_as_main(request["kind"], request["program"])
    except Exception as error:
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
            shown = shown.tb_next
        sys.last_exc = sys.last_value = error.with_traceback(shown)
        sys.last_type, sys.last_traceback = type(error), shown
        sys.excepthook(type(error), error, shown)
        sys.exit(1)


def end_with_the_server():
    """Have the kernel kill this process when the server ends, even if that was killed and could not."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def read_environment_anew():
    """Repeat what NumPy and Keras do once, at their import: draw a seed, and read the limits of ``fit``."""
    np.random.seed()
    for name, limit in (
        ("KERAS_MAX_EPOCHS", keras.config.set_max_epochs),
        ("KERAS_MAX_STEPS_PER_EPOCH", keras.config.set_max_steps_per_epoch),
    ):
        limit(int(os.environ[name]) if name in os.environ else None)


def run_as_main(kind, program):
    """Give a new ``__main__`` and the first entry of ``sys.path`` what Python gives them, and run the program."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "script":
        main.__file__ = program = os.path.abspath(program)
        first, text = os.path.dirname(program), Path(program).read_bytes()
    else:
        first, text = os.getcwd() if kind == "module" else "", program
    root = str(Path(__file__).parents[2])  # is in the path for the programs of workers
    is_given = root in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [first, *(path for path in sys.path[1:] if is_given or path != root)]
    if kind == "module":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = sys.argv[0] if kind == "script" else "-c"
        name = program if kind == "script" else "<string>"
        exec(compile(text, name, "exec", dont_inherit=True), vars(main))


if __name__ == "__main__":
    for name in lockstep.__all__:
        getattr(lockstep, name)  # It is imported with its first use.
    with contextlib.suppress(ImportError):  # JAX imports it with its first program, which takes a tenth of a second.
        importlib.import_module("jaxlib.mlir.dialects.mhlo")
    gc.collect()
    gc.freeze()  # What was imported is not searched for garbage in each fork, which takes most of the second that an end takes.
    gc.set_threshold(100_000, 50, 100)
    asked = serve()
    if asked is not None and "kind" in asked:
        run_python(asked)
    elif asked is not None:
        become(asked)
        runpy.run_path(asked["program"], run_name="__main__")
