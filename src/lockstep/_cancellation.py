"""Cancellation of a wait: whether the result for which the current thread works is still wanted."""

from collections.abc import Callable
from contextvars import ContextVar

__all__ = ["is_cancelled"]

# A thread that works ahead of another one sets it; waits for other processes ask it.
is_cancelled: ContextVar[Callable[[], bool]] = ContextVar("is_cancelled", default=lambda: False)
