"""Functions that need no strategy object: ``get_strategy`` and its like."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from lockstep._errors import ScopeError, member_of
from lockstep.collectives import AutoAllReduce
from lockstep.collectives.base import ReduceOp
from lockstep.custom_loops.per_replica import bools_as_integers, check_arrays, check_axis
from lockstep.custom_loops.replica_context import (
    ReplicaContext,
    as_floating,
    current_replica,
    current_strategy,
    in_context,
)
from lockstep.custom_loops.strategy_api import StrategyApi
from lockstep.data.input_options import InputOptions
from lockstep.data.process_group import ProcessGroup
from lockstep.devices.placement import Placement, placement_on


class _NoStrategy(StrategyApi):
    """The default strategy of :func:`get_strategy`: one replica, on JAX's default device."""

    _ops, _process_group, _input_options = AutoAllReduce(), ProcessGroup(), InputOptions()

    @cached_property
    def _placement(self) -> Placement:  # type: ignore[override]  # made on first use, as it starts JAX
        return placement_on(jax.local_devices()[:1], 1)

    @property
    def num_replicas_in_sync(self) -> int:
        return 1

    def scope(self) -> AbstractContextManager["_NoStrategy"]:
        return nullcontext(self)

    def checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, as :meth:`self_check` and :meth:`doctor`: there is no strategy that has made a model or a process group."""
        raise _no_strategy("checkpoint")

    def doctor(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _no_strategy("doctor")

    def self_check(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _no_strategy("self_check")


def _no_strategy(method: str) -> ScopeError:
    return ScopeError(
        f"get_strategy().{method}: no scope of a strategy is open, and the default strategy has no models. Fix: call it in strategy.scope(), or "
        "as a method of the strategy."
    )


class _OnlyReplica(ReplicaContext):
    """The context of code outside of strategies: every value already is the sum and the mean."""

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """Return ``value``; the mean of whole numbers is a floating-point number."""
        op = member_of(ReduceOp, "all_reduce: reduce_op", reduce_op)
        check_arrays("all_reduce: value", value)
        return jax.tree.map(as_floating if op is ReduceOp.MEAN else bools_as_integers, value)

    def all_gather(self, value: Any, axis: int) -> Any:
        check_arrays("all_gather: value", value)
        for leaf in jax.tree.leaves(value):
            check_axis("all_gather", jnp.shape(leaf), axis)
        return value

    def merge_call(self, merge_fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        with in_context(self.strategy, None):
            return merge_fn(self.strategy, *args, **(kwargs or {}))


_none = _NoStrategy()


def get_strategy() -> Any:
    """Return the current strategy, as in ``tf.distribute``.

    Returns:
        The strategy whose scope is open or whose replica runs; else a default strategy with one replica.

    Example:
        >>> import lockstep
        >>> lockstep.get_strategy().num_replicas_in_sync
        1
    """
    return current_strategy() or _none


def has_strategy() -> bool:
    """Whether there is a current strategy.

    Returns:
        True if a scope is open or a replica runs.

    Example:
        >>> import lockstep
        >>> with lockstep.MirroredStrategy(["cpu:0"]).scope():
        ...     lockstep.has_strategy()
        True
    """
    return current_strategy() not in (None, _none)


def in_cross_replica_context() -> bool:
    """Whether the calling code works for all replicas at once.

    Returns:
        True in a scope or a merge call, False in a replica.

    Example:
        >>> import lockstep
        >>> lockstep.in_cross_replica_context()
        False
    """
    return current_strategy() is not None and current_replica() is None


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica that runs.

    Returns:
        The context; None in a scope or a merge call; outside of strategies, the context of a single replica.

    Example:
        >>> import lockstep
        >>> lockstep.get_replica_context().num_replicas_in_sync
        1
    """
    if in_cross_replica_context():
        return None
    return current_replica() or _OnlyReplica(_none, 0, lambda shape: [shape])
