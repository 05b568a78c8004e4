"""Run a user's script up to its first call of ``fit``, to examine the model and the data."""

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from lockstep._errors import OptionError
from lockstep._keras.trainer import intercept_fit
from lockstep.doctor.base import calling_location


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


class _FirstFitReached(BaseException):  # Not an Exception: the script may catch those.
    """Raised in the script at its first fit, to end the script."""


def check_exists(path: str) -> None:
    """Refuse the path of a script that is not there.

    Raises:
        OptionError: the file does not exist.
    """
    if not os.path.isfile(path):
        raise OptionError(f"{path}: no such file. Fix: give the path of the script that trains the model.")


def run_until_fit(path: str, arguments: Sequence[str], on_fit: Callable[[FirstFit], None]) -> None:
    """Run a script as ``python path arguments`` does, call ``on_fit`` with its first ``fit``, and end the script there.

    Args:
        path: of the script.
        arguments: of the script, in ``sys.argv`` after its name.
        on_fit: called once, inside the contexts that the script has entered.

    Raises:
        OptionError: the file does not exist.
        NoFitError: the script ended without a call of ``fit``.
    """
    check_exists(path)
    outcome: list[Exception | None] = []  # the exception of on_fit, or None

    def intercept(model: keras.Model, fit: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not outcome:
            try:
                on_fit(FirstFit(model, fit, args, kwargs, calling_location()))
                outcome.append(None)
            except Exception as error:  # The script may catch exceptions, so it is raised below.
                outcome.append(error)
        raise _FirstFitReached

    with _as_main(path, arguments), intercept_fit(intercept):
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException as error:  # If a script has caught _FirstFitReached, any other exception may follow.
            if isinstance(error, KeyboardInterrupt) or not (outcome or isinstance(error, SystemExit)):
                raise
    if outcome:
        if outcome[0] is not None:
            raise outcome[0]
        return
    raise NoFitError(
        f"{path}: the script ended without a call of fit, so there is nothing to examine. Fix: in a custom training loop, call "
        "strategy.doctor or lockstep.scaling_report."
    )


@contextmanager
def _as_main(path: str, arguments: Sequence[str]) -> Iterator[None]:
    """Set ``sys.argv`` and put the folder of the script first in ``sys.path``, as Python does."""
    before = sys.argv, list(sys.path)
    sys.argv, sys.path[0:0] = [path, *arguments], [str(Path(path).resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before
