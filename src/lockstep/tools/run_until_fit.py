"""A user's script is run up to its first ``fit``, to look at the model and the data that it would train."""

import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from lockstep._errors import OptionError
from lockstep._keras.fit_interception import intercept_fit
from lockstep.doctor.fit_call import calling_location

__all__ = ["FirstFit", "run_until_fit"]


@dataclass(frozen=True)
class FirstFit:
    """The first call of ``fit`` of a script.

    Args:
        model: whose it is, compiled.
        fit: does what the script has asked for, with ``args`` and ``kwargs``.
        args: as the script gives them.
        kwargs: the named ones.
        where: file and line of the call, as ``train.py:31``.
    """

    model: keras.Model
    fit: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str


class _FirstFitReached(BaseException):  # Not an Exception: the script may catch those.
    """The script has come to its first fit, and need not go on."""


def run_until_fit(path: str, arguments: Sequence[str], look: Callable[[FirstFit], None]) -> None:
    """Run a script as ``python path arguments`` does, hand its first ``fit`` to ``look``, and end it there.

    Args:
        path: of the script.
        arguments: what it finds in ``sys.argv`` behind its name.
        look: is called once, inside the script's own contexts.

    Raises:
        OptionError: there is no such file, or it came to its end without a ``fit``.
    """
    if not Path(path).is_file():
        raise OptionError(f"{path}: there is no such file. Give the script that trains the model.")

    ended: list[Exception | None] = []  # what the first look has raised

    def take(model: keras.Model, fit: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not ended:
            try:
                look(FirstFit(model, fit, args, kwargs, calling_location()))
                ended.append(None)
            except Exception as error:  # Out of the script's reach, as it may catch those.
                ended.append(error)
        raise _FirstFitReached

    with _as_main(path, arguments), intercept_fit(take):
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException as end:  # Where a script has caught _FirstFitReached all the same, anything may come.
            if isinstance(end, KeyboardInterrupt) or not (ended or isinstance(end, SystemExit)):
                raise
    if ended:
        if ended[0] is not None:
            raise ended[0]
        return
    raise OptionError(
        f"{path}: it ended before any model was trained by fit, so there is nothing to look at. For a loop of your own, call "
        "strategy.doctor or lockstep.scaling_report in it."
    )


@contextmanager
def _as_main(path: str, arguments: Sequence[str]) -> Iterator[None]:
    """What Python gives a script: its folder comes first where modules are looked for."""
    before = sys.argv, list(sys.path)
    sys.argv, sys.path[0:0] = [path, *arguments], [str(Path(path).resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before
