"""Checks of the values of replicas, with errors for those that cannot be used."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from lockstep._errors import InputError, ModelError, OptionError
from lockstep.custom_loops.per_replica import (
    NON_NUMERIC_KINDS,
    PerReplica,
    as_numeric_array,
    is_per_replica,
    is_value,
    value_of,
)

__all__ = [
    "check_arrays",
    "check_axis",
    "check_hashable",
    "check_host_argument",
    "check_replicas",
    "check_result",
    "check_shapes",
    "check_structures",
    "explain_tracer_errors",
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
    """Refuse texts and other objects, and sparse arrays, whose indices cannot be added.

    Raises:
        InputError: the tree holds one.
    """
    for node in jax.tree.leaves(tree, is_leaf=_is_sparse):
        if _is_sparse(node):
            raise InputError(
                f"{what}: a sparse array, {type(node).__name__}, cannot be combined over replicas. Fix: use its todense()."
            )
        value = value_of(node)
        is_text = isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in NON_NUMERIC_KINDS
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
    """Refuse a :class:`PerReplica` of another strategy.

    Raises:
        InputError: it has more or fewer replicas.
    """
    found = sum(map(len, value.members))
    if found != replicas:
        raise InputError(
            f"strategy.{what}: expected a value of each of {replicas} replicas, got one of {found} replicas. Fix: use the strategy "
            "whose data set or run made it."
        )


def check_shapes(what: str, shapes: Sequence[Sequence[int]], axis: int) -> None:
    """Refuse to join arrays that differ along another axis."""
    if (
        len({(len(shape), *(size for i, size in enumerate(shape) if i != axis % len(shapes[0]))) for shape in shapes})
        > 1
    ):
        raise InputError(
            f"{what}: replicas' values may differ along axis {axis} only, and have the shapes {', '.join(map(str, map(list, shapes)))}. "
            "Fix: give them one shape, or gather along the axis in which they differ."
        )


def check_hashable(leaf: Any) -> None:
    """Refuse arguments that are neither arrays nor hashable."""
    try:
        hash(leaf)
    except TypeError:
        raise OptionError(
            f"strategy.run: args: a {type(leaf).__name__} is not a tree of arrays and is not hashable, so a compiled step cannot be found "
            "for it. Fix: pass its arrays, or let fn use it as a closure."
        ) from None


def check_result(leaf: Any) -> Any:
    """Return a leaf of a replica's result; of a Keras variable its value.

    Raises:
        OptionError: it is not a number or an array, or it is a :class:`PerReplica`.
    """
    value = value_of(leaf)
    if is_per_replica(value):
        raise OptionError(
            "strategy.run: fn returned a PerReplica, which already has a value for each replica. Fix: pass it to run as an argument, so that "
            "fn gets the replica's value."
        )
    if not is_value(value):
        raise OptionError(
            f"strategy.run: fn returned {value!r:.60}, a {type(value).__name__}; expected arrays, numbers and trees of them. Fix: "
            "keep other objects in the code around run."
        )
    return value


def check_host_argument(leaf: Any) -> Any:
    """Return an argument unchanged if JAX can hold its numbers; Python numbers keep their weak dtype."""
    if isinstance(leaf, (np.ndarray, np.generic, int)):
        as_numeric_array(leaf)
    return leaf


_TRACER_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@contextmanager
def explain_tracer_errors() -> Iterator[None]:
    """Replace JAX's errors about values that are unknown while tracing by one with instructions."""
    try:
        yield
    except _TRACER_ERRORS as error:
        raise ModelError(
            "strategy.run: fn needs the value of an array while it is traced, when only its shape is known "
            f"({str(error).partition(chr(10))[0]}). Fix: write jnp.where or jax.lax.cond for an if, jnp for np; pass "
            "values that are known beforehand as static arguments such as texts, or as a closure."
        ) from error
