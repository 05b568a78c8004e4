"""What every resolver yields and all that follows reads: the processes that train in step."""

from dataclasses import dataclass

from lockstep._errors import ClusterError
from lockstep.cluster.addresses import split_address

__all__ = ["WorkerGroup"]


@dataclass(frozen=True)
class WorkerGroup:
    """The processes that train in step, and which of them this one is.

    Args:
        workers: their number, at least 1. A chief is worker 0.
        index: this process's number, from 0.
        coordinator: ``host:port`` of worker 0.
        addresses: of all workers in order, as far as the scheduler tells; else None. The first is the coordinator.
        local_index: this process's number among those of its machine, from 0.
        local_workers: number of these processes on this machine, who share its devices.
        source: what said so, for messages: ``TF_CONFIG``, ``Slurm``.
        notes: sentences for the user about what was seen and not used.

    Raises:
        ClusterError: the numbers do not fit together; nothing was asked of the network.

    Example:
        >>> from lockstep.cluster.group import WorkerGroup
        >>> WorkerGroup(workers=2, index=1, coordinator="a:12421", addresses=("a:12421", "b:12421")).name
        'worker 1 of 2 (b:12421)'
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
        """True for worker 0, who alone prints and writes."""
        return self.index == 0

    @property
    def name(self) -> str:
        """This process as messages name it."""
        return self.name_of(self.index)

    def name_of(self, index: int) -> str:
        """Worker ``index`` as messages name it, with its address where that is known."""
        if self.addresses is not None:
            address = f" ({self.addresses[index]})"
        else:
            address = f" ({self.coordinator})" if index == 0 else ""
        return f"worker {index} of {self.workers}{address}"

    def _check_numbers(self) -> None:
        if not 0 <= self.index < self.workers:
            raise ClusterError(
                f"{self.source}: expected an index from 0 to {self.workers - 1}, as there are {self.workers} workers, "
                f"got {self.index}."
            )
        if not 0 <= self.local_index < self.local_workers <= self.workers:
            raise ClusterError(
                f"{self.source}: this process is number {self.local_index} of {self.local_workers} on its machine, and "
                f"there are {self.workers} workers in all; expected numbers that rise from 0, and no more here than in all."
            )

    def _check_addresses(self, addresses: tuple[str, ...]) -> None:
        if len(addresses) != self.workers:
            raise ClusterError(f"{self.source}: expected {self.workers} addresses, got {len(addresses)}: {addresses}.")
        for index, address in enumerate(addresses):
            split_address(f"{self.source}: worker {index}", address)
