"""The functions that Keras's ``fit``, ``evaluate`` and ``predict`` call: ``(state, iterator) -> (logs, state)``.

Keras keeps its loop, callbacks, history and progress bar, and its ``train_step``, also one that a user wrote: it is
traced on the global batch, and only the forward passes inside it, of the model and of models within it, are taken over (:class:`_Forwarder`). Loss,
metrics, clipping, accumulation and update therefore are Keras's own code on the global batch, on every device alike.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import keras

from lockstep._keras import trainer
from lockstep._keras.layers import models_within, replaced_call, replaced_methods
from lockstep.data.device_placement import PlacedRows, Placement
from lockstep.data.keras_adapter import next_batch
from lockstep.devices.names import device_name
from lockstep.execution.call_splitter import CallSplitter, CannotSplitError, merge_of
from lockstep.execution.executors import EagerExecutor, Executor
from lockstep.execution.nonfinite_gate import GatedStep
from lockstep.execution.spmd import SpmdForward

__all__ = ["STATE", "StepFunctions", "StepListener", "in_step", "is_in_step", "trace_for"]

STATE = {
    "train": ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables"),
    "test": ("trainable_variables", "non_trainable_variables", "metrics_variables"),
    "predict": ("trainable_variables", "non_trainable_variables"),
}

KerasStep = Callable[[Any, Any], tuple[Any, Any]]  # (state, data) -> (logs or outputs, state)


# JAX keeps traces of compiled functions, and these may ask for the strategy or the replica. So it keeps those in a scope for the number of
# replicas, those of a replica for one trace, and those of a step, wherever that stands, as without a strategy.
trace_for = jax.make_user_context(None)
_in_step = ContextVar("_in_step", default=False)


@contextlib.contextmanager
def in_step() -> Iterator[None]:
    """While it is open, code is part of a step of Keras, or of what Keras runs to build a model for one."""
    token = _in_step.set(True)
    try:
        yield
    finally:
        _in_step.reset(token)


def is_in_step() -> bool:
    """Whether a step of Keras is being traced or run: a loss there is that of all rows, and what layers add is averaged already."""
    return _in_step.get()


class StepListener:
    """Is told of each step, in the thread that starts it; this one does nothing."""

    def reads(self) -> None:
        """The next batch is waited for."""

    def begins(self, model: keras.Model, kind: str, batch: Any) -> None:
        """A step of ``kind`` ("train", "test" or "predict") is about to be started, or compiled first."""

    def ended(self, model: keras.Model, kind: str, state: Any, logs: Any) -> None:
        """It was started; ``state`` is what it will have left, and ``logs`` what it will give, or its outputs."""

    def pauses(self) -> None:
        """Something else is done now, which may take as long as compiling does."""


class StepFunctions:
    """Builds the train, test and predict function of one model under one strategy.

    Args:
        model: a Keras model.
        placement: devices and number of replicas.
        plan: how compiled steps are run.
        tell: is given a sentence wherever the model does not run in the usual way.
        listener: is told of each step.
    """

    def __init__(
        self,
        model: keras.Model,
        placement: Placement,
        plan: Executor,
        tell: Callable[[str], None],
        listener: StepListener,
    ) -> None:
        self.model = model
        self.placement = placement
        self.plan = plan
        self.tell = tell
        self.listener = listener
        self.skipped: Callable[[], Any] = lambda: None  # logs, where an earlier process has done a training step
        self.stepped: Callable[[Any], None] = lambda state: None  # is told what a training step will have left
        self.watch: Callable[[GatedStep, Any, Any], tuple[Any, Any]] | None = (
            None  # makes the training steps, if there is one
        )

        self.elsewhere: KerasStep | None = None  # makes the training steps, where other processes do
        self.settle: Callable[[], Any] = lambda: None  # then gives what they have made of the state

    def make(self, kind: str) -> Callable[[Any, Iterator[Any]], tuple[Any, Any]]:
        """The function for ``kind`` ("train", "test" or "predict") of the model as it is compiled now."""
        step, gated = self._step(kind), functools.cache(self._gated_step)
        combine = _concatenated if kind == "predict" else _last
        last = None  # what the last step gave

        def function(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
            nonlocal last
            if kind == "train" and (logs := self.skipped()) is not None:
                return logs, state
            results = []
            try:
                for position in range(self.model.steps_per_execution):
                    self.listener.reads()
                    try:
                        batch = next_batch(iterator, last)
                    except StopIteration:
                        if position:
                            break  # The input ends within the steps of one call.
                        raise
                    self.listener.begins(self.model, kind, batch)
                    with trace_for(None):
                        if kind == "train" and self.watch:
                            last, state = self.watch(gated(), state, batch)
                        else:
                            own = self.elsewhere if kind == "train" else None
                            last, state = (own or step)(state, batch)
                    self.listener.ended(self.model, kind, state, last)
                    if kind == "train":
                        self.stepped(state)
                    results.append(last)
            except BaseException:
                trainer.keep_values(self.model, STATE[kind], state)
                raise
            return combine(results), state

        return function

    def _step(self, kind: str) -> KerasStep:
        plan = self._compiling_plan()
        return plan.compile(self.step_by(plan, kind), kind)

    def _gated_step(self) -> GatedStep:
        plan = self._compiling_plan()
        step = self.step_by(plan, "train")
        return GatedStep(lambda gate: plan.compile(step, "train", gate), donated=plan is self.plan)

    def _compiling_plan(self) -> Executor:
        if not self.model.run_eagerly and self.model.jit_compile:
            return self.plan
        device = self.plan.uncompiled_on
        self.tell(f"it is not compiled, so its replicas run one after the other, on {device_name(device)}")
        return EagerExecutor(device)

    def step_by(self, plan: Executor, kind: str) -> KerasStep:
        """The step of ``kind`` whose forward pass is done by ``plan``, to be compiled."""
        keras_step = _keras_step(self.model, kind)

        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            forwarder = _Forwarder(self.model, self.placement, plan, self.tell)
            data = jax.tree.map(forwarder.joined, batch, is_leaf=lambda leaf: isinstance(leaf, PlacedRows))
            with self._forward_pass(forwarder):
                return keras_step(state, data)

        return step

    @contextlib.contextmanager
    def _forward_pass(self, forwarder: "_Forwarder") -> Iterator[None]:
        reason = trainer.needs_global_batch(self.model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(in_step())
            if reason:
                self.tell(f"it runs on the global batch, {self.plan.of_global_batch}: {reason}")
                stack.enter_context(trainer.plain_batch_normalization(self.model))
            models = [] if reason else models_within(self.model)
            for model in models:
                call = functools.partial(forwarder.call, model, model.stateless_call)
                stack.enter_context(replaced_call(model, call))
            stack.enter_context(replaced_methods(models, "call", forwarder.called_directly))
            yield


class _Forwarder:
    """Stands in for ``stateless_call`` of a model, and of models within it, while one step is traced: the same results, by replicas."""

    def __init__(self, model: keras.Model, placement: Placement, plan: Executor, tell: Callable[[str], None]) -> None:
        self.model, self.placement, self.plan, self.tell = model, placement, plan, tell
        self._is_inside = False  # a call that is being made; it may call models in its turn
        self._places: dict[int, tuple[jax.Array, PlacedRows]] = {}

    def joined(self, leaf: Any) -> Any:
        """The global array of a leaf of a placed batch; its places are remembered for the forward pass."""
        if not isinstance(leaf, PlacedRows):
            return leaf
        array = self.plan.joined(leaf)
        self._places[id(array)] = (array, leaf)
        return array

    def call(
        self,
        model: keras.Model,
        own: Callable[..., Any],
        trainable_variables: list[Any],
        non_trainable_variables: list[Any],
        *args: Any,
        return_losses: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As ``own``, which is the model's ``stateless_call``: outputs and new non-trainable values, and losses if asked for."""
        values = list(trainable_variables), list(non_trainable_variables)
        original = functools.partial(self._inside, own)
        if self._is_inside:
            return original(*values, *args, return_losses=return_losses, **kwargs)
        # Keras warns where it calls a model. A model that is compiled is called in a trace, so the first one warns.
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args))
        with contextlib.ExitStack() as quiet:
            try:
                if model is not self.model and not self.plan.is_differentiable_twice:
                    raise CannotSplitError("with deterministic=True only the model itself is run by replicas")
                split = CallSplitter(model, original, (args, kwargs))
                layout = self.placement.layout(split.rows)
                if len(layout.busy_replicas) < 2:  # No rows, or all in one replica: nothing to take apart.
                    return original(*values, *args, return_losses=return_losses, **kwargs)
                with _warnings(is_traced):
                    split.look(*values)
                quiet.enter_context(_warnings(not is_traced))
                calls = self.plan.calls_of(layout, split)
                if sum(map(len, calls)) == 1:  # One call, and nothing in it tells replicas apart.
                    return original(*values, *args, return_losses=return_losses, **kwargs)
                with _warnings(False):
                    split.learn({rows for own in calls for rows in own if rows})
            except CannotSplitError as reason:
                normalized = ", BatchNormalization included" if trainer.unsynchronized_normalizations(model) else ""
                who = "it" if model is self.model else f"model {model.name!r} within it"
                self.tell(f"{who} runs on the global batch{normalized}, {self.plan.of_global_batch}: {reason}")
                return original(*values, *args, return_losses=return_losses, **kwargs)
            merges = tuple(merge_of(variable) for variable in model.non_trainable_variables)
            places = [self._places.get(id(leaf), (None, None))[1] for leaf in split.inputs]
            forward = SpmdForward(split, merges, *values, split.shared, layout, calls, split.operations)
            result = self.plan.forward(forward, split.inputs, places)
        outputs, losses = split.joined(result)
        return (outputs, result.state, losses) if return_losses else (outputs, result.state)

    def called_directly(self, model: keras.Model, own: Callable[..., Any]) -> Callable[..., Any]:
        """The method ``call`` of a model, which says so where a step calls it and not ``stateless_call``."""

        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_inside and self.placement.replicas > 1:
                self.tell(
                    f"model {model.name!r} is called directly, and so runs on the global batch, {self.plan.of_global_batch}. To have it run "
                    "by replicas, call its stateless_call"
                )
            return self._inside(own, *args, **kwargs)

        return call

    def _inside(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self._is_inside = self._is_inside, True
        try:
            return own(*args, **kwargs)
        finally:
            self._is_inside = before


def _warnings(come: bool) -> contextlib.AbstractContextManager[Any]:
    """What is within warns, or, where it is only looked at, does not."""
    return contextlib.nullcontext() if come else warnings.catch_warnings(action="ignore")


def _keras_step(model: keras.Model, kind: str) -> KerasStep:
    if kind == "train":
        return model.train_step
    if kind == "test":
        return model.test_step

    def predict_step(state: Any, data: Any) -> tuple[Any, Any]:
        outputs, non_trainable = model.predict_step(state, data)
        return outputs, (state[0], non_trainable)

    return predict_step


def _last(results: list[Any]) -> Any:
    return results[-1]


def _concatenated(results: list[Any]) -> Any:
    return results[0] if len(results) == 1 else jax.tree.map(lambda *parts: jax.numpy.concatenate(parts), *results)
