"""What values of replicas may be, and the errors where they are something else."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from lockstep._errors import InputError, ModelError, OptionError
from lockstep.custom_loops.per_replica import NO_NUMBERS, PerReplica, is_per_replica, is_value, value_of, with_numbers

__all__ = [
    "check_arrays",
    "check_axis",
    "check_hash",
    "check_replicas",
    "check_shapes",
    "check_structures",
    "checked_result",
    "on_host",
    "values_unknown",
]


def check_axis(what: str, shape: Sequence[int], axis: int) -> None:
    """Refuse an axis that a value does not have."""
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise InputError(f"{what}: expected the number of an axis, got {axis!r}.")
    if not -len(shape) <= axis < len(shape):
        raise InputError(
            f"{what}: axis {axis} is not one of a value of shape {tuple(shape)}. Axes count from 0, and from -1 backwards."
        )


def check_arrays(what: str, tree: Any) -> None:
    """Refuse texts and other objects, and sparse arrays, whose indices are no numbers to add.

    Raises:
        InputError: there is one.
    """
    for node in jax.tree.leaves(tree, is_leaf=_is_sparse):
        if _is_sparse(node):
            raise InputError(
                f"{what}: a sparse array, {type(node).__name__}, cannot be brought together. Fix: node.todense()."
            )
        value = value_of(node)
        is_text = isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in NO_NUMBERS
        if is_text or not is_value(value):
            raise InputError(f"{what}: expected arrays and numbers, got {node!r:.60}, a {type(node).__name__}.")


def check_structures(what: str, trees: Sequence[Any]) -> None:
    """Refuse values of replicas that are not the same tree of arrays.

    Raises:
        InputError: two of them differ.
    """
    structures: list[Any] = [jax.tree.structure(tree) for tree in trees]
    first, *others = structures
    for number, other in enumerate(others, 1):
        if other != first:
            raise InputError(
                f"{what}: expected the same tree of arrays for each replica, got {first} and, {number} later, {other}. Fix: give each the same "
                "names and lengths."
            )


def _is_sparse(node: Any) -> bool:
    return type(node).__module__.startswith("jax.experimental.sparse")


def check_replicas(what: str, value: PerReplica, replicas: int) -> None:
    """Refuse values of another strategy's replicas.

    Raises:
        InputError: there are more or fewer of them.
    """
    found = sum(map(len, value.members))
    if found != replicas:
        raise InputError(
            f"strategy.{what}: expected a value of each of {replicas} replicas, got one of {found} replicas. Fix: use the strategy whose "
            "data set or run it comes from."
        )


def check_shapes(what: str, shapes: Sequence[Sequence[int]], axis: int) -> None:
    """Refuse to join arrays that differ along another axis."""
    if (
        len({(len(shape), *(size for i, size in enumerate(shape) if i != axis % len(shapes[0]))) for shape in shapes})
        > 1
    ):
        raise InputError(
            f"{what}: replicas' values may differ along axis {axis} only, and have the shapes {', '.join(map(str, map(list, shapes)))}. "
            "Fix: bring them to one shape, or gather along the axis in which they differ."
        )


def check_hash(leaf: Any) -> None:
    """Refuse arguments that neither are arrays nor can be compared."""
    try:
        hash(leaf)
    except TypeError:
        raise OptionError(
            f"strategy.run: args: a {type(leaf).__name__} is no tree of arrays, and has no hash by which a compiled step is found "
            "again. Fix: give its arrays, or let fn take it from the surrounding code."
        ) from None


def checked_result(leaf: Any) -> Any:
    """A leaf of what a replica returned, as an array.

    Raises:
        OptionError: no device can hold it, or it is a value of each replica already.
    """
    value = value_of(leaf)
    if is_per_replica(value):
        raise OptionError(
            "strategy.run: fn returned a PerReplica, which has a value of each replica already. Fix: give it to run as an argument, so that "
            "fn gets its own."
        )
    if not is_value(value):
        raise OptionError(
            f"strategy.run: fn returned {value!r:.60}, a {type(value).__name__}; expected arrays, numbers and trees of them. Fix: "
            "return what is no array from the code around run."
        )
    return value


def on_host(leaf: Any) -> Any:
    """An argument that may be no array of JAX yet; a Python number stays one, whose dtype gives way to others."""
    if isinstance(leaf, (np.ndarray, np.generic, int)):
        with_numbers(leaf)
    return leaf


_UNKNOWN = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@contextmanager
def values_unknown() -> Iterator[None]:
    """Make an error of JAX about values that a trace does not have one that says what to write."""
    try:
        yield
    except _UNKNOWN as error:
        raise ModelError(
            "strategy.run: fn needs the value of an array while it is traced, when only its shape is known "
            f"({str(error).partition(chr(10))[0]}). Fix: write jnp.where or jax.lax.cond for an if, jnp for np, and give "
            "what is known before as a text or take it from the surrounding code."
        ) from error
