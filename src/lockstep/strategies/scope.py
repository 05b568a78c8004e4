"""The scope of a strategy: models that are made, loaded or compiled in it belong to the strategy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from lockstep._errors import ModelError, ScopeError
from lockstep._keras import trainer
from lockstep._keras.layers import global_batch_reason, unsynchronized_normalizations
from lockstep.custom_loops.replica_context import open_scopes
from lockstep.execution.train_functions import trace_context
from lockstep.strategies.setup import scopes_disabled

__all__ = ["check_model", "check_scope_of", "strategy_scope"]


@contextmanager
def strategy_scope(strategy: Any) -> Iterator[Any]:
    """Open the scope of a strategy, which may be open already.

    Raises:
        ScopeError: another strategy's scope is open, or a ``keras.distribution`` is active.
    """
    outer = _innermost()
    if outer not in (None, strategy):
        raise ScopeError(
            f"Strategies cannot be mixed: the scope of {outer} is open, and {strategy} was entered inside. Fix: close the "
            "first scope before opening the second."
        )
    _check_no_distribution()
    open_scopes.set((*open_scopes.get(), strategy))
    try:
        with trainer.claim_models(_current_claim), trace_context(strategy.num_replicas_in_sync):
            yield strategy
    finally:
        scopes = list(open_scopes.get())
        if strategy in scopes:
            scopes.remove(strategy)
        open_scopes.set(tuple(scopes))


def check_model(model: keras.Model, owner: Any) -> None:
    """Refuse a model that cannot be run now: in another scope, with a ``keras.distribution``, or with mixed normalizations."""
    check_scope_of(model, owner)
    _check_no_distribution()
    reason = global_batch_reason(model)
    alone = unsynchronized_normalizations(model)
    if reason and alone:
        raise ModelError(
            f"Model {model.name!r} mixes two ways to split a batch: {reason}, but layer {alone[0]!r} normalizes each "
            "replica's rows on its own. Fix: give every BatchNormalization synchronized=True."
        )


def check_scope_of(model: keras.Model, owner: Any) -> None:
    """Refuse a model that is used in the scope of a strategy other than its owner."""
    scope = _innermost()
    if scope not in (None, owner):
        raise ScopeError(
            f"Model {model.name!r} was made under {owner} and is used in the scope of {scope}. Fix: use it outside that "
            "scope, or build or load it again inside."
        )


def _check_no_distribution() -> None:
    if keras.distribution.distribution() is not None:
        raise ScopeError(
            "A keras.distribution is active, which would distribute the same model a second time. Fix: remove it with "
            "keras.distribution.set_distribution(None)."
        )


def _innermost() -> Any:
    """Return the strategy whose scope was opened last, or None."""
    scopes = open_scopes.get()
    return scopes[-1] if scopes else None


def _current_claim() -> trainer.Claim | None:
    strategy = _innermost()
    return strategy._claim if strategy and not scopes_disabled() else None
