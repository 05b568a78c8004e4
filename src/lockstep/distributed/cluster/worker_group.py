"""The processes that train in step, as every resolver describes them."""

from dataclasses import dataclass

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.addresses import host_of, is_loopback, split_address

__all__ = ["WorkerGroup", "check_reachable"]


@dataclass(frozen=True)
class WorkerGroup:
    """The processes that train in step, and which of them this one is.

    Args:
        workers: their number, at least 1. A chief is worker 0.
        index: this process's number, from 0.
        coordinator: ``host:port`` of worker 0.
        addresses: of all workers in order, the coordinator first; None if the scheduler does not provide them.
        local_index: this process's number among those of its machine, from 0.
        local_workers: number of these processes on this machine, which share its devices.
        source: of the description, for messages: ``TF_CONFIG``, ``Slurm``.
        notes: sentences for the user about settings that were found and not used.

    Raises:
        ClusterError: the numbers contradict each other; the network is not used.

    Example:
        >>> from lockstep.distributed.cluster.worker_group import WorkerGroup
        >>> group = WorkerGroup(workers=2, index=1, coordinator="a:12421", addresses=("a:12421", "b:12421"))
        >>> group.name, group.name_of(0)
        ('worker 1 of 2 (b:12421)', 'worker 0 of 2 (a:12421)')
    """

    workers: int
    index: int
    coordinator: str
    addresses: tuple[str, ...] | None = None
    local_index: int = 0
    local_workers: int = 1
    source: str = "arguments"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_numbers()
        split_address(f"{self.source}: the coordinator", self.coordinator)
        if self.addresses is not None:
            self._check_addresses(self.addresses)

    @property
    def is_chief(self) -> bool:
        """True for worker 0, the only one that prints and writes."""
        return self.index == 0

    @property
    def name(self) -> str:
        """The name of this process in messages."""
        return self.name_of(self.index)

    def name_of(self, index: int) -> str:
        """Return the name of a worker in messages, with its address if that is known.

        Args:
            index: its number, from 0.

        Returns:
            Such as ``worker 1 of 2 (b:12421)``.
        """
        if self.addresses is not None:
            address = f" ({self.addresses[index]})"
        else:
            address = f" ({self.coordinator})" if index == 0 else ""
        return f"worker {index} of {self.workers}{address}"

    def _check_numbers(self) -> None:
        if self.workers < 1:
            raise ClusterError(f"{self.source}: expected at least 1 worker, got {self.workers}.")
        if not 0 <= self.index < self.workers:
            raise ClusterError(
                f"{self.source}: {self.workers} workers have the indices 0 to {self.workers - 1}; got {self.index}."
            )
        if not 0 <= self.local_index < self.local_workers <= self.workers:
            raise ClusterError(
                f"{self.source}: this process is number {self.local_index} of {self.local_workers} on its machine, of "
                f"{self.workers} in all; expected numbers that count from 0, and no more here than in all."
            )

    def _check_addresses(self, addresses: tuple[str, ...]) -> None:
        if len(addresses) != self.workers or addresses[0] != self.coordinator:
            raise ClusterError(
                f"{self.source}: expected {self.workers} addresses, {self.coordinator} first, got {list(addresses)}."
            )
        for index, address in enumerate(addresses):
            host, _ = split_address(f"{self.source}: worker {index}", address)
            if address in addresses[:index]:
                raise ClusterError(
                    f"{self.source}: worker {addresses.index(address)} and worker {index} have one address, {address}; "
                    "give each process its own port."
                )
            if not is_loopback(host):
                check_reachable(self)


def check_reachable(group: WorkerGroup) -> None:
    """Check that the workers on other machines can reach worker 0, for a group that is on several machines.

    Raises:
        ClusterError: the coordinator is ``localhost`` or the like.
    """
    host = host_of(group.coordinator)
    if is_loopback(host):
        raise ClusterError(
            f"{group.source}: {group.name_of(0)} cannot be reached by workers on other machines, where {host!r} is their "
            "own machine. Give worker 0 the name or address that its machine has in the network, or set "
            "LOCKSTEP_COORDINATOR=host:port on every worker."
        )
