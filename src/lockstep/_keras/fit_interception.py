"""Interception of calls of ``fit`` and ``compile``: tools run a user's script up to there and read the arguments."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import keras

from lockstep._keras.patches import INTERCEPT_FIT, OBSERVE_COMPILE, patched

__all__ = ["FitInterceptor", "intercept_fit", "interceptable", "observe_compile"]

Fit = Callable[..., Any]
FitInterceptor = Callable[[keras.Model, Fit, tuple[Any, ...], dict[str, Any]], Any]

_interceptor: ContextVar[FitInterceptor | None] = ContextVar("interceptor", default=None)


@contextlib.contextmanager
def intercept_fit(interceptor: FitInterceptor) -> Iterator[None]:
    """Call ``interceptor(model, fit, args, kwargs)`` in place of each ``fit``, with or without a strategy, while this context is open.

    ``fit(*args, **kwargs)`` is the call that the script made. Calls of ``fit`` that the interceptor makes are not intercepted.
    """
    owner = _owner_of("fit")
    original = vars(owner)["fit"]

    @functools.wraps(original)
    def fit(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        return interceptable(model, functools.partial(original, model))(*args, **kwargs)

    token = _interceptor.set(interceptor)
    try:
        with patched(INTERCEPT_FIT, [(owner, "fit", fit)]):
            yield
    finally:
        _interceptor.reset(token)


@contextlib.contextmanager
def observe_compile(observe: Callable[[keras.Model], None]) -> Iterator[None]:
    """Call ``observe`` with each model that is compiled while this context is open, from within that call."""
    owner = _owner_of("compile")
    original = vars(owner)["compile"]

    @functools.wraps(original)
    def compile(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        observe(model)
        return original(model, *args, **kwargs)

    with patched(OBSERVE_COMPILE, [(owner, "compile", compile)]):
        yield


def interceptable(model: keras.Model, fit: Fit) -> Fit:
    """Return ``fit`` of a model with its calls going to the current interceptor, if there is one."""

    @functools.wraps(fit)
    def call(*args: Any, **kwargs: Any) -> Any:
        interceptor = _interceptor.get()
        if interceptor is None:
            return fit(*args, **kwargs)
        token = _interceptor.set(None)
        try:
            return interceptor(model, fit, args, kwargs)
        finally:
            _interceptor.reset(token)

    return call


def _owner_of(method: str) -> type:
    return next(cls for cls in keras.Model.__mro__ if method in vars(cls))
