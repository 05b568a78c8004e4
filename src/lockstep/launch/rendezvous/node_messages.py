"""Messages between supervisors in the rendezvous: node descriptions, the job spec that must match, and generation outcomes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lockstep._errors import OptionError, whole_number
from lockstep.distributed.cluster.addresses import join_address, split_address
from lockstep.distributed.control.peer import Peer
from lockstep.launch.launch_config import LaunchConfig

__all__ = ["GenerationOutcome", "JobSpec", "NodeInfo"]

_MAX_WORKERS = 1024  # on one node


@dataclass(frozen=True)
class JobSpec:
    """Options that must be the same on all nodes.

    Args:
        nnodes: number of nodes as ``--nnodes`` takes it.
        min_nodes: the fewest nodes that start.
        max_nodes: the most.
        max_restarts: number of generations after the first.
        join_seconds: how long to wait for more nodes when ``min_nodes`` have joined.
        start_seconds: limit of the wait for ``min_nodes`` nodes.
        grace: seconds that workers have to exit after SIGTERM.
        coordinator: ``host:port`` of the rendezvous.
        hosts: of all nodes, if they are known.
    """

    nnodes: str
    min_nodes: int
    max_nodes: int
    max_restarts: int
    join_seconds: float
    start_seconds: float
    grace: float
    coordinator: str
    hosts: tuple[str, ...]

    @classmethod
    def of(cls, job: LaunchConfig) -> "JobSpec":
        """Return the spec of an elastic job."""
        hosts, coordinator = job.hosts or (), job.coordinator_address or ""
        limits = (job.max_restarts, job.join_seconds, job.start_seconds, job.grace)
        return cls(job.nnodes, job.min_nodes or job.nodes, job.nodes, *limits, coordinator, hosts)

    def as_identity(self) -> dict[str, Any]:
        """Return the values by option name, for the handshake and for a message that names the option that differs."""
        names = ("max_restarts", "join_seconds", "start_seconds", "grace")
        options = {f"--{name.replace('_', '-')}": vars(self)[name] for name in names}
        return {"--nnodes": self.nnodes, "--hosts": list(self.hosts), **options}


@dataclass(frozen=True)
class NodeInfo:
    """A supervisor that has joined the rendezvous.

    Args:
        process: its machine and process.
        rank: its node rank as given by the user; None: not given.
        workers: number of workers on it.
        host: where its workers are reached.
        port: their ports are those above it.
        is_server: whether it runs the rendezvous server.
    """

    process: str
    rank: int | None
    workers: int
    host: str
    port: int
    is_server: bool = False

    @classmethod
    def of(cls, peer: Peer, address: str, is_server: bool = False) -> "NodeInfo":
        """Return the description that a supervisor sent; ``address`` replaces its host if it sent none.

        Raises:
            OptionError: a number is invalid or out of its range.
            ClusterError: host and port are not a valid address.
        """
        fields = peer.information
        rank = None if fields["rank"] is None else whole_number("rank", fields["rank"], 0)
        workers = whole_number("workers", peer.workers)
        if workers > _MAX_WORKERS:
            raise OptionError(f"workers: expected at most {_MAX_WORKERS} on one node, got {workers}.")
        host, port = split_address(
            "address", join_address(str(fields["host"] or address), whole_number("port", fields["port"]))
        )
        return cls(peer.process, rank, workers, host, port, is_server)


@dataclass(frozen=True)
class GenerationOutcome:
    """How a generation has ended on one node.

    Args:
        code: the exit code of the job if this outcome is the cause of its end.
        sentence: for the user.
        is_consequence: whether another node is the cause.
        is_final: whether the job ends with it, regardless of the other nodes.
        leaves: whether the node leaves the job.
    """

    code: int
    sentence: str
    is_consequence: bool = False
    is_final: bool = False
    leaves: bool = False

    def as_message(self) -> dict[str, Any]:
        """Return the fields for a message."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "GenerationOutcome":
        """Decode the result of :meth:`as_message`; raise KeyError or ValueError if it is not one."""
        flags = (bool(message[name]) for name in ("is_consequence", "is_final", "leaves"))
        return cls(int(message["code"]), str(message["sentence"]), *flags)
