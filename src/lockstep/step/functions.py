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

from lockstep import _keras
from lockstep.collectives import CrossDeviceOps
from lockstep.data.placement import Placement, Rows, joined
from lockstep.step.devices import Forward, forward_eagerly, forward_on_devices
from lockstep.step.replica import Merge, Result
from lockstep.step.splitting import CannotSplit, SplitCall, merge_of
from lockstep.topology.devices import device_name
from lockstep.topology.layout import Layout

__all__ = ["STATE", "StepFunctions"]

STATE = {
    "train": ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables"),
    "test": ("trainable_variables", "non_trainable_variables", "metrics_variables"),
    "predict": ("trainable_variables", "non_trainable_variables"),
}

KerasStep = Callable[[Any, Any], tuple[Any, Any]]  # (state, data) -> (logs or outputs, state)

# Two threads that start steps on the same devices at once could start them in another order on each device, and their
# collectives would wait for each other for ever. A step that starts another one (a teacher, in a callback) may do so.
_dispatch_lock = threading.RLock()


class _PlacedState(tuple[Any, ...]):
    """State that a step of this strategy returned: it lies on the devices already."""

    __slots__ = ()


class StepFunctions:
    """Builds the train, test and predict function of one model under one strategy.

    Args:
        model: a Keras model.
        placement: devices and number of replicas.
        ops: adds up the gradients of the devices.
        tell: is given a sentence wherever the model does not run in the usual way.
    """

    def __init__(
        self, model: keras.Model, placement: Placement, ops: CrossDeviceOps, tell: Callable[[str], None]
    ) -> None:
        self.model = model
        self.placement = placement
        self.ops = ops
        self.tell = tell

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
        if _is_eager(self.model):
            return self._eager_step(keras_step)
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
            with _dispatch_lock if len(self.placement.devices) > 1 else contextlib.nullcontext():
                result, new = compiled(tuple(state), placed)
            return result, _PlacedState(new if kind == "train" else _updated(state, new))

        return step

    def _eager_step(self, keras_step: KerasStep) -> KerasStep:
        device = self.placement.devices[0]
        self.tell(f"it is not compiled, so its replicas run one after the other, on {device_name(device)}")

        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            with jax.default_device(device):
                return self._traced(keras_step, jax.device_put(_without_aliases(state), device), batch)

        return step

    def _traced(self, keras_step: KerasStep, state: Any, batch: Any, only_changes: bool = False) -> tuple[Any, Any]:
        forwarder = _Forwarder(self)
        data = jax.tree.map(forwarder.joined, batch, is_leaf=lambda leaf: isinstance(leaf, Rows))
        with self._forward_pass(forwarder):
            result, new = keras_step(state, data)
        return result, _changes(state, new) if only_changes else new

    def _forward_pass(self, forwarder: "_Forwarder") -> contextlib.AbstractContextManager[None]:
        reason = _keras.needs_global_batch(self.model)
        if reason:
            self.tell(f"it runs on the global batch, and XLA divides the work: {reason}")
            return _keras.plain_batch_normalization(self.model)
        return _keras.replaced_call(self.model, forwarder.stateless_call)


class _Forwarder:
    """Stands in for ``model.stateless_call`` while one step is traced: the same arguments and results, by replicas."""

    def __init__(self, functions: StepFunctions) -> None:
        self.model = functions.model
        self.original = functions.model.stateless_call
        self.placement = functions.placement
        self.ops = functions.ops
        self.tell = functions.tell
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
        values = list(trainable_variables), list(non_trainable_variables)
        try:
            split = SplitCall(self.original, (args, kwargs), lambda leaf: id(leaf) in self._places)
            layout = self.placement.layout(split.rows)
            if len(layout.busy_replicas) < 2:  # No rows, or all in one replica: nothing to take apart.
                return self.original(*values, *args, return_losses=return_losses, **kwargs)
            split.learn(*values, set(layout.busy_replicas))
        except CannotSplit as reason:
            normalized = ", BatchNormalization included" if _keras.unsynchronized_normalizations(self.model) else ""
            self.tell(f"it runs on the global batch{normalized}, and XLA divides the work: {reason}")
            return self.original(*values, *args, return_losses=return_losses, **kwargs)
        merges = tuple(merge_of(variable) for variable in self.model.non_trainable_variables)
        result = self._run(Forward(split, merges, *values, layout), split.inputs)
        self._tell_of_averages(merges, result.state, values[1])
        outputs, losses = split.joined(result)
        return (outputs, result.state, losses) if return_losses else (outputs, result.state)

    def _run(self, forward: Forward, inputs: list[Any]) -> Result:
        if _is_eager(self.model):
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

    def _tell_of_averages(self, merges: tuple[Merge, ...], new: list[Any], old: list[Any]) -> None:
        """Name the variables of somebody's own layers whose values were averaged because nothing else was said."""
        for variable, merge, *values in zip(self.model.non_trainable_variables, merges, new, old, strict=True):
            averaged = merge is Merge.MEAN and values[0] is not values[1]
            if averaged and _keras.has_no_stated_aggregation(self.model, variable):
                self.tell(
                    f"variable {variable.path!r} changes in the forward pass and does not say how replicas meet, so their "
                    'values are averaged by rows; give add_weight an aggregation: "mean", "sum" or "only_first_replica"'
                )


def _is_eager(model: keras.Model) -> bool:
    return bool(model.run_eagerly or not model.jit_compile)


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
