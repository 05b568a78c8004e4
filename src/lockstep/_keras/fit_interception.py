"""The seam of ``fit``: somebody gets its calls in place of Keras, to look at a program up to there."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import keras

__all__ = ["Take", "intercept_fit", "interceptable", "observe_compile"]

Fit = Callable[..., Any]
Take = Callable[[keras.Model, Fit, tuple[Any, ...], dict[str, Any]], Any]

_taken_by: ContextVar[Take | None] = ContextVar("taken_by", default=None)


@contextlib.contextmanager
def intercept_fit(take: Take) -> Iterator[None]:
    """Have ``take(model, fit, args, kwargs)`` get each call of ``fit``, with or without a strategy, while this context is open.

    ``fit(*args, **kwargs)`` is what would have been done; calls that ``take`` makes are not taken again.
    """
    owner = next(cls for cls in keras.Model.__mro__ if "fit" in vars(cls))
    original = vars(owner)["fit"]

    @functools.wraps(original)
    def fit(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        return interceptable(model, functools.partial(original, model))(*args, **kwargs)

    token = _taken_by.set(take)
    setattr(owner, "fit", fit)  # noqa: B010  # mypy does not see that a class is an object like others.
    try:
        yield
    finally:
        setattr(owner, "fit", original)  # noqa: B010
        _taken_by.reset(token)


@contextlib.contextmanager
def observe_compile(note: Callable[[keras.Model], None]) -> Iterator[None]:
    """Have ``note`` see each model that is compiled while this context is open, from within that call."""
    owner = next(cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
    original = vars(owner)["compile"]

    @functools.wraps(original)
    def compile(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        note(model)
        return original(model, *args, **kwargs)

    setattr(owner, "compile", compile)  # noqa: B010
    try:
        yield
    finally:
        setattr(owner, "compile", original)  # noqa: B010


def interceptable(model: keras.Model, fit: Fit) -> Fit:
    """``fit`` of a model, whose calls go to whoever takes them."""

    @functools.wraps(fit)
    def call(*args: Any, **kwargs: Any) -> Any:
        take = _taken_by.get()
        if take is None:
            return fit(*args, **kwargs)
        token = _taken_by.set(None)
        try:
            return take(model, fit, args, kwargs)
        finally:
            _taken_by.reset(token)

    return call
