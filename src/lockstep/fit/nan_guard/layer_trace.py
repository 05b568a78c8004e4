"""What is seen of one training step that runs without being compiled: which values are bad, in the order in which they appear.

Forwards each layer is looked at when it returns, so inner ones come before those that hold them. Backwards the gradient is looked at
where it enters a layer, that is at its outputs, and where it leaves it, at its inputs.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep._keras.layers import copy_keras_mask, operations_of, patched_methods
from lockstep.fit.nan_guard.nonfinite import kind_of, rows_of

__all__ = ["LayerTrace", "NonFiniteValue"]


@dataclass(frozen=True)
class NonFiniteValue:
    """A bad value.

    Attributes:
        path: names of the layers, from the outermost to the one that is meant; empty for the model.
        kind: "NaN", "Inf" or "NaN and Inf".
        side: "outputs" or "inputs" of that layer.
        is_first: whether what the layer was given is finite.
        replica: whose; None where the model runs on the global batch.
        rows: of the global batch, where they can be told.
    """

    path: str
    kind: str
    side: str
    is_first: bool
    replica: int | None
    rows: tuple[int, ...] = ()


@dataclass
class LayerTrace:
    """Is filled while a step of ``model`` runs inside :meth:`watching`.

    Attributes:
        forward: bad outputs of layers.
        backward: bad gradients at outputs and inputs of layers.
        gradients: of each replica the positions of trainable variables whose gradient is bad.
        losses: replicas whose own loss is bad.
        loss: what is wrong with the loss of the whole batch.
        order: layers in the order of their first return.
        replica: the one that runs; None: the global batch.
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
    def watching(self) -> Iterator[None]:
        """Layers, gradients and losses are looked at meanwhile."""
        layers = operations_of(self.model)
        with (
            patched_methods(layers, "call", self._around_layer),
            patched_methods([self.model], "stateless_call", self._around_model),
            patched_methods([self.model], "compute_loss", self._around_loss),
        ):
            yield

    def _around_model(self, model: keras.Model, call: Callable[..., Any]) -> Callable[..., Any]:
        def stateless_call(trainable: list[Any], *args: Any, **kwargs: Any) -> Any:
            own = [self._tapped_variable(number, value) for number, value in enumerate(trainable)]
            return call(own, *args, **kwargs)

        return stateless_call

    def _tapped_variable(self, number: int, value: Any) -> Any:
        replica = self.replica

        def tell(gradient: Any) -> None:
            if kind_of(gradient):
                self.gradients.setdefault(replica, []).append(number)

        return _looked_at(value, tell) if _varies(value) else value

    def _around_layer(self, layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def looked_at(*args: Any, **kwargs: Any) -> Any:
            self._stack.append("" if layer is self.model else layer.name)
            path = "/".join(name for name in self._stack if name)
            try:
                given = not any(map(kind_of, jax.tree.leaves((args, kwargs))))
                args, kwargs = self._tapped((args, kwargs), path, "inputs")
                outputs = call(*args, **kwargs)
            finally:
                self._stack.pop()
            if not any(layer is known for known in self.order):
                self.order.append(layer)
            self._note(outputs, path, given)
            return self._tapped(outputs, path, "outputs")

        return looked_at

    def _note(self, outputs: Any, path: str, given: bool) -> None:
        """Remember a layer's bad outputs, if any."""
        own = self.rows_of_replica(self.replica)
        for leaf in jax.tree.leaves(outputs):
            kind = kind_of(leaf)
            if kind:
                rows = tuple(own[row] for row in rows_of(jax.lax.stop_gradient(leaf), len(own)))
                self.forward.append(NonFiniteValue(path, kind, "outputs", given, self.replica, rows))

    def _tapped(self, tree: Any, path: str, side: str) -> Any:
        """The same values, whose gradients will be looked at."""
        replica = self.replica

        def tell(gradient: Any) -> None:
            kind = kind_of(gradient)
            if kind:
                self.backward.append(NonFiniteValue(path, kind, side, not self.backward, replica))

        return jax.tree.map(lambda leaf: copy_keras_mask(leaf, _looked_at(leaf, tell)) if _varies(leaf) else leaf, tree)

    def _around_loss(self, model: keras.Model, compute: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = compute(*args, **kwargs)
            kind = kind_of(loss)
            if kind:
                self.loss = kind
                self.losses = [r for r in self.replicas if kind_of(self._own_loss(compute, r, args, kwargs))]
            return loss

        return compute_loss

    def _own_loss(self, compute: Callable[..., Any], replica: int, args: Any, kwargs: Any) -> Any:
        """The loss of one replica's rows; None where it cannot be computed for them alone."""
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


def _looked_at(value: jax.Array, tell: Callable[[Any], None]) -> jax.Array:
    """The same value, whose gradient ``tell`` is given."""

    @jax.custom_vjp
    def same(value: jax.Array) -> jax.Array:
        return value

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        tell(gradient)
        return (gradient,)

    same.defvjp(lambda value: (value, None), backward)
    return same(value)


def _varies(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)
