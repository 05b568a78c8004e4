"""Base classes of cluster resolvers: the interface, and resolvers that read environment variables.

A resolver for another scheduler is a subclass in a file of this package, and a line in ``RESOLVERS`` of its ``__init__``.
"""

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import ClassVar, Self

from lockstep._errors import ClusterError, OptionError, instance_of, shown
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.cluster.membership import ClusterSpec, Membership, WorkerGroup

_MEMBERSHIP = (
    "a Membership. Fix: derive from SimpleClusterResolver and call its constructor, which makes it from a cluster_spec, a task_type "
    "and a task_id"
)


class ClusterResolver:
    """Describes the processes that train together, and which of them this one is.

    Counterpart of ``tf.distribute.cluster_resolver.ClusterResolver``. A resolver reads its source when it is made, and does not
    use the network.

    Example:
        >>> from lockstep.cluster_resolver import SimpleClusterResolver
        >>> resolver = SimpleClusterResolver({"worker": ["a:2222", "b:2222"]}, task_type="worker", task_id=1)
        >>> resolver.cluster_spec()
        ClusterSpec({'worker': ['a:2222', 'b:2222']})
        >>> resolver.group().name
        'worker 1 of 2 (b:2222)'
        >>> resolver.master("worker", 0)
        'a:2222'
    """

    def __init__(
        self,
        membership: Membership | None = None,
        *,
        master: str | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        self._membership = instance_of(Membership, f"{type(self).__name__}: membership", membership, _MEMBERSHIP)
        self._master, self._accelerators = master, num_accelerators
        self._environment, self._rpc_layer = environment, rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the cluster whose addresses are known.

        Returns:
            All of them, or only that of worker 0 if the scheduler does not provide the others.
        """
        return self._membership.spec

    @property
    def task_type(self) -> str:
        """The job of this process: ``chief``, ``worker``, ``ps`` or ``evaluator``."""
        return self._membership.task_type

    @property
    def task_id(self) -> int:
        """The index of this process in its job."""
        return self._membership.task_id

    @property
    def environment(self) -> str:
        """The environment that the source names, such as ``"cloud"``; Lockstep does not use it."""
        return self._environment

    @property
    def rpc_layer(self) -> str | None:
        """The protocol that :meth:`master` writes before an address; Lockstep's processes use their own."""
        return self._rpc_layer

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task.

        Args:
            task_type: its job, by default this process's.
            task_id: its index in the job, by default this process's.
            rpc_layer: a protocol to write before it, by default :attr:`rpc_layer`.

        Returns:
            ``host:port`` or ``protocol://host:port``. Without a task, the argument ``master``, and an empty text
            if the cluster has one task.

        Raises:
            ClusterError: the cluster has no such task.
            OptionError: an argument has another type.
        """
        check_texts(task_type=task_type, rpc_layer=rpc_layer)
        spec, layer = self.cluster_spec(), rpc_layer or self._rpc_layer
        if task_type is None and task_id is None:
            if self._master is not None:
                return _with_protocol(self._master, layer)
            if sum(map(spec.num_tasks, spec.jobs)) < 2:
                return ""
        job, index = task_type or self.task_type, self.task_id if task_id is None else task_id
        return _with_protocol(spec.task_address(job, index), layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: None = None
    ) -> dict[str, int]:
        """Return the accelerators of a process by their kind, such as ``{"GPU": 4}``, without CPUs.

        This starts JAX, which processes that train together may do only after their strategy is made.

        Args:
            task_type: not used: a process counts its own, and given numbers hold for every process.
            task_id: not used, for the same reason.
            config_proto: configuration of TensorFlow 1; not used.

        Returns:
            The argument ``num_accelerators``, or what JAX finds here.

        Example:
            >>> from lockstep.cluster_resolver import SimpleClusterResolver
            >>> SimpleClusterResolver({"worker": ["a:2222"]}, num_accelerators={"GPU": 4}).num_accelerators()
            {'GPU': 4}
        """
        if self._accelerators is not None:
            return dict(self._accelerators)
        import jax  # Imported here, as launchers use resolvers without JAX.

        return dict(Counter(device.platform.upper() for device in jax.local_devices() if device.platform != "cpu"))

    def group(self) -> WorkerGroup:
        """Return the processes that train in step with this one.

        Returns:
            Their number, the index of this one, and the address of worker 0.

        Raises:
            ClusterError: this process is a ``ps``, which does not train.
        """
        if self._membership.group is None:
            raise ClusterError(
                f"{self._membership.source}: this process is {self.task_type} {self.task_id}, and MultiWorkerMirroredStrategy has no "
                "work for it, as its workers keep no parameters on servers. Fix: do not start it and remove 'ps' from the cluster, or "
                "train with lockstep.ParameterServerStrategy."
            )
        return self._membership.group

    @property
    def membership(self) -> Membership:
        """The task and group of this process, for the strategies."""
        return self._membership

    def noting(self, *notes: str) -> Self:
        """Return this resolver with further sentences in the notes of its group."""
        noted, group = copy(self), self._membership.group
        if group is not None:
            noted._membership = replace(self._membership, group=replace(group, notes=(*group.notes, *notes)))
        return noted

    def __repr__(self) -> str:
        group = self._membership.group
        if group is None:
            part = f"{self.task_type} {self.task_id} ({self.cluster_spec().task_address(self.task_type, self.task_id)})"
            return f"<{type(self).__name__}: {part}, from {self._membership.source}>"
        return f"<{type(self).__name__}: {group.name}, worker 0 at {group.coordinator}, from {group.source}>"


class EnvironmentResolver(ClusterResolver, ABC):
    """A resolver that reads variables of a scheduler or launcher.

    Args:
        environ: names and values. Nothing else is read, and nothing is written.

    Raises:
        ClusterError: a variable is missing, has a value that it cannot have, or contradicts another.
        OptionError: ``environ`` is no mapping of texts.
    """

    source: ClassVar[str]  # The scheduler, for messages.
    variables: ClassVar[tuple[str, ...]]  # Names of the variables that are read.
    fix: ClassVar[str]  # How to set a missing one, in a sentence that follows "Fix: ".
    # Variables that suggest a job of several processes even if is_present needs more, with a value that suggests none, if any.
    hint_variables: ClassVar[tuple[tuple[str, str | None], ...]] = ()
    # Each gives the number of a process: if all are missing, the others may have been set for all processes.
    number_variables: ClassVar[tuple[str, ...]] = ()

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        check_environ(environ)
        super().__init__(self._read(EnvReader(self.source, environ, self.fix)))

    @classmethod
    @abstractmethod
    def is_present(cls, environ: Mapping[str, str]) -> bool:
        """True if variables of this scheduler are set, even if they are wrong or incomplete."""

    @classmethod
    def _is_numbered(cls, environ: Mapping[str, str]) -> bool:
        """False if the variables lack the number of this process, as those that a batch script sets for all processes."""
        return not cls.number_variables or any(name in environ for name in cls.number_variables)

    @classmethod
    def unused_variables(cls, environ: Mapping[str, str]) -> list[str]:
        """Return the variables that speak of other processes, for a process that trains alone as they do not suffice."""
        if cls.is_present(environ):
            return []
        return [name for name, silent in cls.hint_variables if environ.get(name, "").strip() not in ("", silent)]

    @abstractmethod
    def _read(self, variables: EnvReader) -> Membership:
        """Return the membership of this process from the variables."""


def check_texts(**arguments: object) -> None:
    """Refuse arguments that are neither texts nor None.

    Raises:
        OptionError: one of them is something else.
    """
    for name, text in arguments.items():
        if text is not None:
            instance_of(str, name, text, "a text")


def check_environ(environ: object) -> None:
    """Refuse an ``environ`` that does not map names to texts.

    Raises:
        OptionError: it does not.
    """
    given = instance_of(Mapping, "environ", environ, "a dict of environment variables")
    if not all(isinstance(text, str) for item in given.items() for text in item):
        raise OptionError(
            f"environ: expected texts as names and values, got {shown(environ)}. Fix: convert both with str."
        )


def check_resolver(given: object) -> ClusterResolver:
    """Return the ``cluster_resolver`` of a strategy.

    Raises:
        OptionError: it is no resolver, or one whose constructor did not call that of its base class.
    """
    what = "a resolver such as lockstep.cluster_resolver.TFConfigClusterResolver()"
    resolver = instance_of(ClusterResolver, "cluster_resolver", given, what)
    made = vars(resolver).get("_membership")
    instance_of(Membership, f"cluster_resolver: {type(resolver).__name__}: membership", made, _MEMBERSHIP)
    return resolver


def _with_protocol(address: str, rpc_layer: str | None) -> str:
    return f"{rpc_layer}://{address}" if rpc_layer and address else address
