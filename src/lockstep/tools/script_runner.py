"""Runs scripts and modules for the tools: a user's script up to its first call of ``fit``, and modules in child processes.

Each child process has its own devices and memory, may crash alone, and writes its result as JSON.
"""

import contextlib
import functools
import inspect
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jax
import keras

from lockstep._errors import OptionError, shown, signal_name
from lockstep._keras.trainer import intercept_fit, observe_saves
from lockstep.doctor.base import calling_location
from lockstep.launch.reaper import die_with_parent


class NoFitError(OptionError):
    """The script has ended without a call of ``fit``."""


@dataclass(frozen=True)
class FirstFit:
    """The first call of ``fit`` of a script.

    Args:
        model: the compiled model.
        fit: the bound method, to be called with ``args`` and ``kwargs``.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        where: file and line of the call, as ``train.py:31``.
    """

    model: keras.Model
    fit: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments that are given, by name."""
        return dict(inspect.signature(keras.Model.fit).bind(self.model, *self.args, **self.kwargs).arguments)


def check_exists(path: str) -> None:
    """Refuse the path of a script that is not there.

    Raises:
        OptionError: the file does not exist.
    """
    if not os.path.isfile(path):
        raise OptionError(f"{path}: no such file. Fix: give the path of the script that trains the model.")


Finish = Callable[[Exception | None], int]


def run_until_fit(
    path: str, arguments: Sequence[str], on_fit: Callable[[FirstFit], None], finish: Finish | None = None
) -> None:
    """Run a script as ``python path arguments`` does, call ``on_fit`` with its first ``fit``, and end the script there.

    Args:
        path: path of the script.
        arguments: arguments of the script, in ``sys.argv`` after its name.
        on_fit: called once, inside the contexts that the script has entered, in the thread that calls ``fit``.
        finish: called with the exception of ``on_fit``, or None, if the script catches its end and calls ``fit`` again, which it may do for
            ever: the process ends then, with the exit code that this returns. None: that call is ended like the first one.

    Raises:
        OptionError: the file does not exist, or the script sets variables for JAX, which this process has imported before.
        NoFitError: the script ended without a call of ``fit``.
    """
    check_exists(path)
    interceptor, exit_code = _Interceptor(path, on_fit, finish), None
    with _as_main(path, arguments), intercept_fit(interceptor), observe_saves(interceptor.end_save):
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException as error:  # If a script has caught its end, any other exception may follow.
            if isinstance(error, KeyboardInterrupt) or not (interceptor.outcome or isinstance(error, SystemExit)):
                raise
            exit_code = error.code if isinstance(error, SystemExit) else None
        interceptor.wait()
    outcome = interceptor.outcome
    if outcome:
        if outcome[0] is not None:
            raise outcome[0]
        return
    how, fix = "without a call of fit", "in a custom training loop, call strategy.doctor or lockstep.scaling_report"
    if exit_code:
        how = f"by sys.exit({shown(exit_code)}), before a call of fit"
        fix = (
            "run it by python with the same arguments, which shows why; lockstep doctor, plan and scale take them last, "
            "after --"
        )
    raise NoFitError(f"{path}: the script ended {how}, so there is nothing to examine. Fix: {fix}.")


class _Interceptor:
    """What is called in place of each ``fit`` of a script: hands over the first one, and ends the script."""

    def __init__(self, path: str, on_fit: Callable[[FirstFit], None], finish: Finish | None) -> None:
        self._path, self._on_fit, self._finish = path, on_fit, finish
        self._given = dict(os.environ)
        self._handing_over = threading.Lock()
        self.outcome: list[Exception | None] = []  # the exception of on_fit, or None

    def __call__(
        self, model: keras.Model, fit: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self.outcome and self._handing_over.acquire(blocking=False):  # Else another thread hands over its fit.
            try:
                self._hand_over(FirstFit(model, fit, args, kwargs, calling_location()))
            finally:
                self._handing_over.release()
        elif self.outcome and self._finish is not None:
            _end_process(functools.partial(self._finish, self.outcome[0]))
        raise SystemExit  # Not an Exception, which the script may catch; and a thread, too, ends by it silently.

    def end_save(self, model: keras.Model) -> None:
        """End a script that writes a model on its way out, which has not been trained."""
        if self.outcome:
            raise SystemExit

    def wait(self) -> None:
        """Wait for the end of ``on_fit`` in a thread that the script has left."""
        with self._handing_over:
            pass

    def _hand_over(self, first: FirstFit) -> None:
        try:
            _check_jax_variables(self._path, self._given)
            self._on_fit(first)
            self.outcome.append(None)
        except Exception as error:  # The script may catch exceptions, so run_until_fit raises it.
            self.outcome.append(error)


def _end_process(finish: Callable[[], int]) -> NoReturn:
    """End the process with the exit code of ``finish``, whatever the script catches; 1 if that fails."""
    code = 1
    try:
        code = finish()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


# Variables of JAX that change numbers, or the devices.
_OF_NUMBERS = (
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEFAULT_PRNG_IMPL",
    "JAX_DISABLE_JIT",
    "JAX_ENABLE_X64",
    "JAX_NUMPY_DTYPE_PROMOTION",
    "JAX_NUM_CPU_DEVICES",
    "JAX_PLATFORMS",
    "JAX_THREEFRY_PARTITIONABLE",
)
_GPU_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}  # Names in JAX_PLATFORMS whose backend has another name.
_TRUE = ("1", "on", "t", "true", "y", "yes")


def _check_jax_variables(path: str, given: Mapping[str, str]) -> None:
    """Refuse a script that has set such variables, which JAX reads at its import, unless they were ``given`` before or nothing changes."""
    new = {name: os.environ[name] for name in _OF_NUMBERS if name in os.environ and name not in given}
    ignored = " ".join(f"{name}={shlex.quote(value)}" for name, value in new.items() if not _is_in_effect(name, value))
    if ignored:
        raise OptionError(
            f"{path}: sets {ignored} for JAX, which lockstep has imported before the script, so it has no effect here. "
            f"Fix: export {ignored} before the command."
        )


def _is_in_effect(name: str, text: str) -> bool:
    """Return whether a variable's value is that of JAX in this process."""
    value = jax.config.values[name.lower()]
    if name == "JAX_PLATFORMS":
        first = text.partition(",")[0]
        return _GPU_PLATFORMS.get(first, first) in ("", jax.default_backend())
    if name == "JAX_NUM_CPU_DEVICES" and value != -1:  # The tool or the script has made its own number of devices.
        return True
    return value == (text.lower() in _TRUE) if isinstance(value, bool) else str(value) == text


@contextmanager
def _as_main(path: str, arguments: Sequence[str]) -> Iterator[None]:
    """Set ``sys.argv`` and put the folder of the script first in ``sys.path``, as Python does."""
    before = sys.argv, list(sys.path)
    sys.argv, sys.path[0:0] = [path, *arguments], [str(Path(path).resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


_KILL_SECONDS = 10.0
_CHECK_SECONDS = 0.5  # between two looks at the memory of a child


@dataclass(frozen=True)
class ChildResult:
    """What a child process leaves.

    Args:
        content: that it wrote last, also if it was killed; None: nothing.
        failure: why it has not ended well; "" if it has.
        is_late: whether it reached the time limit.
    """

    content: Any
    failure: str
    is_late: bool = False


def run_child(
    module: str,
    request: Mapping[str, Any],
    limit: float,
    environment: Mapping[str, str],
    memory: int | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> ChildResult:
    """Run a module in a child process, which is killed with its children at a limit.

    Args:
        module: whose ``main`` calls :func:`read_request`.
        request: values of JSON.
        limit: seconds.
        environment: variables of this process.
        memory: bytes; None: no limit.
        is_over: whether the result is no longer wanted; asked all the time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = folder / "request.json", folder / "result.json"
        files[0].write_text(json.dumps({**request, "parent": os.getpid()}))
        with (folder / "output").open("wb") as output:
            command = [sys.executable, "-m", module, *map(str, files)]
            code, failure, is_late = _run(command, limit, environment, output, memory, is_over)
        content = json.loads(files[1].read_text()) if files[1].exists() else None
        if not failure and (code or content is None):
            failure = _describe_exit(code, (folder / "output").read_text(errors="replace"))
        return ChildResult(content, failure, is_late)


def _run(
    command: Sequence[str],
    limit: float,
    environment: Mapping[str, str],
    output: Any,
    memory: int | None,
    is_over: Callable[[], bool],
) -> tuple[int, str, bool]:
    """Run the child; return its exit code, which limit it reached, and whether that is the time."""
    source = str(Path(__file__).parents[2])
    paths = environment.get("PYTHONPATH", "")
    variables = {"KERAS_BACKEND": "jax", **environment, "PYTHONPATH": os.pathsep.join(filter(None, [source, paths]))}
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables, start_new_session=True
    )
    end = time.monotonic() + limit
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(min(_CHECK_SECONDS, max(0.0, end - time.monotonic()))), "", False
            if time.monotonic() >= end:
                return 0, f"Not finished within {limit:g} s.", True
            if is_over():
                return 0, "Interrupted.", False
            if memory is not None and _resident_bytes(child.pid) > memory:
                return 0, f"It took more than {memory / 1e9:,.1f} GB of memory.", False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # A driver or a disk may block it.
            child.wait(_KILL_SECONDS)


def _resident_bytes(process: int) -> int:
    """Return the memory that a process takes now; 0 if the system does not report it."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _describe_exit(code: int, output: str) -> str:
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "no output")[:300]
    if code == -signal.SIGKILL:
        return "The process was killed (SIGKILL), usually because memory ran out."
    ended = f"by {signal_name(-code)}" if code < 0 else f"with code {code}"
    return f"The process ended {ended}: {last}"


def read_request(arguments: Sequence[str]) -> tuple[Any, Callable[[Any], None]]:
    """Return the request of the parent, and a function that writes a result in place of the one before; arguments are their paths."""
    request, result = map(Path, arguments)
    content = json.loads(request.read_text())
    die_with_parent(content.pop("parent"))

    def write(value: Any) -> None:
        new = result.with_suffix(".new")
        new.write_text(json.dumps(value))
        new.replace(result)

    return content, write
