"""Parameter server strategy: asynchronous data parallelism with variables on servers."""

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, NoReturn

import keras

from lockstep._errors import ClusterError, ModelError, OptionError, flag, function, seconds, whole_number
from lockstep._keras import trainer
from lockstep._logging import counted, log_info
from lockstep.data.input_options import InputOptions, check_input_options
from lockstep.data.random_state import capture_random_state, restore_random_state
from lockstep.devices.names import resolve_devices
from lockstep.devices.xla_flags import is_deterministic
from lockstep.distributed.cluster.env_reader import NetworkOptions, restarts_of
from lockstep.distributed.consistency import describe_process
from lockstep.distributed.control.heartbeat import TIMEOUT_SECONDS
from lockstep.distributed.control.termination import ExitGuard
from lockstep.distributed.resolvers import ClusterResolver, check_resolver, resolve
from lockstep.distributed.worker_process_group import disable_saving
from lockstep.execution.nonfinite_gate import GatedStep
from lockstep.execution.step_hooks import StepHook
from lockstep.fit.fit_hooks import FitContext, single_callback
from lockstep.fit.nan_guard import NanGuard
from lockstep.parameter_server.cluster_coordinator import SchedulingStrategy
from lockstep.parameter_server.fit_dispatch import ChiefFitDispatch, WorkerFitDispatch
from lockstep.parameter_server.function_scheduler_base import SchedulerBase
from lockstep.parameter_server.gradient_step import GradientStep
from lockstep.parameter_server.process_role import ProcessContext, ProcessRole, find_role
from lockstep.parameter_server.sharding import PartitionFunction
from lockstep.parameter_server.task_dispatcher import TaskDispatcher
from lockstep.strategies.base import Strategy
from lockstep.strategies.options import one_axis_placement, prepare_process, refuse_device_override


class _RemoteSteps(StepHook):
    """Step hook that replaces training steps by those of other processes.

    Args:
        step: makes a step, given state and batch.
        wait_for_steps: waits for all steps so far, and returns the state that they have left.
        on_step: is called before each step of any kind.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], Any],
        wait_for_steps: Callable[[], Any],
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._step, self._wait_for_steps, self._on_step = step, wait_for_steps, on_step

    def on_step_start(self, model: keras.Model, kind: str, batch: Any) -> None:
        self._on_step()

    def replaced_step(self, gated_step: Callable[[], GatedStep]) -> Callable[[Any, Any], Any]:
        return self._step

    def newest_state(self) -> Any:
        return self._wait_for_steps()


class _NanGuardRefusal:
    """Fit hook that refuses a NanGuard."""

    def around_fit(self, context: FitContext) -> contextlib.AbstractContextManager[None]:
        """See :class:`lockstep.fit.fit_hooks.FitHook`."""
        if single_callback(context.callbacks, NanGuard):
            raise OptionError(
                "NanGuard checks each update before it is made, and with ParameterServerStrategy servers make the updates. Fix: use "
                "MirroredStrategy with it."
            )
        return contextlib.nullcontext()


class ParameterServerStrategy(SchedulingStrategy, Strategy):
    """Trains one model on several workers that do not wait for each other; servers hold its variables.

    Counterpart of ``tf.distribute.ParameterServerStrategy``. The same script runs on every process: the chief runs Keras's loop, workers
    take batches from it, pull the variables, compute a gradient and push it, and servers apply the optimizer at once. All processes
    return from ``fit`` with the chief's history and weights. ``lockstep run --workers 2 --servers 1 script.py`` starts all processes on one machine.

    Args:
        cluster_resolver: tells which process is chief, worker, ps or evaluator; by default from ``TF_CONFIG``.
        variable_partitioner: cuts variables into shards on several servers, such as
            :class:`lockstep.partitioners.MinSizePartitioner`; by default each variable is on one server as a whole.
        max_staleness: by how many updates a worker may be ahead of the slowest one. None: no limit. 0: training is synchronous, each
            batch is divided among the workers as :class:`MirroredStrategy` divides it among as many replicas, with equal results.
        refuse_nonfinite: whether a gradient with NaN or Inf ends the job with an error that names its worker. False: servers apply it.
        input_options: how batches reach the devices of a worker.
        timeout_seconds: limit of each wait for another process.

    Raises:
        ClusterError: a process is missing or was started differently, or the cluster has no chief, worker or ps.
        OptionError: an argument is out of its range.

    Example:
        >>> import json, lockstep, os
        >>> cluster = {job: [f"localhost:{port}"] for job, port in [("chief", 12431), ("worker", 12432), ("ps", 12433)]}
        >>> os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
        >>> strategy = lockstep.ParameterServerStrategy()
        >>> del os.environ["TF_CONFIG"]
        >>> strategy.role.job, strategy.is_chief
        ('chief', True)
        >>> strategy.close()
    """

    _fit_hooks = (_NanGuardRefusal(), *Strategy._fit_hooks)
    _process_group: ChiefFitDispatch | WorkerFitDispatch

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: PartitionFunction | None = None,
        *,
        max_staleness: int | None = None,
        refuse_nonfinite: bool = True,
        input_options: InputOptions | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        if max_staleness is not None:
            max_staleness = whole_number("max_staleness", max_staleness, minimum=0)
        refuse_nonfinite = flag("refuse_nonfinite", refuse_nonfinite)
        if variable_partitioner is not None:
            what = "one of lockstep.partitioners, or a function of shape and dtype"
            function("variable_partitioner", variable_partitioner, what)
        limit = seconds("timeout_seconds", timeout_seconds)
        if input_options is not None and check_input_options("input_options", input_options).cache is not None:
            raise OptionError(
                f"InputOptions: cache={str(input_options.cache)!r}: a worker reads its own part of an epoch, of which a cache "
                "cannot be made. Fix: leave it out."
            )
        if is_deterministic():
            raise OptionError(
                "lockstep.config.set_deterministic() and ParameterServerStrategy cannot be combined: workers that do not wait for each other "
                "give other numbers in each run. Fix: leave the setting out; with max_staleness=0 the result does not depend on the "
                "workers or their order."
            )
        self._resolver = resolve(os.environ) if cluster_resolver is None else check_resolver(cluster_resolver)
        self._role = find_role(self._resolver)
        self._context = ProcessContext(
            self._role,
            describe_process() | {"generation": restarts_of(os.environ)},
            variable_partitioner,
            max_staleness,
            refuse_nonfinite,
            NetworkOptions.of(os.environ),
            limit,
            log_info,
        )
        options = prepare_process(deterministic=False, input_options=input_options)
        refuse_device_override(type(self).__name__)
        super().__init__(one_axis_placement(resolve_devices(None), options), options)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The source of the cluster's addresses."""
        return self._resolver

    @property
    def role(self) -> ProcessRole:
        """Role of this process, and the addresses of the other processes."""
        return self._role

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief, which alone prints and writes files."""
        return self._role.job == "chief"

    def close(self) -> None:
        """Close the connections to the other processes; also happens at the end of the process."""
        self._closing.close()
        self._guard.restore()

    @cached_property
    def _closing(self) -> contextlib.ExitStack:
        return contextlib.ExitStack()

    @property
    def _scheduler(self) -> SchedulerBase:
        return self._process_group.scheduler

    def _join_process_group(self) -> ChiefFitDispatch | WorkerFitDispatch:
        dispatch = self._connect()
        self._closing.callback(dispatch.scheduler.end)
        return dispatch

    def _connect(self) -> ChiefFitDispatch | WorkerFitDispatch:
        self._guard = ExitGuard()
        self._guard.install()
        if self.is_chief:
            dispatcher = TaskDispatcher(timeout_seconds=self._context.timeout_seconds, log=self._log)
            self._guard.before_end = lambda summary, code: dispatcher.abort(f"the chief has failed: {summary}", code)
            self._closing.callback(self._context.serve_dispatcher(dispatcher).stop)
            wait_for_stragglers = partial(dispatcher.wait_for_stragglers, self._role.others)
            self._closing.callback(wait_for_stragglers)
            self._closing.callback(atexit.unregister, wait_for_stragglers)
            atexit.register(wait_for_stragglers)
            dispatcher.open(0)
            dispatcher.close({"seed": trainer.get_random_seed(), "random": capture_random_state()})
            return ChiefFitDispatch(self._context, dispatcher, self)
        client = self._context.connect_to_dispatcher()
        self._closing.callback(client.close)
        if self._role.job == "ps":  # The job cannot train without it, also if it ends between two calls.
            self._guard.before_end = client.report
        if (started := client.enter(0)) is not None:
            _use_chief_random_state(self._role, started.what)
        return WorkerFitDispatch(self._context, client, self)

    def checkpoint(self, directory: str | os.PathLike[str], save_freq: str | int = 1, keep: int = 3) -> NoReturn:
        """Raise OptionError: servers have the newest variables, and a loop over scheduled functions has no state of its own.

        Args:
            directory: not used.
            save_freq: not used.
            keep: not used.

        Returns:
            Nothing, as it always raises.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            "strategy.checkpoint: with ParameterServerStrategy the newest variables are on servers, and each process would write a "
            "checkpoint of its own. Fix: fit with lockstep.callbacks.BackupAndRestore, or model.save_weights after coordinator.join()."
        )

    # Methods of lockstep.parameter_server.function_scheduler_base.TrainingModels.

    def gradient_step(self, model: keras.Model) -> GradientStep:
        """Return the step that computes gradients on the devices of this process."""
        return GradientStep(model, self._functions_of(model), self._placement)

    @contextlib.contextmanager
    def steps_by(
        self, model: keras.Model, step: Callable[[Any, Any], Any], wait_for_steps: Callable[[], Any] = lambda: None
    ) -> Iterator[None]:
        """Make the training steps of a model with ``step``; ``wait_for_steps`` waits for them, and returns the state that they have left."""
        with self._functions_of(model).hooked(_RemoteSteps(step, wait_for_steps)):
            yield

    def model_of_loop(self) -> keras.Model:
        """Return the model whose variables the servers hold while functions are scheduled: the newest one that is compiled and built.

        Raises:
            ModelError: there is no such model.
        """
        for model in reversed([*self._models]):
            if model.compiled and model.built:
                return model
        raise ModelError(
            "ClusterCoordinator: the strategy has no model that is compiled and built, and servers need its variables. Fix: build and compile it "
            "in the scope before a function is scheduled."
        )

    @contextlib.contextmanager
    def _around_call(self, model: keras.Model, name: str, arguments: dict[str, Any]) -> Iterator[None]:
        trains = name in ("fit", "train_on_batch")
        newest = contextlib.nullcontext() if trains else self._process_group.scheduler.newest_values(model)
        with newest, super()._around_call(model, name, arguments):
            yield

    def _claim(self, model: keras.Model) -> None:
        super()._claim(model)
        if not self.is_chief:
            disable_saving(model)

    @cached_property
    def _step_hooks(self) -> tuple[StepHook, ...]:
        # Until ``steps_by`` adds another.
        return (_RemoteSteps(_refuse_step, lambda: None, self._process_group.note_progress),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._role.name})"

    def _summary(self) -> str:
        staleness, count = self._context.max_staleness, len(self._role.workers)
        how = (
            "in step"
            if staleness == 0
            else "without waiting"
            if staleness is None
            else f"at most {staleness} updates apart"
        )
        servers = len(self._role.servers)
        return (
            f"{type(self).__name__}: {self._role.name} ({self._role.source}); {counted(count, 'worker')}, {how}; variables on "
            f"{counted(servers, 'server')}"
        )


def _refuse_step(state: Any, batch: Any) -> Any:
    raise ModelError(
        "train_on_batch: with ParameterServerStrategy workers make the training steps. Fix: schedule a function that calls it with "
        "lockstep.ClusterCoordinator, or use fit. Of several models the newest one that is compiled can be trained so."
    )


def _use_chief_random_state(role: ProcessRole, chief: dict[str, Any]) -> None:
    """Set the random state of this process to the chief's, so that rows are shuffled in the same order.

    Raises:
        ClusterError: this process has set another seed.
    """
    own = trainer.get_random_seed()
    if own != chief["seed"]:
        raise ClusterError(
            f"{role.name}: keras.utils.set_random_seed({own}) was called here, and at the chief "
            f"{'no seed was set' if chief['seed'] is None else chief['seed']}. Fix: set the same seed in all processes, or none."
        )
    restore_random_state(chief["random"])
