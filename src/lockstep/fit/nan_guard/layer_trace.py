"""Records the non-finite values of one uncompiled training step, in the order in which they appear.

In the forward pass each layer is checked when it returns, so inner layers come before the layers that contain them. In the backward pass
the gradient is checked at a layer's outputs, where it enters the layer, and at its inputs, where it leaves.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._keras.layers import copy_keras_mask, operations_of
from lockstep._keras.patches import LAYER_CALL, LOSS, STATELESS_CALL, patched_method

__all__ = ["LayerTrace", "NonFiniteValue", "kind_of", "rows_of"]


def kind_of(value: Any) -> str | None:
    """Return "NaN", "Inf" or "NaN and Inf"; None if all numbers are finite, or have no values yet, as in a trace."""
    if not isinstance(value, (jax.Array, np.ndarray)) or not jnp.issubdtype(value.dtype, jnp.inexact):
        return None
    try:
        found = [name for name, test in (("NaN", jnp.isnan), ("Inf", jnp.isinf)) if bool(test(value).any())]
    except jax.errors.ConcretizationTypeError:
        return None
    return " and ".join(found) or None


def rows_of(value: Any, rows: int) -> list[int]:
    """Return which of ``rows`` rows have a non-finite number; none if the first axis of the array is no multiple of the rows."""
    if not np.ndim(value) or not rows or np.shape(value)[0] % rows:
        return []
    by_row = np.asarray(~jnp.isfinite(value)).reshape(rows, -1)
    return [int(row) for row in np.flatnonzero(by_row.any(axis=1))]


@dataclass(frozen=True)
class NonFiniteValue:
    """A non-finite value.

    Attributes:
        path: names of the layers, from the outermost to that of the value; empty for the model.
        kind: "NaN", "Inf" or "NaN and Inf".
        side: "outputs" or "inputs" of that layer.
        is_first: whether the inputs of the layer are finite.
        replica: of the value; None if the model runs on the global batch.
        rows: of the global batch, if known.
    """

    path: str
    kind: str
    side: str
    is_first: bool
    replica: int | None
    rows: tuple[int, ...] = ()


@dataclass
class LayerTrace:
    """The non-finite values of a step of ``model`` that runs inside :meth:`recording`.

    Attributes:
        forward: non-finite outputs of layers.
        backward: non-finite gradients at outputs and inputs of layers.
        gradients: of each replica the positions of trainable variables whose gradient is not finite.
        losses: replicas whose own loss is not finite.
        loss: kind of the loss of the whole batch, if it is not finite.
        order: layers in the order of their first return.
        replica: the running replica; None: the global batch.
    """

    model: keras.Model
    rows_of_replica: Callable[[int | None], range]
    replicas: list[int]
    forward: list[NonFiniteValue] = field(default_factory=list)
    backward: list[NonFiniteValue] = field(default_factory=list)
    gradients: dict[int | None, list[int]] = field(default_factory=dict)
    losses: list[int] = field(default_factory=list)
    loss: str | None = None
    order: list[Any] = field(default_factory=list)
    replica: int | None = None
    _stack: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record layers, gradients and losses while this context is open."""
        layers = operations_of(self.model)
        with (
            patched_method(LAYER_CALL, layers, self._wrap_layer),
            patched_method(STATELESS_CALL, [self.model], self._wrap_model),
            patched_method(LOSS, [self.model], self._wrap_loss),
        ):
            yield

    def _wrap_model(self, model: keras.Model, call: Callable[..., Any]) -> Callable[..., Any]:
        def stateless_call(trainable: list[Any], *args: Any, **kwargs: Any) -> Any:
            own = [self._tapped_variable(number, value) for number, value in enumerate(trainable)]
            return call(own, *args, **kwargs)

        return stateless_call

    def _tapped_variable(self, number: int, value: Any) -> Any:
        replica = self.replica

        def record(gradient: Any) -> None:
            if kind_of(gradient):
                self.gradients.setdefault(replica, []).append(number)

        return _with_gradient_callback(value, record) if _varies(value) else value

    def _wrap_layer(self, layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._stack.append("" if layer is self.model else layer.name)
            path = "/".join(name for name in self._stack if name)
            try:
                has_finite_inputs = not any(map(kind_of, jax.tree.leaves((args, kwargs))))
                args, kwargs = self._tapped((args, kwargs), path, "inputs")
                outputs = call(*args, **kwargs)
            finally:
                self._stack.pop()
            if not any(layer is known for known in self.order):
                self.order.append(layer)
            self._record_outputs(outputs, path, has_finite_inputs)
            return self._tapped(outputs, path, "outputs")

        return wrapped

    def _record_outputs(self, outputs: Any, path: str, has_finite_inputs: bool) -> None:
        own = self.rows_of_replica(self.replica)
        for leaf in jax.tree.leaves(outputs):
            kind = kind_of(leaf)
            if kind:
                rows = tuple(own[row] for row in rows_of(jax.lax.stop_gradient(leaf), len(own)))
                self.forward.append(NonFiniteValue(path, kind, "outputs", has_finite_inputs, self.replica, rows))

    def _tapped(self, tree: Any, path: str, side: str) -> Any:
        """Return the same values, whose gradients will be recorded."""
        replica = self.replica

        def record(gradient: Any) -> None:
            kind = kind_of(gradient)
            if kind:
                self.backward.append(NonFiniteValue(path, kind, side, not self.backward, replica))

        return jax.tree.map(
            lambda leaf: copy_keras_mask(leaf, _with_gradient_callback(leaf, record)) if _varies(leaf) else leaf, tree
        )

    def _wrap_loss(self, model: keras.Model, compute: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = compute(*args, **kwargs)
            kind = kind_of(loss)
            if kind:
                self.loss = kind
                self.losses = [r for r in self.replicas if kind_of(self._own_loss(compute, r, args, kwargs))]
            return loss

        return compute_loss

    def _own_loss(self, compute: Callable[..., Any], replica: int, args: Any, kwargs: Any) -> Any:
        """Return the loss of one replica's rows; None if it cannot be computed for these rows only."""
        every, own = self.rows_of_replica(None), self.rows_of_replica(replica)

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, (jax.Array, np.ndarray)) or not np.ndim(leaf) or np.shape(leaf)[0] % len(every):
                return leaf
            k = np.shape(leaf)[0] // len(every)
            return leaf[own.start * k : own.stop * k]

        try:
            own_args, own_kwargs = jax.tree.map(cut, (args, kwargs))
            return compute(*own_args, **own_kwargs)
        except (TypeError, ValueError):
            return None


def _with_gradient_callback(value: jax.Array, record: Callable[[Any], None]) -> jax.Array:
    """Return the same value; ``record`` is called with its gradient."""

    @jax.custom_vjp
    def same(value: jax.Array) -> jax.Array:
        return value

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        record(gradient)
        return (gradient,)

    same.defvjp(lambda value: (value, None), backward)
    return same(value)


def _varies(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)
