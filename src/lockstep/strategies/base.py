"""Base class of strategies, and the scope in which models become a strategy's own."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any, TypeVar

import keras
from jax.sharding import NamedSharding

from lockstep._errors import ModelError, ScopeError, file_path
from lockstep._keras import trainer
from lockstep._keras.batch_normalization import unsynchronized_normalizations
from lockstep._keras.graph import global_batch_reason, optimizer_variables
from lockstep._keras.patches import value_in_context
from lockstep._keras.variable_placement import VariableSharder, has_layout, lay_out
from lockstep._logging import counted, log_info, log_warning
from lockstep.custom_loops.replica_context import open_scopes
from lockstep.data.fit_wrapper import FitWrapper
from lockstep.data.process_group import ProcessGroup
from lockstep.devices.names import is_described, listed_devices
from lockstep.devices.placement import MeshPlacement, Placement, gather_on_host
from lockstep.devices.xla_flags import describe_determinism
from lockstep.doctor.check_lists import FitChecks
from lockstep.execution.executors import DeterministicExecutor, Executor, SpmdExecutor
from lockstep.execution.step_functions import StepFunctions, in_step
from lockstep.execution.step_hooks import StepHook
from lockstep.execution.step_loop import trace_context
from lockstep.execution.variable_layout import ModelLayout, layout_notes, layout_of
from lockstep.fit.checkpointing.backup_and_restore import SaveFrequency
from lockstep.fit.checkpointing.checkpoint_hook import CheckpointHook
from lockstep.fit.checkpointing.loop_checkpoint import Checkpoint
from lockstep.fit.fit_hooks import CallbackHooks, FitContext, FitHook, entered
from lockstep.fit.monitoring.monitor_hook import MonitorHook
from lockstep.fit.nan_guard import NanGuardHook
from lockstep.strategies.options import StrategyOptions, scopes_disabled
from lockstep.strategies.self_check import Diagnostics

Value = TypeVar("Value")

# Of the open scopes, which all are of one strategy. As they may close in any order, each leaves the one that was entered last.
_traced: ContextVar[tuple[contextlib.AbstractContextManager[None], ...]] = ContextVar("lockstep_traced", default=())


class ReusableContext(contextlib.AbstractContextManager[Value], contextlib.ContextDecorator):
    """A reentrant context manager, as the scopes of ``tf.distribute`` are: each entry makes a new one."""

    def __init__(self, new: Callable[[], contextlib.AbstractContextManager[Value]]) -> None:
        self._new, self._open = new, list[contextlib.AbstractContextManager[Value]]()

    def __enter__(self) -> Value:
        context = self._new()
        value = context.__enter__()
        self._open.append(context)
        return value

    def __exit__(self, *raised: Any) -> bool | None:
        return self._open.pop().__exit__(*raised)


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
    traced = trace_context(strategy.num_replicas_in_sync)
    traced.__enter__()
    _traced.set((*_traced.get(), traced))
    open_scopes.set((*open_scopes.get(), strategy))
    try:
        with trainer.claim_models(_current_claim, _current_sharder):
            yield strategy
    finally:
        scopes = list(open_scopes.get())
        if strategy in scopes:
            scopes.remove(strategy)
            *others, last = _traced.get()
            last.__exit__(None, None, None)
            _traced.set(tuple(others))
        open_scopes.set(tuple(scopes))


def check_model(model: keras.Model, owner: Any) -> None:
    """Refuse a model that cannot be run now: in another scope, with a ``keras.distribution``, or with mixed normalizations."""
    check_scope_of(model, owner)
    _check_no_distribution()
    reason = global_batch_reason(model)
    alone = unsynchronized_normalizations(model)
    if reason and alone and owner.num_replicas_in_sync > 1:
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


def _current_sharder() -> VariableSharder | None:
    strategy = _built_for.get() or _innermost()
    if strategy is None or scopes_disabled():
        return None
    is_sharded = strategy._shards_variables or (strategy._shard == "optimizer" and trainer.is_in_optimizer())
    return strategy._sharder if is_sharded else None


_FUNCTIONS = "_lockstep_functions"
# The strategy whose model Keras builds now.
_built_for: ContextVar[Any] = ContextVar("lockstep_built_for", default=None)
_SHARDED = {"optimizer": "the optimizer's variables", "variables": "all large variables"}


class Strategy(Diagnostics):
    """Base class of the strategies: synchronous data parallelism over a mesh of devices.

    A subclass calls :func:`~lockstep.strategies.options.prepare_process`, then looks up its devices, which starts JAX and, with
    several processes, connects to them; then it calls this constructor.

    Args:
        placement: devices that train, of all processes, and number of replicas.
        options: result of ``prepare_process``.
    """

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

    def __init__(self, placement: Placement, options: StrategyOptions) -> None:
        self._deterministic, self._shard, self._recompute = options.deterministic, options.shard, options.recompute
        self._ops, self._input_options = options.cross_device_ops, options.input_options
        self._placement = placement
        # Whether variables of models are laid over the devices when they are made.
        self._shards_variables = options.shard == "variables" or isinstance(placement, MeshPlacement)
        self._models: weakref.WeakKeyDictionary[keras.Model, None] = weakref.WeakKeyDictionary()  # the oldest first
        self._process_group = self._join_process_group()
        checks = FitChecks(self._runtime_settings(), self._log_once)
        self._fit_wrapper = FitWrapper(
            self._placement, self._input_options, self._process_group, self._around_call, checks.observe_fit
        )
        self._log(self._summary())

    def scope(self) -> ReusableContext["Strategy"]:
        """Make every model that is built, loaded or compiled in this context train under the strategy.

        A model keeps its strategy: ``fit``, ``evaluate`` and ``predict`` work inside and outside. The same strategy's scope may be
        entered again inside. When the context closes, all changes to Keras are undone.

        Returns:
            A context manager that gives the strategy; it may be entered again.

        Raises:
            ScopeError: on entering: another strategy's scope is open, or a ``keras.distribution`` is active.

        Example:
            >>> import keras, lockstep
            >>> strategy = lockstep.MirroredStrategy()
            >>> with strategy.scope():
            ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        """
        return ReusableContext(partial(strategy_scope, self))

    def checkpoint(self, directory: str | os.PathLike[str], save_freq: str | int = 1, keep: int = 3) -> Checkpoint:
        """Checkpoints of a custom training loop, written in the background.

        Args:
            directory: directory of the checkpoints; a separate one for each run.
            save_freq: number of steps, or time, between two checkpoints: 100, or ``"10min"``.
            keep: number of the newest checkpoints to keep.

        Returns:
            A context manager that restores and saves; when it closes, all checkpoints are written.

        Raises:
            CheckpointError: another job writes there, or the directory is not writable.
            OptionError: ``save_freq`` or ``keep`` is out of its range.

        Example:
            >>> import jax.numpy as jnp, lockstep, tempfile
            >>> strategy = lockstep.MirroredStrategy(replicas=2)
            >>> folder = tempfile.TemporaryDirectory()
            >>> for stop in 3, 5:  # The second loop resumes after the first.
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
            file_path("checkpoint: directory", directory),
            SaveFrequency(save_freq, has_epochs=False),
            keep,
            self._placement,
            self._process_group,
            self._log,
        )

    def layout(self, model: keras.Model) -> ModelLayout:
        """Return where the variables of a model lie, and when they are gathered.

        Args:
            model: a compiled model of this strategy. Its optimizer makes its variables in the first call of ``fit``, or in
                ``model.optimizer.build(model.trainable_variables)``.

        Returns:
            A row for each variable, with sizes in bytes; ``str`` makes a table.

        Raises:
            ModelError: the model belongs to another strategy or is not compiled.

        Example:
            >>> import keras, lockstep
            >>> strategy = lockstep.MirroredStrategy(["cpu:0", "cpu:1"], shard="variables")
            >>> with strategy.scope():
            ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128)])
            ...     model.compile("sgd", "mse")
            >>> kernel = strategy.layout(model).variables[0]
            >>> kernel.shape, kernel.bytes, kernel.device_bytes
            ((64, 128), 32768, 16384)
        """
        self._check_owner(model, "layout")
        return self._layout_of(model)

    def _executor_for(self, placement: Placement, model: keras.Model) -> Executor:
        """Return what runs the steps of a model."""
        return (
            DeterministicExecutor(placement, self._shard)
            if self._deterministic
            else SpmdExecutor(placement, self._ops, shard=self._shard, recompute=self._recompute)
        )

    def _claim(self, model: keras.Model) -> None:
        """Make a model without an owner this strategy's, for good."""
        if trainer.strategy_of(model) is not None:
            check_scope_of(model, trainer.strategy_of(model))
            return
        logged: set[str] = set()

        def log_once(reason: str) -> None:
            if reason not in logged:
                logged.add(reason)
                self._log(f"Model {model.name!r}: {reason}.", log_warning)

        executor = self._executor_for(self._placement, model)
        functions = StepFunctions(model, self._placement, executor, log_once, self._step_hooks)
        vars(model)[_FUNCTIONS] = functions  # On the model, to which they refer: both are freed together.

        def check() -> None:
            check_model(model, self)
            for note in self._layout_notes(model):
                log_once(note)

        trainer.attach_strategy(model, self, check, functions.make, partial(self._build_context, model))
        self._fit_wrapper.replace_methods(model, log_once)
        self._models[model] = None

    def _layout_notes(self, model: keras.Model) -> list[str]:
        if self._shard != "variables" or not model.built:
            return []
        return layout_notes(self._layout_of(model), getattr(model, "optimizer", None))

    def _layout_of(self, model: keras.Model) -> ModelLayout:
        return layout_of(model, self._placement, self._shard, self._recompute, deterministic=self._deterministic)

    @cached_property
    def _sharder(self) -> VariableSharder | None:
        """Where sharded variables are laid; None: where plain Keras lays them."""
        placement = self._placement
        if not (self._shard or self._shards_variables) or is_described(placement.first_local_device):
            return None
        # Without a mesh, a step has the whole of each variable on a device, too.
        makes_shards = isinstance(placement, MeshPlacement)
        agree = self._process_group.agree
        return VariableSharder(self._sharding_at_creation, placement.put, gather_on_host, agree, makes_shards)

    def _sharding_at_creation(self, variable: keras.Variable, shape: tuple[int, ...]) -> NamedSharding | None:
        """Return where the first value of a variable is laid; None: where it is already."""
        placement = self._placement
        return placement.slice_sharding(shape) if placement.slice_axis(shape) is not None else None

    @contextmanager
    def _build_context(self, model: keras.Model) -> Iterator[None]:
        """Lay variables over the devices that Keras makes for a model while this context is open, and those that its optimizer has."""
        if self._sharder is None:
            with in_step():
                yield
            return
        with value_in_context(_built_for, self), trainer.claim_models(_current_claim, _current_sharder), in_step():
            yield
        self._lay_out_variables(model, self._sharder)

    def _lay_out_variables(self, model: keras.Model, sharder: VariableSharder) -> None:
        """Lay a model's variables over the devices as a step returns them; some may be older than the scope."""
        replicated = self._placement.replicated
        older = [variable for variable in model.variables if self._shards_variables and not has_layout(variable)]
        for variable in (*older, *optimizer_variables(model)):
            lay_out(variable, sharder.sharding_of(variable, tuple(variable.shape)), sharder)
        for variable in filter(has_layout, model.metrics_variables):
            lay_out(variable, replicated, sharder)
        for variable in model.variables if self._shard == "optimizer" else ():
            lay_out(variable, replicated, sharder)  # They get averages from the optimizer, which are sharded.

    def _executor_of(self, model: keras.Model) -> Executor | None:
        """Return what runs the steps of a model; None before it is this strategy's."""
        functions = vars(model).get(_FUNCTIONS)
        return None if functions is None else functions.executor

    def _functions_of(self, model: keras.Model) -> StepFunctions:
        """Return the step functions of a model of this strategy."""
        return vars(model)[_FUNCTIONS]

    def _join_process_group(self) -> ProcessGroup:
        """Return the group of processes that train together; strategies of several processes override it."""
        return ProcessGroup()

    @cached_property
    def _step_hooks(self) -> tuple[StepHook, ...]:
        """What is called around every step of all models of the strategy, in and outside ``fit``."""
        return ()

    @contextlib.contextmanager
    def _around_call(self, model: keras.Model, name: str, arguments: dict[str, Any]) -> Iterator[None]:
        functions = self._functions_of(model)
        with contextlib.ExitStack() as stack:
            if name == "fit":
                stack.enter_context(self._around_fit(model, functions, arguments))
            if not name.endswith("_on_batch"):
                stack.enter_context(functions.interrupts.installed())
            stack.enter_context(functions.failures_raised())
            yield

    def _around_fit(
        self, model: keras.Model, functions: StepFunctions, arguments: dict[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        setup = {"replicas": self.num_replicas_in_sync, "deterministic": self.deterministic}
        context = FitContext(model, arguments, functions, self._placement, self._process_group, setup, self._log)
        return entered(self._fit_hooks, context)

    def _log(self, message: str, log: Callable[[str], None] = log_info) -> None:
        if self.is_chief:
            log(message)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(devices={list(self.devices)}, replicas={self.num_replicas_in_sync})"

    def _summary(self) -> str:
        devices, replicas = self.devices, self.num_replicas_in_sync
        text = f"{type(self).__name__}: {counted(replicas, 'replica')} on {counted(len(devices), 'device')} "
        text += f"({listed_devices(devices)})"
        if len(devices) > 1:
            text += f"; gradients: {self._ops.describe(self._placement.devices)}"
        if self._shard is not None:
            text += f"; each device keeps and updates a shard of {_SHARDED[self._shard]}"
        if self._deterministic:
            text += f"; {describe_determinism(self._placement.devices[0])}"
        if len(devices) > replicas:
            text += f"; {counted(len(devices) - replicas, 'device')} without a replica will be idle"
        return text
