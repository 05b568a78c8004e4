"""What every strategy has: devices, replicas, and a scope in which models become its own."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh

from lockstep._errors import ModelError, ScopeError, whole_number
from lockstep._keras import trainer
from lockstep._keras.layers import global_batch_reason, unsynchronized_normalizations
from lockstep._keras.trainer import patched_stateless_call
from lockstep._logging import log_info
from lockstep.collectives import CrossDeviceOps, Ops
from lockstep.custom_loops.model_in_replica import call_on_replica
from lockstep.custom_loops.replica_context import ReplicaContext, ReusableContext, open_scopes
from lockstep.data.device_placement import DEVICE_AXIS, Placement
from lockstep.data.fit_entry import InputFactory, InputOptions, ProcessGroup
from lockstep.devices.cpu_devices import has_started
from lockstep.devices.determinism import describe_determinism, is_deterministic, prepare_determinism
from lockstep.devices.memory import keep_memory
from lockstep.devices.names import device_name
from lockstep.doctor.fit_checks import FitChecks
from lockstep.execution.executors import DeterministicExecutor, Executor, SpmdExecutor
from lockstep.execution.train_functions import StepFunctions, StepHook, in_step, trace_context
from lockstep.fit.checkpointing.backup_and_restore import SaveFrequency
from lockstep.fit.checkpointing.checkpoint_hook import CheckpointHook
from lockstep.fit.checkpointing.loop_checkpoint import Checkpoint
from lockstep.fit.hooks import CallbackHooks, FitContext, FitHook, entered
from lockstep.fit.monitoring.monitor_hook import MonitorHook
from lockstep.fit.nan_guard.nan_guard import NanGuardHook
from lockstep.strategies.device_override import as_imposed, is_out_of_use
from lockstep.strategies.diagnostics import Diagnostics
from lockstep.strategies.validation import options_of, refuse_with_slices, resolve_ops

__all__ = ["Strategy"]

_FUNCTIONS = "_lockstep_functions"


def _current() -> "Strategy | None":
    scopes = open_scopes.get()
    return scopes[-1] if scopes else None


def _current_claim() -> trainer.Claim | None:
    strategy = _current()
    return strategy._claim if strategy and not is_out_of_use() else None


class Strategy(Diagnostics):
    """Base class of the strategies: synchronous data parallelism over a mesh of devices."""

    # Hooks around a call of ``fit``, the outermost first. The step hooks that they add are called in the same order, after those of
    # ``_step_hooks``.
    _fit_hooks: tuple[FitHook, ...] = (
        # First, to time all steps and to report how the call has ended, whichever hook raised. It adds callbacks to their list.
        MonitorHook(),
        # Hooks of the user's callbacks: within the timer, and while they may still add callbacks to the list.
        CallbackHooks(),
        # Replaces the list by a CallbackList that skips steps, so it comes after all hooks that add callbacks. Its step hook counts a
        # step after the hooks before have seen it: if one of them raises, no checkpoint counts that step.
        CheckpointHook(),
        # Last, as a rollback needs the checkpoints of the hook before, and as it replaces the step itself.
        NanGuardHook(),
    )

    def __init__(
        self,
        find_devices: Callable[[], Sequence[jax.Device]],
        cross_device_ops: Ops | None,
        replicas: int | None,
        deterministic: bool | None,
        shard_optimizer: bool,
        input_options: InputOptions | None,
    ) -> None:
        trainer.check_keras()
        self._deterministic = is_deterministic() if deterministic is None else bool(deterministic)
        self._ops = resolve_ops(cross_device_ops, self._deterministic)
        self._shard_optimizer = bool(shard_optimizer)
        if shard_optimizer:
            refuse_with_slices(self._ops, self._deterministic)
        if replicas is not None:
            replicas = whole_number("replicas", replicas)
        if self._deterministic:
            prepare_determinism()
        if not has_started():  # Later its threads would have heaps of their own.
            keep_memory()
        find_devices, replicas = as_imposed(type(self).__name__, find_devices, replicas)
        found = find_devices()
        mesh = Mesh(np.asarray(found), (DEVICE_AXIS,))
        self._placement = Placement(mesh, replicas or len(found))
        self._models: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self._own_calls: dict[keras.Model, Any] = {}  # of the models, while replicas run
        self._input_options = options_of(input_options)
        observer = FitChecks(self._setting(), self._tell)
        self._inputs = InputFactory(
            self._placement, self._input_options, self._process_group, self._around_fit, observer
        )
        self._announce(self._summary())

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices, for example ``("gpu:0", "gpu:1")``."""
        return tuple(device_name(device) for device in self._placement.devices)

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """How the devices' gradients are added."""
        return self._ops

    @property
    def deterministic(self) -> bool:
        """Whether a step has the same bits on any number of devices."""
        return self._deterministic

    def scope(self) -> ReusableContext["Strategy"]:
        """Make every model that is built, loaded or compiled in this context train under the strategy.

        A model remembers its strategy: ``fit``, ``evaluate`` and ``predict`` work inside and outside. The same
        strategy may be entered again inside. Nothing is left behind when the context closes.

        Returns:
            A context manager that gives the strategy; it may be entered again.

        Raises:
            ScopeError: when it is entered: another strategy's scope is open, or a ``keras.distribution`` is active.

        Example:
            >>> import keras, lockstep
            >>> strategy = lockstep.MirroredStrategy()
            >>> with strategy.scope():
            ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        """
        return ReusableContext(self._scope)

    @contextlib.contextmanager
    def _scope(self) -> Iterator["Strategy"]:
        outer = _current()
        if outer not in (None, self):
            raise ScopeError(
                f"Strategies cannot be mixed: the scope of {outer} is open, and {self} was entered inside. Close the "
                "first scope before opening the second."
            )
        _refuse_distribution()
        open_scopes.set((*open_scopes.get(), self))
        try:
            with trainer.claim_models(_current_claim), trace_context(self.num_replicas_in_sync):
                yield self
        finally:
            scopes = list(open_scopes.get())
            if self in scopes:
                scopes.remove(self)
            open_scopes.set(tuple(scopes))

    def checkpoint(self, directory: str | os.PathLike[str], save_freq: str | int = 1, keep: int = 3) -> Checkpoint:
        """Checkpoints for a loop of one's own, written while it runs.

        Args:
            directory: where they are; one for each run.
            save_freq: how many steps, or how long, from one to the next: 100, or ``"10min"``.
            keep: how many of the newest stay.

        Returns:
            A context manager that restores and saves; at its end all is written.

        Raises:
            CheckpointError: another job writes there, or nobody can.
            OptionError: ``save_freq`` or ``keep`` is out of its range.

        Example:
            >>> import jax.numpy as jnp, lockstep, tempfile
            >>> strategy = lockstep.MirroredStrategy(replicas=2)
            >>> folder = tempfile.TemporaryDirectory()
            >>> for stop in 3, 5:  # The second loop goes on where the first has stopped.
            ...     with strategy.checkpoint(folder.name) as checkpoint:
            ...         state, start = checkpoint.restore(jnp.zeros(2))
            ...         for step in range(start, stop):
            ...             state = state + 1
            ...             checkpoint.save(step + 1, state)
            >>> start, state.tolist()
            (3, [5.0, 5.0])
            >>> folder.cleanup()
        """
        return Checkpoint(
            directory, SaveFrequency(save_freq), keep, self._placement, self._process_group, self._announce
        )

    def _executor_for(self, placement: Placement, model: keras.Model) -> Executor:
        """How the steps of a model run."""
        return (
            DeterministicExecutor(placement)
            if self._deterministic
            else SpmdExecutor(placement, self._ops, shard_optimizer=self._shard_optimizer)
        )

    def _claim(self, model: keras.Model) -> None:
        """Make a model that belongs to nobody yet this strategy's, for good."""
        if trainer.strategy_of(model) is not None:
            _refuse_other_scope(model, trainer.strategy_of(model))
            return
        told: set[str] = set()

        def tell(reason: str) -> None:
            if reason not in told:
                told.add(reason)
                self._announce(f"Model {model.name!r}: {reason}.")

        executor = self._executor_for(self._placement, model)
        functions = StepFunctions(model, self._placement, executor, tell, self._step_hooks)
        vars(model)[_FUNCTIONS] = functions  # There, as they hold the model: both are freed together.

        def make(kind: str) -> Any:
            _refuse_other_scope(model, self)
            _refuse_distribution()
            _refuse_mixed_normalization(model)
            for note in notes:
                tell(note)
            return functions.make(kind)

        trainer.attach_strategy(model, self, make, in_step)
        notes = self._inputs.install(model, tell)
        self._models.add(model)

    def _functions_of(self, model: keras.Model) -> StepFunctions:
        """What makes the steps of a model that is this strategy's."""
        return vars(model)[_FUNCTIONS]

    @cached_property
    def _process_group(self) -> ProcessGroup:  # type: ignore[override]  # made when it is first asked for
        """What happens around each call of fit, evaluate and predict, and around distributed data sets."""
        return ProcessGroup()

    @cached_property
    def _step_hooks(self) -> tuple[StepHook, ...]:
        """What is called around every step of all models of the strategy, in and outside ``fit``."""
        return ()

    def _around_fit(self, model: keras.Model, arguments: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        setup = {"replicas": self.num_replicas_in_sync, "deterministic": self.deterministic}
        functions = self._functions_of(model)
        context = FitContext(model, arguments, functions, self._placement, self._process_group, setup, self._announce)
        return entered(self._fit_hooks, context)

    def _announce(self, message: str) -> None:
        log_info(message)

    @contextlib.contextmanager
    def _models_in_replica(self, context: ReplicaContext) -> Iterator[None]:
        # A merge call may run replicas in its turn, and these are no part of those around it.
        is_outermost = not self._own_calls
        with contextlib.ExitStack() as stack:
            if is_outermost:
                stack.callback(self._own_calls.clear)
                self._own_calls.update((model, model.stateless_call) for model in self._models)
            for model, own in list(self._own_calls.items()):
                stack.enter_context(patched_stateless_call(model, call_on_replica(model, own, context)))
            yield

    def __repr__(self) -> str:
        return f"{type(self).__name__}(devices={list(self.devices)}, replicas={self.num_replicas_in_sync})"

    def _summary(self) -> str:
        devices, replicas = self.devices, self.num_replicas_in_sync
        text = f"{type(self).__name__}: {_counted(replicas, 'replica')} on {_counted(len(devices), 'device')} "
        text += f"({', '.join(devices)})"
        if len(devices) > 1:
            text += f"; gradients: {self._ops.describe(self._placement.devices)}"
        if self._shard_optimizer:
            text += "; each device keeps and updates a slice of the optimizer's variables"
        if self._deterministic:
            text += f"; {describe_determinism(self._placement.devices[0])}"
        if len(devices) > replicas:
            text += f"; {_counted(len(devices) - replicas, 'device')} without a replica will be idle"
        return text


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _refuse_other_scope(model: keras.Model, owner: "Strategy") -> None:
    inside = _current()
    if inside not in (None, owner):
        raise ScopeError(
            f"Model {model.name!r} was made under {owner} and is used in the scope of {inside}. Use it outside that "
            "scope, or build or load it again inside."
        )


def _refuse_distribution() -> None:
    if keras.distribution.distribution() is not None:
        raise ScopeError(
            "A keras.distribution is active, which would distribute the same model a second time. Remove it with "
            "keras.distribution.set_distribution(None)."
        )


def _refuse_mixed_normalization(model: keras.Model) -> None:
    reason = global_batch_reason(model)
    alone = unsynchronized_normalizations(model)
    if reason and alone:
        raise ModelError(
            f"Model {model.name!r} mixes two ways to split a batch: {reason}, but layer {alone[0]!r} normalizes each "
            "replica's rows on its own. Give every BatchNormalization synchronized=True."
        )
