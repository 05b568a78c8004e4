"""The functions that Keras's ``fit``, ``evaluate`` and ``predict`` call: ``(state, iterator) -> (logs, state)``.

Keras keeps its loop, callbacks, history and progress bar, and its ``train_step``, also one that a user wrote: it is
traced on the global batch, and only the model's forward pass inside it is taken over (:class:`_Forwarder`). Loss,
metrics, clipping, accumulation and update therefore are Keras's own code on the global batch, on every device alike.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from lockstep import _keras
from lockstep._errors import ModelError
from lockstep.collectives import CrossDeviceOps
from lockstep.data.placement import Placement, Rows, joined
from lockstep.step.devices import Forward, forward_eagerly, forward_on_devices
from lockstep.step.replica import Merge, ReplicaResult
from lockstep.topology.layout import Layout

__all__ = ["STATE", "StepFunctions"]

STATE = {
    "train": ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables"),
    "test": ("trainable_variables", "non_trainable_variables", "metrics_variables"),
    "predict": ("trainable_variables", "non_trainable_variables"),
}

KerasStep = Callable[[Any, Any], tuple[Any, Any]]  # (state, data) -> (logs or outputs, state)

# Two threads that start steps on the same devices at once could start them in another order on each device, and their
# collectives would wait for each other for ever.
_dispatch_lock = threading.Lock()


class _PlacedState(tuple[Any, ...]):
    """State that a step of this strategy returned: it lies on the devices already."""

    __slots__ = ()


class StepFunctions:
    """Builds the train, test and predict function of one model under one strategy.

    Args:
        model: a Keras model.
        placement: devices and number of replicas.
        ops: adds up the gradients of the devices.
    """

    def __init__(self, model: keras.Model, placement: Placement, ops: CrossDeviceOps) -> None:
        self.model = model
        self.placement = placement
        self.ops = ops

    def make(self, kind: str) -> Callable[[Any, Iterator[Any]], tuple[Any, Any]]:
        """The function for ``kind`` ("train", "test" or "predict") of the model as it is compiled now."""
        step = self._step(kind)
        combine = _concatenated if kind == "predict" else _last

        def function(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
            results = []
            try:
                for position in range(self.model.steps_per_execution):
                    batch = next(iterator, None) if position else next(iterator)
                    if batch is None:
                        break
                    result, state = step(state, batch)
                    results.append(result)
            except BaseException:
                _keras.keep_values(self.model, STATE[kind], state)
                raise
            return combine(results), state

        return function

    def _step(self, kind: str) -> KerasStep:
        keras_step = _keras_step(self.model, kind)
        if self.model.run_eagerly or not self.model.jit_compile:
            return lambda state, batch: self._traced(keras_step, tuple(state), batch)
        # Training gives its state's memory to the new state. The other two change little or nothing: they keep it, and
        # what did not change is not copied either.
        compiled = jax.jit(
            lambda state, batch: self._traced(keras_step, state, batch, only_changes=kind != "train"),
            donate_argnums=0 if kind == "train" else (),
            out_shardings=self.placement.replicated,
        )

        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            placed = self.placement.place(batch)
            if not isinstance(state, _PlacedState):
                state = jax.device_put(_without_aliases(state), self.placement.replicated)
            with _dispatch_lock:
                result, changes = compiled(tuple(state), placed)
            return result, _PlacedState(_updated(state, changes))

        return step

    def _traced(self, keras_step: KerasStep, state: Any, batch: Any, only_changes: bool = False) -> tuple[Any, Any]:
        forwarder = _Forwarder(self.model, self.placement, self.ops)
        data = jax.tree.map(forwarder.joined, batch, is_leaf=lambda leaf: isinstance(leaf, Rows))
        with self._forward_pass(forwarder):
            result, new = keras_step(state, data)
        return result, _changes(state, new) if only_changes else new

    def _forward_pass(self, forwarder: "_Forwarder") -> contextlib.AbstractContextManager[None]:
        if _keras.needs_global_batch(self.model):
            return _keras.plain_batch_normalization(self.model)
        return _keras.replaced_call(self.model, forwarder.stateless_call)


class _Forwarder:
    """Stands in for ``model.stateless_call`` while one step is traced: the same arguments and results, by replicas."""

    def __init__(self, model: keras.Model, placement: Placement, ops: CrossDeviceOps) -> None:
        self.model = model
        self.original = model.stateless_call
        self.placement = placement
        self.ops = ops
        self._places: dict[int, tuple[jax.Array, Rows]] = {}

    def joined(self, leaf: Any) -> Any:
        """The global array of a leaf of a placed batch; its places are remembered for the forward pass."""
        if not isinstance(leaf, Rows):
            return leaf
        array = joined(leaf)
        self._places[id(array)] = (array, leaf)
        return array

    def stateless_call(
        self,
        trainable_variables: list[Any],
        non_trainable_variables: list[Any],
        *args: Any,
        return_losses: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As ``keras.Model.stateless_call``: outputs and new non-trainable values, and losses if asked for."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        rows = next((np.shape(leaf)[0] for leaf in leaves if np.ndim(leaf)), None)
        if rows is None:  # Nothing to be split.
            values = (trainable_variables, non_trainable_variables)
            return self.original(*values, *args, return_losses=return_losses, **kwargs)
        cut = [np.ndim(leaf) > 0 and np.shape(leaf)[0] == rows for leaf in leaves]
        packing = _Packing(self.model, self.original, leaves, structure, cut)
        forward = Forward(
            call=packing.call,
            merges=tuple(_merge_of(variable) for variable in self.model.non_trainable_variables),
            trainable=list(trainable_variables),
            non_trainable=list(non_trainable_variables),
            layout=self.placement.layout(rows),
        )
        inputs = [leaf for leaf, is_cut in zip(leaves, cut, strict=True) if is_cut]
        result = self._run(forward, inputs)
        outputs, losses = packing.unpack(result)
        return (outputs, result.state, losses) if return_losses else (outputs, result.state)

    def _run(self, forward: Forward, inputs: list[Any]) -> ReplicaResult:
        if self.model.run_eagerly or not self.model.jit_compile:
            return forward_eagerly(forward, [jax.numpy.asarray(leaf) for leaf in inputs])
        placed = [self._placed(leaf, forward.layout) for leaf in inputs]
        return forward_on_devices(forward, placed, self.placement, self.ops)

    def _placed(self, leaf: Any, layout: Layout) -> jax.Array:
        """Where the rows lie already, or, for what the step made itself (augmented pictures, say), a new place."""
        _, rows = self._places.get(id(leaf), (None, None))
        if rows is not None:
            return rows.array
        array = leaf if layout.is_full else leaf[layout.row_index()]
        return jax.lax.with_sharding_constraint(array, self.placement.cut)


class _Packing:
    """Turns Keras's arguments and results of a forward pass into the flat lists of the step, and back.

    The structure of the results is known once a replica was traced; it is the same for all.
    """

    def __init__(
        self, model: keras.Model, original: Callable[..., Any], leaves: list[Any], structure: Any, cut: list[bool]
    ) -> None:
        self.model = model
        self.original = original
        self.leaves = leaves
        self.structure = structure
        self.cut = cut
        self.outputs: Any = None  # structure of the outputs
        self.kinds: list[str] = []  # for outputs, then losses: "rows" or "mean"
        self.masked: list[bool] = []
        self.factors: list[int] = []

    def call(
        self, trainable: list[jax.Array], non_trainable: list[jax.Array], inputs: list[jax.Array]
    ) -> ReplicaResult:
        """One replica's forward pass."""
        own = iter(inputs)
        leaves = [next(own) if is_cut else leaf for leaf, is_cut in zip(self.leaves, self.cut, strict=True)]
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        outputs, state, losses = self.original(trainable, non_trainable, *args, return_losses=True, **kwargs)
        outputs, self.outputs = jax.tree.flatten(outputs)
        masks = [_keras.get_keras_mask(leaf) for leaf in outputs]
        self.masked = [mask is not None for mask in masks]
        values = [*outputs, *losses]
        size = inputs[0].shape[0]
        self.kinds = [self._kind(np.shape(value), size) for value in values]
        rows = [value for value, kind in zip(values, self.kinds, strict=True) if kind == "rows"]
        means = [jax.numpy.asarray(value) for value, kind in zip(values, self.kinds, strict=True) if kind == "mean"]
        changed = [
            None if new is old else jax.numpy.asarray(new) for new, old in zip(state, non_trainable, strict=True)
        ]
        return ReplicaResult(rows=[*rows, *(mask for mask in masks if mask is not None)], means=means, state=changed)

    def unpack(self, result: ReplicaResult) -> tuple[Any, list[Any]]:
        """Outputs, with their masks, and losses, of the whole batch."""
        rows, means = iter(result.rows), iter(result.means)
        values = [next(rows) if kind == "rows" else next(means) for kind in self.kinds]
        count = self.outputs.num_leaves
        outputs, losses = values[:count], values[count:]
        for output, masked in zip(outputs, self.masked, strict=True):
            if masked:
                _keras.set_keras_mask(output, next(rows))
        return jax.tree.unflatten(self.outputs, outputs), losses

    def _kind(self, shape: tuple[int, ...], size: int) -> str:
        if not shape:
            return "mean"
        if shape[0] and shape[0] % size == 0:
            return "rows"
        raise ModelError(
            f"Model {self.model.name!r} returned an array of shape {shape} for a replica of {size} rows. Under a "
            f"strategy each output and each added loss is either a scalar or has one entry for each row, (rows, …)."
        )


def _merge_of(variable: keras.Variable) -> Merge:
    if _keras.is_seed(variable):
        return Merge.SEED
    if variable.aggregation == "sum":
        return Merge.SUM
    if variable.aggregation == "only_first_replica" or "float" not in variable.dtype:
        return Merge.FIRST
    return Merge.MEAN


def _keras_step(model: keras.Model, kind: str) -> KerasStep:
    if kind == "train":
        return model.train_step
    if kind == "test":
        return model.test_step

    def predict_step(state: Any, data: Any) -> tuple[Any, Any]:
        outputs, non_trainable = model.predict_step(state, data)
        return outputs, (state[0], non_trainable)

    return predict_step


def _without_aliases(state: Any) -> tuple[Any, ...]:
    """An array that stands twice in a state (Keras leaves averages so) cannot be given away twice: copy the second."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if id(leaf) in seen:
            return jax.numpy.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, tuple(state))


def _changes(old: Any, new: Any) -> list[list[Any]]:
    """The new values, with None for each that is the old one."""
    return [
        [None if after is before else after for before, after in zip(*parts, strict=True)]
        for parts in zip(old, new, strict=True)
    ]


def _updated(old: Any, changes: Any) -> list[list[Any]]:
    """The opposite of :func:`_changes`."""
    return [
        [before if after is None else after for before, after in zip(*parts, strict=True)]
        for parts in zip(old, changes, strict=True)
    ]


def _last(results: list[Any]) -> Any:
    return results[-1]


def _concatenated(results: list[Any]) -> Any:
    return results[0] if len(results) == 1 else jax.tree.map(lambda *parts: jax.numpy.concatenate(parts), *results)
