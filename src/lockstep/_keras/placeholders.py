"""Variables of a plan: large ones read as zeros that take no memory, so that a model may be larger than the machine that plans.

Undocumented parts, as of Keras 3.15: ``Variable._initialize_with_initializer``, ``Variable._initialize`` and ``Variable._direct_assign``, which
set ``Variable._value``; ``Variable._dtype``.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._errors import ModelError
from lockstep._keras.patches import PLACEHOLDERS, patched
from lockstep._keras.trainer import observe_saves

_LARGE = 1 << 20  # bytes of the smallest value without memory; random seeds, rates and biases keep theirs
_ARRAY: Any = np.ndarray


class _Zeros(np.ndarray[Any, Any]):
    """Zeros that take no memory, with what scripts read of an array of JAX."""

    # ``value += 1`` makes a new array, too.
    __iadd__ = _ARRAY.__add__
    __isub__ = _ARRAY.__sub__
    __imul__ = _ARRAY.__mul__
    __itruediv__ = _ARRAY.__truediv__
    __ipow__ = _ARRAY.__pow__
    __imatmul__ = _ARRAY.__matmul__

    @property
    def at(self) -> Any:
        return jnp.asarray(self).at

    @property
    def sharding(self) -> jax.sharding.Sharding:
        return jnp.zeros(()).sharding

    def devices(self) -> set[jax.Device]:
        return jnp.zeros(()).devices()

    def block_until_ready(self) -> "_Zeros":
        return self


def _zeros(shape: Any, dtype: Any) -> Any:
    return np.broadcast_to(np.zeros((), dtype).view(_Zeros), shape, subok=True)


@contextlib.contextmanager
def placeholder_variables() -> Iterator[None]:
    """Give new variables of a MiB or more zeros that take no memory, whatever they are initialized with or set to, while this is open.

    A model with such variables cannot be saved.
    """
    owner = next(kind for kind in keras.Variable.__mro__ if "_initialize_with_initializer" in vars(kind))
    by_initializer, by_value, assign = (vars(owner)[name] for name in PLACEHOLDERS.attributes)
    new: WeakValueDictionary[int, keras.Variable] = WeakValueDictionary()  # by id, as variables have no hash

    @functools.wraps(by_initializer)
    def initialize_with_zeros(variable: keras.Variable, initializer: Callable[..., Any]) -> None:
        zeros = _zeros(variable.shape, variable._dtype)
        if zeros.nbytes < _LARGE:
            by_initializer(variable, initializer)
        else:
            new[id(variable)] = variable
            variable._value = zeros

    @functools.wraps(by_value)
    def initialize_by_value(variable: keras.Variable, value: Any) -> None:
        new[id(variable)] = variable
        by_value(variable, value)

    @functools.wraps(assign)
    def assign_zeros(variable: keras.Variable, value: Any) -> None:
        is_small = isinstance(value, jax.core.Tracer) or value.nbytes < _LARGE
        if is_small or id(variable) not in new:  # Variables that were there before keep their values.
            assign(variable, value)
        else:
            variable._value = _zeros(value.shape, value.dtype)

    replaced = zip(PLACEHOLDERS.attributes, (initialize_with_zeros, initialize_by_value, assign_zeros), strict=True)
    with (
        patched(PLACEHOLDERS, [(owner, name, method) for name, method in replaced]),
        observe_saves(_refuse_to_save_zeros),
    ):
        yield


def _refuse_to_save_zeros(model: keras.Model) -> None:
    if any(isinstance(variable.value, _Zeros) for variable in model.variables):
        raise ModelError(
            f"model {model.name!r} is saved before its first fit, and in a plan its large variables have no values: the file would have zeros. "
            "Fix: save it after fit, or leave that out with an argument of the script."
        )
