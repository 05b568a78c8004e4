"""Synchronous data parallelism on the devices of several processes, on one machine or on many."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import keras

from lockstep._errors import ClusterError, instance_of, whole_number
from lockstep._keras import trainer
from lockstep._logging import log_info
from lockstep.collectives import CommunicationOptions, Ops, ops_from_options
from lockstep.collectives.base import PackedAllReduce
from lockstep.data.input_options import InputOptions
from lockstep.data.process_group import ProcessGroup
from lockstep.devices.cpu_devices import check_shared_thread_pool
from lockstep.devices.names import count_cpu_devices, platform_of, resolve_devices
from lockstep.devices.placement import Placement
from lockstep.distributed.attach_to_jax import attach_job, compare_with_jax, is_to_attach
from lockstep.distributed.cluster.addresses import COORDINATOR
from lockstep.distributed.cluster.membership import WorkerGroup, membership_of_group
from lockstep.distributed.consistency import DriftCheck, agree_on_random_state
from lockstep.distributed.control.control_client import ControlClient
from lockstep.distributed.control.heartbeat import TIMEOUT_SECONDS
from lockstep.distributed.jax_init import ProcessJob, check_gpus_differ, job_of_this_process, prepare_threads
from lockstep.distributed.resolvers import (
    ClusterResolver,
    TFConfigClusterResolver,
    check_resolver,
    notes_if_alone,
    resolve,
)
from lockstep.distributed.worker_process_group import (
    ProgressReporter,
    WorkerProcessGroup,
    coordinate_saving,
)
from lockstep.execution.step_hooks import StepHook
from lockstep.execution.variable_shards import Recompute
from lockstep.strategies.base import Strategy
from lockstep.strategies.options import (
    StrategyOptions,
    find_devices,
    is_made_alone,
    one_axis_placement,
    prepare_process,
    refuse_device_override,
)

_ALONE = WorkerGroup(1, 0, "127.0.0.1:1", source="no cluster")
_NOT_NEEDED = "worker-0.invalid:1"  # The processes of JAX agree on an address, so that no resolver has to find one.


class WorkerStrategy(Strategy):
    """Base of the strategies that train on the devices of several workers, or of this process alone.

    Args:
        cluster_resolver: as in :class:`MultiWorkerMirroredStrategy`.
        communication_options: as in :class:`MultiWorkerMirroredStrategy`.
        devices: as in :class:`MultiWorkerMirroredStrategy`.
        check_every: as in :class:`MultiWorkerMirroredStrategy`.
        prepare: checks the other arguments and prepares the process, given the cross-device operation; it is called before the workers
            connect.
        place: returns the placement on the devices of all workers.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        communication_options: CommunicationOptions | None,
        devices: Sequence[str | jax.Device] | None,
        check_every: int,
        prepare: Callable[[Ops | None], StrategyOptions],
        place: Callable[[Sequence[jax.Device], StrategyOptions], Placement],
    ) -> None:
        options = CommunicationOptions()
        if communication_options is not None:
            what = "lockstep.CommunicationOptions(…)"
            options = instance_of(CommunicationOptions, "communication_options", communication_options, what)
        self._check_every = whole_number("check_every", check_every, minimum=0)
        self._timeout = TIMEOUT_SECONDS if options.timeout_seconds is None else options.timeout_seconds
        self._is_attaching = is_to_attach() and not is_made_alone()
        self._resolver = _resolver(cluster_resolver, self._is_attaching)
        self._is_chosen = cluster_resolver is not None or isinstance(self._resolver, TFConfigClusterResolver)
        self._group = self._resolver.group() if self._resolver else _alone(self._is_attaching)
        self._job: ProcessJob | None = None
        communication = replace(options, timeout_seconds=None)
        ops = None if communication == CommunicationOptions() else ops_from_options(communication)
        prepared = prepare(ops)
        if self._group.workers > 1 and not is_made_alone():
            refuse_device_override(type(self).__name__)
        super().__init__(place(self._connect_and_find_devices(devices), prepared), prepared)
        if jax.process_count() > 1:
            trainer.name_local_devices()
        if self._job:
            self._job.client.agree("the strategy", self._compared_settings())
            agree_on_random_state(self._job.client, self._log)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The source of the cluster's addresses; None if this process trains alone."""
        return self._resolver

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, the only one that prints and writes files; True if it trains alone."""
        return self._group.is_chief

    @property
    def _control_client(self) -> ControlClient | None:
        """This worker's end of the control channel; None if it trains alone."""
        return self._job.client if self._job else None

    def _connect_and_find_devices(self, devices: Sequence[str | jax.Device] | None) -> Sequence[jax.Device]:
        """Connect to the other workers, which starts JAX, and return the devices of all, in the order of the workers."""
        if self._group.workers > 1 and not self._is_attaching:
            self._log_notes()
            job = job_of_this_process(self._group, count_cpu_devices(devices), self._timeout, log_info, os.environ)
            own: Sequence[jax.Device] = resolve_devices(devices)
        else:
            if self._is_attaching:
                prepare_threads(count_cpu_devices(devices))
            own = find_devices(devices)
            if is_made_alone() or (jax.process_count() == 1 and self._group.workers == 1):
                self._log_notes()
                return own
            job = self._attach_to_processes_of_jax(own)
        self._job = job
        if platform_of(own[0]) == "gpu":
            check_gpus_differ(job.client, own, os.environ)
        every = {device.id: device for device in jax.devices(own[0].platform)}
        chosen = job.client.gather("the devices", [device.id for device in own])
        return [every[number] for worker in chosen for number in worker]

    def _log_notes(self) -> None:
        for note in self._group.notes:
            self._log(note)

    def _attach_to_processes_of_jax(self, own: Sequence[jax.Device]) -> ProcessJob:
        """Join the processes over which JAX has started, with ``own`` devices."""
        source = self._group if self._resolver else None

        def check() -> None:
            note = None if source is None else compare_with_jax(source, self._is_chosen)
            if note is not None:
                log_info(note)

        job = attach_job(check, self._timeout, log_info, os.environ)
        self._group = job.group
        self._resolver = ClusterResolver(membership_of_group(job.group))
        if own[0].platform == "cpu":
            check_shared_thread_pool(len(own), os.environ)
        return job

    def _compared_settings(self) -> dict[str, Any]:
        ops = self.cross_device_ops
        return {
            "replicas": self.num_replicas_in_sync,
            "deterministic": self.deterministic,
            "cross_device_ops": repr(ops) if isinstance(ops, PackedAllReduce) else repr(type(ops).__name__),
            "check_every": self._check_every,
            "shard": self._shard,
            "recompute": "a function" if callable(self._recompute) else self._recompute,
        }

    def _join_process_group(self) -> ProcessGroup:
        if self._job is None:
            return ProcessGroup()
        return WorkerProcessGroup(self._job.client, self._placement.along_devices, self._drift_check)

    @cached_property
    def _drift_check(self) -> DriftCheck | None:
        return DriftCheck(self._job.client, self._placement) if self._job and self._check_every else None

    @cached_property
    def _step_hooks(self) -> tuple[StepHook, ...]:
        if self._job is None:
            return ()
        return (ProgressReporter(self._job.client, self._drift_check, self._check_every),)

    def _claim(self, model: keras.Model) -> None:
        super()._claim(model)
        if self._job is not None:
            coordinate_saving(model, self._job.client)

    def _summary(self) -> str:
        return f"worker {self._group.index} of {self._group.workers} ({self._group.source}). {super()._summary()}"


class MultiWorkerMirroredStrategy(WorkerStrategy):
    """Trains one model on the devices of several workers at once, with the results of one device.

    Counterpart of ``tf.distribute.MultiWorkerMirroredStrategy``. The same script runs on every worker and makes the strategy before
    it uses JAX. The workers connect to worker 0, the chief, check that they run the same program, and train in step. All read the
    same data, and each trains on the rows of its replicas. Only the chief prints, and writes the files that Keras writes.

    Args:
        cluster_resolver: gives the workers' addresses and this process's index; by default from ``TF_CONFIG`` or the scheduler
            (:mod:`lockstep.cluster_resolver`). If neither is set, this process is the only worker. If the program or its engine has
            called ``jax.distributed.initialize``, the processes of JAX are the workers, and a resolver must agree with them.
        communication_options: how gradients are sent; ``timeout_seconds`` is the limit of waits for another worker, 60 by
            default; while it compiles, saves, or has not made a call yet, half an hour is.
        devices: names of this worker's devices, such as ``"gpu:0"``; by default all local ones.
        replicas: number of replicas of all workers together, by default one a device.
        deterministic: as in :class:`MirroredStrategy`; the bits do not depend on the number of processes either.
        input_options: how batches reach the devices.
        check_every: number of training steps from one comparison of the variables that all workers have as a whole to the next, the last one
            at the end of ``fit``; 0: never.
            Sharded variables are not compared.
        shard: as in :class:`MirroredStrategy`, over the devices of all workers.
        recompute: as in :class:`MirroredStrategy`.

    Raises:
        ClusterError: a worker is missing, was started differently or belongs to another job; or JAX has started already without
            the other workers, or over other processes than the resolver says.
        DeviceError: a device is unknown or absent.
        OptionError: an argument is out of its range.

    Example:
        >>> import json, lockstep, os
        >>> os.environ["TF_CONFIG"] = json.dumps(
        ...     {"cluster": {"worker": ["localhost:12421"]}, "task": {"type": "worker", "index": 0}}
        ... )
        >>> strategy = lockstep.MultiWorkerMirroredStrategy()
        >>> del os.environ["TF_CONFIG"]
        >>> strategy.cluster_resolver.task_type, strategy.is_chief
        ('worker', True)
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices: Sequence[str | jax.Device] | None = None,
        replicas: int | None = None,
        deterministic: bool | None = None,
        input_options: InputOptions | None = None,
        check_every: int = 100,
        shard: str | None = None,
        recompute: Recompute = None,
    ) -> None:
        def prepare(ops: Ops | None) -> StrategyOptions:
            return prepare_process(ops, replicas, deterministic, input_options, shard, recompute)

        if not is_made_alone():
            refuse_device_override(type(self).__name__)
        super().__init__(cluster_resolver, communication_options, devices, check_every, prepare, one_axis_placement)


def _alone(is_attaching: bool) -> WorkerGroup:
    return _ALONE if is_attaching or is_made_alone() else replace(_ALONE, notes=notes_if_alone(os.environ))


def _resolver(given: ClusterResolver | None, is_attaching: bool) -> ClusterResolver | None:
    """Return the source of the addresses; beside an initialized JAX, it is compared with that."""
    if is_made_alone():
        return None
    if given is not None:
        return check_resolver(given)
    if not is_attaching:
        return resolve(os.environ)
    try:
        return resolve({COORDINATOR: _NOT_NEEDED, **os.environ})
    except ClusterError:  # Incomplete variables are no reason to refuse the processes of JAX.
        if TFConfigClusterResolver.is_present(os.environ):
            raise
        return None
