"""What every resolver answers, and what those that read the environment have in common."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from typing import ClassVar, Self

from lockstep.cluster.group import WorkerGroup
from lockstep.cluster.membership import Membership
from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.variables import Variables

__all__ = ["ClusterResolver", "EnvironmentResolver"]


class ClusterResolver:
    """Says which processes train together and which of them this one is.

    Counterpart of ``tf.distribute.cluster_resolver.ClusterResolver``. What a resolver says was read when it was made; no
    network was asked.

    Example:
        >>> from lockstep.cluster_resolver import SimpleClusterResolver
        >>> resolver = SimpleClusterResolver({"worker": ["a:2222", "b:2222"]}, task_type="worker", task_id=1)
        >>> resolver.cluster_spec()
        ClusterSpec({'worker': ['a:2222', 'b:2222']})
        >>> resolver.group().name
        'worker 1 of 2 (b:2222)'
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def cluster_spec(self) -> ClusterSpec:
        """The tasks of the cluster whose addresses are known.

        Returns:
            All of them, or that of worker 0 only, where the scheduler tells no others.
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

    def group(self) -> WorkerGroup:
        """The processes that train in step with this one.

        Returns:
            Their number, that of this one, and where worker 0 is.

        Raises:
            ClusterError: this process is a ``ps``, which trains in step with nobody.
        """
        return self._membership.training_group()

    @property
    def membership(self) -> Membership:
        """What this process is, for the strategies."""
        return self._membership

    def noting(self, *notes: str) -> Self:
        """This resolver with further sentences in the notes of its group."""
        noted = copy(self)
        noted._membership = self._membership.noting(*notes)
        return noted

    def __repr__(self) -> str:
        group = self._membership.group
        if group is None:
            part = f"{self.task_type} {self.task_id} ({self.cluster_spec().task_address(self.task_type, self.task_id)})"
            return f"<{type(self).__name__}: {part}, from {self._membership.source}>"
        return f"<{type(self).__name__}: {group.name}, worker 0 at {group.coordinator}, from {group.source}>"


class EnvironmentResolver(ClusterResolver, ABC):
    """A resolver that reads variables which a scheduler or launcher has set.

    Args:
        environ: names and values. Nothing else is read, and nothing is written.

    Raises:
        ClusterError: a variable is missing, has a value that it cannot have, or contradicts another.
    """

    source: ClassVar[str]  # The scheduler, as messages name it.
    variables: ClassVar[tuple[str, ...]]  # The names of those that are read.
    cure: ClassVar[str]  # A sentence for the user who lacks one.

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__(self._read(Variables(self.source, environ, self.cure)))

    @classmethod
    @abstractmethod
    def is_present(cls, environ: Mapping[str, str]) -> bool:
        """True where the variables say that this scheduler started the process, rightly or wrongly."""

    @abstractmethod
    def _read(self, variables: Variables) -> Membership:
        """What this process is, according to the variables."""
