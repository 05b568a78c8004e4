"""What the supervisors tell each other: who they are, on what terms they meet, and how a generation has ended."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lockstep._errors import OptionError, whole_number
from lockstep.distributed.cluster.addresses import join_address, split_address
from lockstep.distributed.control.peer import Peer
from lockstep.launch.launch_config import LaunchConfig

__all__ = ["GenerationOutcome", "JobSpec", "NodeInfo"]

_MOST_WORKERS = 1024  # on one node


@dataclass(frozen=True)
class JobSpec:
    """What must be the same on all nodes.

    Args:
        nodes: as ``--nnodes`` takes it.
        least: the fewest nodes that start.
        most: the most.
        max_restarts: number of generations after the first.
        join_seconds: how long to wait for more nodes when the fewest are there.
        start_seconds: limit of the wait for the fewest.
        grace: seconds that workers have to end.
        coordinator: ``host:port`` of the meeting.
        hosts: of all nodes, if they are known.
    """

    nodes: str
    least: int
    most: int
    max_restarts: int
    join_seconds: float
    start_seconds: float
    grace: float
    coordinator: str
    hosts: tuple[str, ...]

    @classmethod
    def of(cls, job: LaunchConfig) -> "JobSpec":
        """Those of a job whose nodes meet."""
        hosts, coordinator = job.hosts or (), job.meeting_address or ""
        limits = (job.max_restarts, job.join_seconds, job.start_seconds, job.grace)
        return cls(job.nodes_said, job.least_nodes or job.nodes, job.nodes, *limits, coordinator, hosts)

    def as_identity(self) -> dict[str, Any]:
        """As options, for a sentence that says which of them differs."""
        names = ("max_restarts", "join_seconds", "start_seconds", "grace")
        options = {f"--{name.replace('_', '-')}": vars(self)[name] for name in names}
        return {"--nnodes": self.nodes, "--hosts": list(self.hosts), **options}


@dataclass(frozen=True)
class NodeInfo:
    """A supervisor that has come to the meeting.

    Args:
        process: its machine and process.
        rank: which node it says that it is; None: it does not say.
        workers: number of workers on it.
        host: where its workers are reached.
        port: their ports are those above it.
        is_host: whether the meeting is at its place.
    """

    process: str
    rank: int | None
    workers: int
    host: str
    port: int
    is_host: bool = False

    @classmethod
    def of(cls, peer: Peer, address: str, is_host: bool = False) -> "NodeInfo":
        """What a supervisor has said; ``address`` is that of its machine where it has not said one.

        Raises:
            OptionError: a number is none, or out of its range.
            ClusterError: host and port are no address.
        """
        said = peer.information
        rank = None if said["rank"] is None else whole_number("rank", said["rank"], 0)
        workers = whole_number("workers", peer.workers)
        if workers > _MOST_WORKERS:
            raise OptionError(f"workers: expected at most {_MOST_WORKERS} on one node, got {workers}.")
        host, port = split_address(
            "address", join_address(str(said["host"] or address), whole_number("port", said["port"]))
        )
        return cls(peer.process, rank, workers, host, port, is_host)


@dataclass(frozen=True)
class GenerationOutcome:
    """How a generation has ended on one node.

    Args:
        code: what the job ends with, if this is why.
        sentence: for the user.
        is_consequence: whether another node is the cause.
        is_final: whether the job ends with it, whatever the others do.
        leaves: whether the node takes no part any more.
    """

    code: int
    sentence: str
    is_consequence: bool = False
    is_final: bool = False
    leaves: bool = False

    def as_message(self) -> dict[str, Any]:
        """This, as it travels."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "GenerationOutcome":
        """What :meth:`as_message` gave; KeyError or ValueError where it is something else."""
        flags = (bool(message[name]) for name in ("is_consequence", "is_final", "leaves"))
        return cls(int(message["code"]), str(message["sentence"]), *flags)
