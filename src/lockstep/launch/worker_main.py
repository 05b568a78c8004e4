"""Process with the arguments ``SUPERVISOR ERROR -f|-m PROGRAM ARGUMENTS…``: the reaper, and below it the worker.

SUPERVISOR and ERROR are file descriptors: a socket to the supervisor, and the file for the exception that ends the program. The
worker is a fork of this process, which has imported modules of Python and Lockstep only, so no second Python starts. The program runs as ``__main__``
and sees what it would see under ``python program.py`` or ``python -m``.
"""

import builtins
import contextlib
import faulthandler
import importlib.abc
import importlib.util
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType, TracebackType

from lockstep._errors import INTERRUPTED, USER_ERROR, ClusterError, exit_code_of
from lockstep.distributed.cluster.env_reader import launched_workers
from lockstep.launch.reaper import adopt_orphans, die_with_parent, run_reaper
from lockstep.launch.signals import FORWARDED, SignalPipe
from lockstep.launch.worker_process import ErrorRecord


def main() -> None:
    """Fork: the parent becomes the reaper, the child runs the program."""
    supervisor, error = (int(number) for number in sys.argv[1:3])
    os.set_inheritable(error, False)
    adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # A daemon may have handed it on ignored or blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    signals = SignalPipe([*FORWARDED, signal.SIGCHLD])
    parent = os.getpid()
    worker = os.fork()
    if worker:
        # The supervisor blocked them when it started this process.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        run_reaper(worker, supervisor, signals)
        return
    signals.close()
    os.close(supervisor)
    os.setpgid(0, 0)
    die_with_parent(parent)
    _run_program(sys.argv[3] == "-m", sys.argv[4:], error)


def _run_program(is_module: bool, command: list[str], error: int) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # It is a pipe, but a user may watch it.
    worker, workers, is_first = os.getpid(), launched_workers(os.environ), os.environ.get("RANK") == "0"
    try:
        (_run_module if is_module else _run_script)(command[0], command[1:])
        if is_first and workers > 1:
            _warn_if_no_strategy(workers)
    except SystemExit as request:
        if os.getpid() == worker:
            _record_exit(request, error)
        raise
    except KeyboardInterrupt as interrupt:
        _print_exception(interrupt.with_traceback(_program_frames(interrupt)))
        sys.exit(INTERRUPTED)
    except BaseException as exception:
        if os.getpid() != worker:  # A fork of the program exits as under plain Python.
            raise
        _exit_with_error(exception.with_traceback(_program_frames(exception)), error)


def _warn_if_no_strategy(workers: int) -> None:
    """Say that each worker did the same, if a program with Keras has made no strategy and has not initialized JAX's cluster."""
    if "keras" not in sys.modules or "lockstep.strategies" in sys.modules:
        return
    if "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized():
        return
    sys.stderr.write(
        f"lockstep: the program has made no strategy, so each of the {workers} workers ran it by itself. Fix: make a "
        "lockstep.MultiWorkerMirroredStrategy and the model in its scope, or leave out lockstep run.\n"
    )


def _run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a file as ``python script arguments…`` does."""
    path = os.path.abspath(script)
    _prepend_to_path(os.path.dirname(os.path.realpath(script)))
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main_module = _new_main(path, SourceFileLoader("__main__", path))
    _execute(main_module, code, [script, *arguments], [sys.executable, script, *arguments])


def _run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module, or a package's ``__main__``, as ``python -m name arguments…`` does."""
    _prepend_to_path(os.getcwd())
    sys.argv = ["-m", *arguments]  # As Python has it while it imports the package.
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = None if spec is None else _code_of(spec)
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {name!r} that can be run", name=name)
    module = _new_main(spec.origin, spec.loader)
    module.__spec__, module.__package__, module.__cached__ = spec, spec.parent, spec.cached  # type: ignore[attr-defined]
    _execute(module, code, [spec.origin or name, *arguments], [sys.executable, "-m", name, *arguments])


def _prepend_to_path(folder: str) -> None:
    """Have the program import from a folder first, as Python does unless the user has switched that off."""
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _code_of(spec: ModuleSpec) -> CodeType | None:
    loader = spec.loader
    return loader.get_code(spec.name) if isinstance(loader, importlib.abc.InspectLoader) else None


def _new_main(path: str | None, loader: object) -> ModuleType:
    module = ModuleType("__main__")
    vars(module).update({"__builtins__": builtins, "__cached__": None, "__file__": path, "__loader__": loader})
    if "__annotations__" in vars(sys.modules["__main__"]):  # This depends on the version of Python.
        vars(module)["__annotations__"] = {}
    return module


def _execute(module: ModuleType, code: CodeType, arguments: list[str], command: list[str]) -> None:
    sys.argv, sys.orig_argv = arguments, command
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _exit_with_error(exception: BaseException, error: int) -> None:
    """Record and print an exception, and exit at once.

    Python's exit handlers may wait for the other workers, which wait for this one: JAX does, for minutes.
    """
    code = exit_code_of(exception) or USER_ERROR
    text = "".join(traceback.format_exception(exception))
    record = ErrorRecord(time.monotonic(), isinstance(exception, ClusterError), text, code)
    _write_record(record, error)
    if (termination := sys.modules.get("lockstep.distributed.control.termination")) is not None:
        termination.call_if_consequence(lambda: _write_record(replace(record, is_consequence=True), error))
    _print_exception(exception)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _record_exit(request: SystemExit, error: int) -> None:
    """Record an exit with an error when it is requested: other workers may fail of it while Python's exit handlers run."""
    code = request.code & 0xFF if isinstance(request.code, int) else int(request.code is not None)
    if code:
        _write_record(ErrorRecord(time.monotonic(), False, "", code), error)


def _write_record(record: ErrorRecord, error: int) -> None:
    """Write a record into the file for it, in place of an earlier one."""
    data = record.to_bytes()
    with contextlib.suppress(OSError):
        os.pwrite(error, data, 0)
        os.ftruncate(error, len(data))


def _print_exception(exception: BaseException) -> None:
    """Print a traceback with the program's own hook, if it has set one."""
    arguments = (type(exception), exception, exception.__traceback__)
    try:
        sys.excepthook(*arguments)
    except Exception:
        sys.__excepthook__(*arguments)


def _program_frames(exception: BaseException) -> TracebackType | None:
    """Return the traceback from the program's first frame on."""
    frames = exception.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames
