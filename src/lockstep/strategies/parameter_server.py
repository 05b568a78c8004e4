"""Asynchronous data parallelism: variables on servers, and workers that do not wait for each other."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import keras

from lockstep._errors import ClusterError, ModelError, OptionError, whole_number
from lockstep._keras import trainer
from lockstep.data.fit_entry import InputOptions
from lockstep.data.iterator_state import capture_random_state, restore_random_state
from lockstep.devices.determinism import is_deterministic
from lockstep.devices.names import resolve_devices
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.cluster.process_role import ProcessRole, find_role
from lockstep.distributed.consistency_checks import describe_process
from lockstep.distributed.control.termination import ExitGuard
from lockstep.distributed.process_group import disable_saving
from lockstep.distributed.process_job import GENERATION, SECRET
from lockstep.distributed.resolvers import ClusterResolver, resolve
from lockstep.execution.nonfinite_gate import GatedStep
from lockstep.execution.train_functions import StepHook
from lockstep.fit.hooks import FitContext, single_callback
from lockstep.fit.nan_guard.nan_guard import NanGuard
from lockstep.parameter_server.cluster_coordinator import SchedulingStrategy
from lockstep.parameter_server.fit_dispatch import ChiefFitDispatch, WorkerFitDispatch
from lockstep.parameter_server.gradient_step import GradientStep
from lockstep.parameter_server.process_context import ProcessContext
from lockstep.parameter_server.scheduler_base import SchedulerBase
from lockstep.parameter_server.tasks.task_client import CallEnded
from lockstep.parameter_server.tasks.task_dispatcher import TaskDispatcher
from lockstep.parameter_server.variables.sharding import PartitionFunction
from lockstep.strategies.base import Strategy
from lockstep.strategies.setup import prepare_process, refuse_device_override

__all__ = ["ParameterServerStrategy"]

TIMEOUT_SECONDS = 60.0


class _RemoteSteps(StepHook):
    """The step hook that has training steps made by other processes.

    Args:
        step: makes one, given state and batch.
        settle: waits for all steps so far, and gives the state that they have left.
    """

    def __init__(self, step: Callable[[Any, Any], Any], settle: Callable[[], Any]) -> None:
        self._step, self._settle = step, settle

    def replaced_step(self, gated_step: Callable[[], GatedStep]) -> Callable[[Any, Any], Any]:
        """See :class:`StepHook`."""
        return self._step

    def newest_state(self) -> Any:
        """See :class:`StepHook`."""
        return self._settle()


class _NanGuardRefusal:
    """The fit hook that refuses a NanGuard."""

    def around_fit(self, context: FitContext) -> contextlib.AbstractContextManager[None]:
        """See :class:`lockstep.fit.hooks.FitHook`."""
        if single_callback(context.callbacks, NanGuard):
            raise OptionError(
                "NanGuard looks at each update before it is made, and here servers make them. Use MirroredStrategy with it."
            )
        return contextlib.nullcontext()


class ParameterServerStrategy(SchedulingStrategy, Strategy):
    """Trains one model on several workers that do not wait for each other; its variables are kept on servers.

    Counterpart of ``tf.distribute.ParameterServerStrategy``. The same script runs on every process: the chief runs Keras's loop, workers
    take batches from it, pull the variables, compute a gradient and push it, and servers apply the optimizer at once. All come out of
    ``fit`` with the chief's history and weights. ``lockstep run --workers 2 --servers 1 script.py`` starts all of them on one machine.

    Args:
        cluster_resolver: who is chief, worker, ps or evaluator; by default what ``TF_CONFIG`` says.
        variable_partitioner: cuts variables into shards on several servers, such as
            :class:`lockstep.partitioners.MinSizePartitioner`; by default each variable is on one server as a whole.
        max_staleness: by how many updates a worker may be ahead of the slowest one. None: by any number. 0: training is synchronous, each
            batch is divided among the workers as :class:`MirroredStrategy` divides it among as many replicas, and gives its numbers.
        input_options: how batches reach the devices of a worker.
        timeout_seconds: limit of each wait for another process.

    Raises:
        ClusterError: a process is missing or differently started, or the cluster has no chief, worker or ps.
        OptionError: an argument is out of its range.

    Example:
        >>> import json, lockstep, os
        >>> cluster = {job: [f"localhost:{port}"] for job, port in [("chief", 12431), ("worker", 12432), ("ps", 12433)]}
        >>> os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
        >>> strategy = lockstep.ParameterServerStrategy()
        >>> del os.environ["TF_CONFIG"]
        >>> strategy.part.job, strategy.is_chief
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
        input_options: InputOptions | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        if max_staleness is not None:
            max_staleness = whole_number("max_staleness", max_staleness, least=0)
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise OptionError(
                f"variable_partitioner: expected one of lockstep.partitioners, or a function of shape and dtype, got {variable_partitioner!r}."
            )
        if input_options is not None and input_options.cache is not None:
            raise OptionError(
                f"InputOptions: cache={str(input_options.cache)!r}: a worker reads its own part of an epoch, of which a cache cannot be made. Leave it out."
            )
        if is_deterministic():
            raise OptionError(
                "lockstep.config.set_deterministic() and ParameterServerStrategy do not go together: workers that do not wait for each other "
                "give other numbers in each run. Leave the setting out; with max_staleness=0 neither workers nor their order decide a bit."
            )
        self._resolver = cluster_resolver or resolve(os.environ)
        self._part = find_role(self._resolver)
        self._member = ProcessContext(
            self._part,
            describe_process() | {"generation": _generation()},
            variable_partitioner,
            max_staleness,
            os.environ[SECRET].encode() if os.environ.get(SECRET) else None,
            timeout_seconds,
            self._log_on_any_process,
        )
        options = prepare_process(deterministic=False, input_options=input_options)
        refuse_device_override(type(self).__name__)
        super().__init__(resolve_devices(None), options)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The source of the cluster's addresses."""
        return self._resolver

    @property
    def part(self) -> ProcessRole:
        """What this process is, and where the others are."""
        return self._part

    @property
    def is_chief(self) -> bool:
        """Whether this process coordinates, and alone prints and writes."""
        return self._part.job == "chief"

    def close(self) -> None:
        """End the connections to the other processes; the end of the process does so, too."""
        self._closing.close()
        self._guard.restore()

    @cached_property
    def _closing(self) -> contextlib.ExitStack:
        return contextlib.ExitStack()

    @cached_property
    def _order(self) -> "weakref.WeakKeyDictionary[keras.Model, None]":
        """The models, in the order in which they were made."""
        return weakref.WeakKeyDictionary()

    @property
    def _coordination(self) -> SchedulerBase:
        return self._process_group.coordination

    def _join_process_group(self) -> ChiefFitDispatch | WorkerFitDispatch:
        process_group = self._connect()
        self._closing.callback(process_group.coordination.end)
        return process_group

    def _connect(self) -> ChiefFitDispatch | WorkerFitDispatch:
        self._guard = ExitGuard()
        self._guard.install()
        if self.is_chief:
            desk = TaskDispatcher(timeout_seconds=self._member.timeout_seconds, announce=self._log)
            self._guard.before_end = lambda summary, code: desk.abort(f"the chief has failed: {summary}", code)
            self._closing.callback(self._member.serve_desk(desk).stop)
            desk.open(0)
            desk.close({"seed": trainer.get_random_seed(), "random": capture_random_state()})
            return ChiefFitDispatch(self._member, desk, self)
        client = self._member.go_to_desk()
        self._closing.callback(client.close)
        try:
            client.enter(0)
        except CallEnded as begun:
            _take_over_random_numbers(self._part, begun.result)
        return WorkerFitDispatch(self._member, client, self)

    # What the calls know of a model: lockstep.parameter_server.fit_dispatch.ServerTraining.

    def gradient_step(self, model: keras.Model) -> GradientStep:
        """Computes gradients on the devices of this process."""
        return GradientStep(model, self._functions_of(model), self._placement)

    @contextlib.contextmanager
    def steps_by(
        self, model: keras.Model, step: Callable[[Any, Any], Any], settle: Callable[[], Any] = lambda: None
    ) -> Iterator[None]:
        """Have the training steps of a model made by ``step``; ``settle`` waits for them, and gives the state that they have left."""
        with self._functions_of(model).hooked(_RemoteSteps(step, settle)):
            yield

    def model_of_loop(self) -> keras.Model:
        """The model whose variables the servers hold while functions are scheduled: the newest one that is compiled and built.

        Raises:
            ModelError: there is none.
        """
        for model in reversed([*self._order]):
            if model.compiled and model.built:
                return model
        raise ModelError(
            "ClusterCoordinator: the strategy has no model that is compiled and built, and servers need its variables. Build and compile it "
            "in the scope before something is scheduled."
        )

    def tell(self, model: keras.Model, sentence: str) -> None:
        """Say something about a model, once."""
        self._functions_of(model).log(sentence)

    def _claim(self, model: keras.Model) -> None:
        super()._claim(model)
        if model in self._models and model not in self._order:
            self._order[model] = None
        if not self.is_chief:
            disable_saving(model)

    @cached_property
    def _step_hooks(self) -> tuple[StepHook, ...]:
        return (_RemoteSteps(_refuse_to_train_here, lambda: None),)  # until ``steps_by`` adds another

    def _log(self, message: str) -> None:
        if self.is_chief:
            super()._log(message)

    def _log_on_any_process(self, message: str) -> None:
        super()._log(message)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._part.name})"

    def _summary(self) -> str:
        staleness, count = self._member.max_staleness, len(self._part.workers)
        how = (
            "in step"
            if staleness == 0
            else "without waiting"
            if staleness is None
            else f"at most {staleness} updates apart"
        )
        servers = len(self._part.servers)
        return (
            f"{type(self).__name__}: {self._part.name} ({self._part.source}); {count} worker{'s' * (count > 1)}, {how}; variables on "
            f"{servers} server{'s' * (servers > 1)}"
        )


def _refuse_to_train_here(state: Any, batch: Any) -> Any:
    raise ModelError(
        "train_on_batch: with ParameterServerStrategy workers make the training steps. Schedule a function that calls it with "
        "lockstep.ClusterCoordinator, or use fit. Of several models the newest one that is compiled can be trained so."
    )


def _generation() -> int:
    own = EnvReader("Lockstep", os.environ, "lockstep run sets it.")
    return own.integer(GENERATION, "the number of restarts", least=0) if GENERATION in os.environ else 0


def _take_over_random_numbers(part: ProcessRole, told: dict[str, Any]) -> None:
    """Draw the chief's numbers from here on: rows must come in its order.

    Raises:
        ClusterError: this process has set another seed.
    """
    own = trainer.get_random_seed()
    if own != told["seed"]:
        raise ClusterError(
            f"{part.name}: keras.utils.set_random_seed({own}) was called here, and at the chief "
            f"{'no seed was set' if told['seed'] is None else told['seed']}. Set the same seed in all processes, or none."
        )
    restore_random_state(told["random"])
