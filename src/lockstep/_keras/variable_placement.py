"""Lays variables over devices. Those that are spread over several processes are read and set on all of them together.

Undocumented parts, as of Keras 3.15: ``Variable._layout``, by which Keras lays all values of a variable over devices;
``Variable._direct_assign`` and ``Variable._value``, through which it sets them; ``Variable._maybe_autocast``; the stateless scope.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Sharding
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope

from lockstep._keras.patches import value_in_context
from lockstep._padded_array import PaddedArray, pad


@dataclass(frozen=True)
class VariableSharder:
    """Where a strategy lays the variables of its models.

    Args:
        sharding_of: returns the sharding of a variable, given its shape; None: the one that it has, or that of plain Keras.
        put: lays a value, which all processes have, over the devices.
        gather: returns the whole value of an array on the host, or None if this process does not want it; all processes call it.
        agree: checks that all processes call it now, with this topic and an equal value, and raises an error otherwise.
        makes_shards: whether each device makes its shard of a large value by itself, so that none ever has all of it.
    """

    sharding_of: Callable[[keras.Variable, tuple[int, ...]], Sharding | None]
    put: Callable[[Any, Sharding], jax.Array]
    gather: Callable[[jax.Array, bool], Any]
    agree: Callable[[str, Any], None]
    makes_shards: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "VariableSharder":
        """Return the sharder itself, as the copy of a variable lies where the variable does."""
        return self


_reads_stored = ContextVar("_reads_stored", default=False)


def stored_values() -> contextlib.AbstractContextManager[None]:
    """Have variables give their values as they are laid over the devices, some as :class:`PaddedArray`, while a context is open."""
    return value_in_context(_reads_stored, True)


def stored_value(variable: keras.Variable) -> Any:
    """Return the value of a variable as it is laid over the devices."""
    with stored_values():
        return variable.value


class ShardedVariable(keras.Variable):
    """A variable whose value is sharded over devices, with padding if its axis is not divisible by their number.

    Keras makes its variables itself, so :func:`lay_out` changes the class of an instance.
    """

    _sharder: VariableSharder

    @property
    def value(self) -> Any:
        stored = self._value
        if not isinstance(stored, PaddedArray) or self._has_value_in_scope():
            return super().value
        return stored if _reads_stored.get() else self._maybe_autocast(self._gathered(stored))

    def _gathered(self, stored: PaddedArray) -> jax.Array:
        return stored.without_padding()

    def _has_value_in_scope(self) -> bool:
        return in_stateless_scope() and get_stateless_scope().get_current_value(self) is not None

    def __array__(self, dtype: Any = None) -> np.ndarray:
        if isinstance(self._value, PaddedArray) and not in_stateless_scope():
            return np.asarray(self._value, dtype)
        return super().__array__(dtype)

    def assign(self, value: Any) -> Any:
        """See Keras. A step returns values with padding."""
        if not isinstance(value, PaddedArray):
            return super().assign(value)
        self._direct_assign(value)
        return value

    def _direct_assign(self, value: Any) -> None:
        if isinstance(value, jax.core.Tracer):
            super()._direct_assign(value)
        else:
            self._value = self._sharder.put(pad(value, self._layout), self._layout)


class MultiProcessVariable(ShardedVariable):
    """A variable whose value is on devices of several processes.

    If no process has all of it, all set it, and read it on the host, at the same point of the program.
    """

    _whole: np.ndarray | None = None  # the value while the chief saves a model, which it does alone

    @property
    def value(self) -> Any:
        return super().value if self._whole is None or in_stateless_scope() else jnp.asarray(self._whole)

    def _gathered(self, stored: PaddedArray) -> jax.Array:
        self._agree_to_read()
        return super()._gathered(stored)

    def _agree_to_read(self) -> None:
        self._sharder.agree(f"the value of variable {self.path!r}, which all workers read together", None)

    def __array__(self, dtype: Any = None) -> np.ndarray:
        if self._whole is not None:
            return np.asarray(self._whole, dtype)
        if not self._layout.is_fully_replicated:
            self._agree_to_read()
        return np.asarray(self._sharder.gather(self._value, True), dtype)

    def _direct_assign(self, value: Any) -> None:
        is_array = not isinstance(value, jax.core.Tracer)
        is_whole = is_array and (isinstance(value, np.ndarray) or value.is_fully_addressable)
        if is_whole and not self._layout.is_fully_replicated:
            value = np.ascontiguousarray(value)
            what = f"the new value of variable {self.path!r}, which all workers set together"
            self._sharder.agree(what, zlib.crc32(value.reshape(-1).view(np.uint8)))
        super()._direct_assign(value)


def has_layout(variable: keras.Variable) -> bool:
    """Return whether a variable has a layout: one of its own, or, of an optimizer, that of the variable that it belongs to."""
    return variable._layout is not None


def lay_out(variable: keras.Variable, sharding: Sharding | None, sharder: VariableSharder) -> None:
    """Give a variable a layout, and lay the value that it has over the devices; ``sharding`` None keeps the layout that it has."""
    sharding = sharding or variable._layout
    if sharding is None:
        return
    variable._layout = sharding
    if not (sharding.is_fully_addressable and sharding.is_fully_replicated):
        variable.__class__ = ShardedVariable if sharding.is_fully_addressable else MultiProcessVariable
        variable._sharder = sharder
    if vars(variable).get("_value") is not None:
        variable._direct_assign(variable._value)


def lay_out_value(variable: keras.Variable, value: Any, sharder: VariableSharder) -> None:
    """Give a variable the layout of its first value."""
    lay_out(variable, sharder.sharding_of(variable, tuple(value.shape)), sharder)


def lay_out_uninitialized(variable: keras.Variable, initializer: Any, sharder: VariableSharder) -> None:
    """Give a variable its layout before it gets its first value, if each device can make its shard by itself: Keras then does so.

    A value that depends on state that changes with each call, or of a function that may not be compiled, is made as a whole.
    """
    seed = getattr(initializer, "seed", None)
    is_function = not isinstance(initializer, keras.initializers.Initializer)
    if not sharder.makes_shards or is_function or isinstance(seed, keras.random.SeedGenerator):
        return
    sharding = sharder.sharding_of(variable, tuple(variable.shape))
    if sharding is not None and not sharding.is_fully_addressable:
        what = f"the initializer of variable {variable.path!r}, of which each worker makes its shards"
        sharder.agree(what, [type(initializer).__name__, str(seed)])
    lay_out(variable, sharding, sharder)


def set_from_host(variable: keras.Variable, value: np.ndarray) -> None:
    """Set a variable to a value of its shape; no device gets more of it than its shard, as ``variable.assign`` would give the first one."""
    if variable._layout is None:
        variable.assign(value)
        return
    value = np.asarray(value, jnp.dtype(variable.dtype))
    is_sharded = isinstance(variable, ShardedVariable)
    variable._direct_assign(value if is_sharded else jax.device_put(value, variable._layout))


@contextlib.contextmanager
def whole_values(variables: Iterable[keras.Variable], *, wanted: bool) -> Iterator[None]:
    """Have sharded variables give their whole values without the other processes while this context is open.

    All processes enter it, and leave it together: a file that one of them writes is complete then.

    Args:
        variables: any variables; those that this process has as a whole stay as they are.
        wanted: whether this process needs the values, in the memory of its host.
    """
    sharded = [x for x in variables if isinstance(x, MultiProcessVariable) and not x._layout.is_fully_replicated]
    if sharded:
        paths = [variable.path for variable in sharded]
        sharded[0]._sharder.agree("the values of the variables, which all workers gather to save a model", paths)
    try:
        for variable in sharded:
            variable._whole = variable._sharder.gather(variable._value, wanted)
        try:
            yield
        finally:
            if sharded:
                sharded[0]._sharder.agree("the end of saving a model", None)
    finally:
        for variable in sharded:
            variable._whole = None
