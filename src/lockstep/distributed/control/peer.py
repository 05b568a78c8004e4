"""Description of a worker that it sends when it joins."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Peer"]


@dataclass(frozen=True)
class Peer:
    """One worker's process.

    Args:
        index: its number, 0 is the chief.
        workers: number of workers that it was started with.
        host: name of its machine.
        pid: its process there.
        generation: how many times its job was restarted.
        identity: what must be equal on all workers.
        information: for the other workers: any JSON.
        address: of its end of the connection, as the chief sees it.

    Example:
        >>> str(Peer(index=1, workers=3, host="node1", pid=77))
        'worker 1 of 3 (node1, process 77)'
    """

    index: int
    workers: int
    host: str
    pid: int
    generation: int = 0
    identity: Mapping[str, Any] = field(default_factory=dict)
    information: Mapping[str, Any] = field(default_factory=dict)
    address: str = ""

    def __str__(self) -> str:
        name = "the chief" if self.job == "chief" else f"{self.job} {self.index} of {self.workers}"
        return f"{name} ({self.process})"

    @property
    def job(self) -> str:
        """``worker``; in a cluster of several jobs also ``chief``, ``ps`` or ``evaluator``."""
        return str(self.information.get("job", "worker"))

    @property
    def process(self) -> str:
        """Machine and process number, for messages."""
        return f"{self.host}, process {self.pid}"
