"""The functions that Keras's ``fit``, ``evaluate`` and ``predict`` call: ``(state, iterator) -> (logs, state)``.

Keras keeps its loop, callbacks, history and progress bar, and its ``train_step`` or the user's. The step is traced on the global
batch; only the forward passes inside it, of the model and of models within it, are replaced (:class:`_ForwardInterceptor`). Loss,
metrics, loss scale of mixed precision, clipping, accumulation and update are therefore Keras's own code on the global batch, on every
device alike.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import keras
import numpy as np

from lockstep._keras import trainer
from lockstep._keras.batch_normalization import clear_synchronized, observe_moments, unsynchronized_normalizations
from lockstep._keras.graph import forget_losses, global_batch_reason, models_of
from lockstep._keras.patches import LAYER_CALL, REMATERIALIZED_CALL, STATELESS_CALL, patched_method, value_in_context
from lockstep.data.prefetch import is_reading_ahead
from lockstep.data.random_state import capture_random_state, restore_random_state
from lockstep.devices.names import device_name
from lockstep.devices.placement import PlacedRows, Placement, is_rows
from lockstep.execution.call_splitter import (
    CannotSplitError,
    ModelCall,
    infer_output_spec,
    join,
    merges_with,
    split,
    trace_call,
)
from lockstep.execution.compiled_step import Step, dispatch_lock
from lockstep.execution.executors import EagerExecutor, Executor, SpmdExecutor
from lockstep.execution.interrupts import InterruptGuard
from lockstep.execution.nonfinite_gate import GatedStep, NonFiniteGate
from lockstep.execution.spmd import SpmdForward
from lockstep.execution.step_hooks import StepHook
from lockstep.execution.step_loop import STATE, StepLoop, StepPrograms, first_result

_in_step = ContextVar("_in_step", default=False)


def in_step() -> contextlib.AbstractContextManager[None]:
    """Mark the code that runs inside as part of a Keras step, or of what Keras runs to build a model for one."""
    return value_in_context(_in_step, True)


def is_in_step() -> bool:
    """Return whether a Keras step is being traced or run: a loss there is that of all rows, and losses of layers are averaged already."""
    return _in_step.get()


class StepFunctions:
    """Builds the train, test and predict function of one model under one strategy; ``hooks`` are called around each step, in this order."""

    def __init__(
        self,
        model: keras.Model,
        placement: Placement,
        executor: Executor,
        log: Callable[[str], None],
        hooks: Iterable[StepHook] = (),
    ) -> None:
        self.model = model
        self.placement = placement
        self.executor = executor
        self.log = log
        self.hooks = tuple(hooks)
        self.interrupts = InterruptGuard()

    @contextlib.contextmanager
    def hooked(self, *hooks: StepHook) -> Iterator[None]:
        """Call ``hooks`` after the others while this context is open."""
        before = self.hooks
        self.hooks = (*before, *hooks)
        try:
            yield
        finally:
            self.hooks = before

    def pause(self) -> None:
        """Call ``on_pause`` of all hooks."""
        for hook in self.hooks:
            hook.on_pause()

    def validation_begins(self) -> None:
        """Call ``on_validation`` of all hooks."""
        for hook in self.hooks:
            hook.on_validation()

    def allows_checkpoint(self) -> bool:
        """Return whether all hooks allow a checkpoint now."""
        return all(hook.allows_checkpoint() for hook in self.hooks)

    def newest_state(self) -> Any:
        """Return the newest training state if other processes hold it, else None."""
        return first_result([hook.newest_state for hook in reversed(self.hooks)])

    def make(self, kind: str) -> StepLoop:
        """Return the function for ``kind`` ("train", "test" or "predict") of the model as it is compiled now."""
        gated, multi_step = functools.cache(self._compile_gated_step), functools.cache(self._compile_multi_step)
        programs = StepPrograms(self._compile_step(kind), gated, multi_step)
        return StepLoop(self.model, kind, programs, lambda: self.hooks, self.placement.devices, self.interrupts)

    @contextlib.contextmanager
    def failures_raised(self) -> Iterator[None]:
        """Raise at the end of this context, which is that of a call, the error of a step that failed in it: see :meth:`StepLoop.raise_failure`.

        After another exception, such as that of a callback, the model has the values of the last step.
        """
        try:
            yield
            for loop in self._loops():
                loop.raise_failure()
        except BaseException:
            trainer.end_state(self.model)
            raise
        finally:  # After another error no later call hears of that step.
            for loop in self._loops():
                loop.forget_last()

    def _loops(self) -> list[StepLoop]:
        functions = [getattr(self.model, f"{kind}_function") for kind in STATE]
        return [function for function in functions if isinstance(function, StepLoop)]

    def _compile_step(self, kind: str) -> Step:
        executor = self._select_executor()
        return executor.compile(self.build_step(executor, kind), kind)

    def _compile_gated_step(self) -> GatedStep:
        executor = self._select_executor()
        gate = NonFiniteGate(donated=executor is self.executor)
        return GatedStep(executor.compile(self.build_step(executor, "train"), "train", gate), gate)

    def _compile_multi_step(self) -> Step | None:
        executor = self._select_executor()
        if not isinstance(executor, SpmdExecutor) or not executor.scans_steps:
            return None
        return executor.compile_multi_step(self.build_step(executor, "train"))

    def _select_executor(self) -> Executor:
        if trainer.is_compiled(self.model):
            return self.executor
        device = self.executor.eager_device
        self.log(f"it is not compiled, so its replicas run one after the other, on {device_name(device)}")
        return EagerExecutor(device)

    def build_step(self, executor: Executor, kind: str) -> Step:
        """Return the step of ``kind`` whose forward passes are run by ``executor``, to be compiled."""
        keras_step = _keras_step(self.model, kind)

        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            reason, is_split = global_batch_reason(self.model), self.placement.replicas > 1
            interceptor = _ForwardInterceptor(
                self.model, self.placement, executor, self.log, splits=is_split and not reason
            )
            if reason and is_split:
                self.log(f"it runs on the global batch, {self.executor.global_batch_note}: {reason}")
            data = jax.tree.map(interceptor.global_batch, batch, is_leaf=is_rows)
            with self._intercepted(interceptor, sees_global_batch=reason is not None):
                return keras_step(state, data)

        return step

    @contextlib.contextmanager
    def _intercepted(self, interceptor: "_ForwardInterceptor", sees_global_batch: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(dispatch_lock)  # Others would find, and restore, what is replaced here.
            stack.enter_context(in_step())
            if sees_global_batch:
                stack.enter_context(clear_synchronized(self.model))
            models = models_of(self.model)
            stack.enter_context(
                patched_method(STATELESS_CALL, models, functools.partial(functools.partial, interceptor.call))
            )
            stack.enter_context(patched_method(LAYER_CALL, models, interceptor.wrap_direct_call))
            stack.enter_context(patched_method(REMATERIALIZED_CALL, models, _rematerializing_anew))
            yield


class _ForwardInterceptor:
    """Replacement for ``stateless_call`` of a model and of models within it, while one step is traced: the same results, by replicas or, without
    ``splits``, on the global batch.
    """

    def __init__(
        self, model: keras.Model, placement: Placement, executor: Executor, log: Callable[[str], None], *, splits: bool
    ) -> None:
        self.model, self.placement, self.executor, self.log, self._splits = model, placement, executor, log, splits
        self._is_in_call = False  # inside a call of a model, which may call other models
        self._placed: dict[int, tuple[jax.Array, PlacedRows]] = {}
        self._rows: int | None = None  # of the step's batch
        self._undivided: list[keras.Model] = []  # whose stateless_call runs on the global batch, too

    def global_batch(self, leaf: Any) -> Any:
        """Return the global array of a leaf of the step's batch; remember its rows, and where they are, for the forward pass."""
        array = leaf
        if isinstance(leaf, PlacedRows):
            array = self.executor.global_batch(leaf)
            self._placed[id(array)] = (array, leaf)
        self._rows = next(iter(np.shape(array)), self._rows)
        return array

    def call(
        self,
        model: keras.Model,
        original: Callable[..., Any],
        trainable_variables: list[Any],
        non_trainable_variables: list[Any],
        *args: Any,
        return_losses: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return what ``original``, the model's ``stateless_call``, returns: outputs, new non-trainable values, and losses if asked for."""
        values = list(trainable_variables), list(non_trainable_variables)
        function: Callable[..., Any] = functools.partial(self._run_original, model, original)
        if self._is_in_call:
            return function(*values, *args, return_losses=return_losses, **kwargs)
        function = function if is_reading_ahead() else _drawing_alike(function)
        call = ModelCall.from_arguments(model, function, *values, (args, kwargs), return_losses, self._rows)
        found = self._call_split(call) if self._splits else self.executor.call_whole(call, self._placed_inputs(call))
        return found if return_losses else found[:2]

    def _call_split(self, call: ModelCall) -> tuple[Any, list[Any], list[Any]]:
        """Make a call by calls of the replicas; return outputs, new non-trainable values, and losses."""
        model, whole = call.model, None
        # Keras warns when it calls a model, and a compiled model is called in a trace: only the first trace shows warnings.
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in call.leaves)
        with contextlib.ExitStack() as quiet:
            try:
                if model is not self.model and not self.executor.supports_second_derivatives:
                    raise CannotSplitError("with deterministic=True only the model itself is run by replicas")
                layout = self.placement.layout(call.rows)
                if len(layout.busy_replicas) < 2:  # There are no rows, or one replica has them all.
                    return self.executor.call_whole(call, self._placed_inputs(call))
                with _warnings(is_traced):
                    whole = trace_call(call)
                quiet.enter_context(_warnings(not is_traced))
                sizes = self.executor.partition_calls(layout, whole)
                if sum(map(len, sizes)) == 1:  # Nothing in the call depends on the replica.
                    return self.executor.call_whole(call, self._placed_inputs(call))
                with _warnings(False):
                    spec = infer_output_spec(call, whole, {rows for device in sizes for rows in device if rows})
            except CannotSplitError as reason:
                self._undivided.append(model)
                found = self.executor.call_whole(call, self._placed_inputs(call))
                subject = "it" if model is self.model else f"model {model.name!r} within it"
                self.log(f"{subject} {self._on_global_batch(unsynchronized_normalizations(model))}: {reason}")
                return found
            forward = SpmdForward(
                model,
                split(spec, call),
                merges_with(model.non_trainable_variables, spec.first_state),
                call.trainable,
                call.non_trainable,
                call.shared,
                layout,
                sizes,
                whole.operations,
                spec.allows_padding,
            )
            result = self.executor.forward(forward, call.inputs, self._placed_inputs(call))
        outputs, losses = join(spec, result)
        return outputs, result.state, losses

    def _on_global_batch(self, normalizations: Sequence[Any]) -> str:
        normalized = ", BatchNormalization included" if normalizations else ""
        return f"runs on the global batch{normalized}, {self.executor.global_batch_note}"

    def _placed_inputs(self, call: ModelCall) -> list[PlacedRows | None]:
        return [self._placed.get(id(leaf), (None, None))[1] for leaf in call.inputs]

    def wrap_direct_call(self, model: keras.Model, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method ``call`` of a model, which logs if a step calls it instead of ``stateless_call``."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            run = functools.partial(self._run_original, model, original, *args, **kwargs)
            if self._is_in_call or not self._splits or model in self._undivided:
                return run()
            with observe_moments(model) as normalizing:
                found = run()
            known = "" if self.executor.supports_second_derivatives else ", unless it is differentiated twice"
            self.log(
                f"model {model.name!r} is called directly, and so {self._on_global_batch(normalizing)}. "
                f"To have it run by replicas, call its stateless_call{known}"
            )
            return found

        return call

    def _run_original(self, model: keras.Model, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._is_in_call:
            forget_losses(model)
        before, self._is_in_call = self._is_in_call, True
        try:
            return original(*args, **kwargs)
        finally:
            self._is_in_call = before


def _rematerializing_anew(_: keras.Model, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``rematerialized_call`` that hands a new function to ``jax.checkpoint``, as Keras's bound methods are."""

    def rematerialized_call(layer_call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(functools.partial(layer_call), *args, **kwargs)

    return rematerialized_call


def _drawing_alike(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose calls all draw the same numbers from the global generators; only the first changes their state.

    Replicas, and the traces for the proof, call the model's code several times where one device calls it once.
    """
    begun, calls = capture_random_state(), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls, present = calls + 1, capture_random_state()
        restore_random_state(begun)
        try:
            return function(*args, **kwargs)
        finally:
            if calls > 1:
                restore_random_state(present)

    return call


def _warnings(shown: bool) -> contextlib.AbstractContextManager[Any]:
    """Show or suppress warnings of the code inside."""
    return contextlib.nullcontext() if shown else warnings.catch_warnings(action="ignore")


def _keras_step(model: keras.Model, kind: str) -> Step:
    if kind == "train":
        return model.train_step
    if kind == "test":
        return model.test_step

    def predict_step(state: Any, data: Any) -> tuple[Any, Any]:
        outputs, non_trainable = model.predict_step(state, data)
        return outputs, (state[0], non_trainable)

    return predict_step
