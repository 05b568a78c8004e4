"""Where the workers of this node are: which node it is, which ports they have, and what each is told of it."""

import contextlib
import itertools
import json
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep._errors import OptionError
from lockstep.distributed.cluster.addresses import split_address
from lockstep.distributed.cluster.ports import COORDINATOR
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.process_names import ProcessName, ProcessNames

__all__ = ["AnyPlace", "RankAssignment", "ServerRankAssignment", "find_node", "is_here", "reserved_addresses"]

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RankAssignment:
    """What the workers of this node are in one generation.

    Args:
        generation: how many times the workers were started before.
        node: rank of this node.
        nodes: number of nodes.
        workers: number of workers on this node.
        first: rank of the first of them.
        all_workers: number of workers on all nodes.
        meeting: ``host:port`` of worker 0.
        addresses: of all workers, or None where they are not known.
    """

    generation: int
    node: int
    nodes: int
    workers: int
    first: int
    all_workers: int
    meeting: str
    addresses: Sequence[str] | None

    @property
    def tasks(self) -> ProcessNames:
        """The workers of this node, none of which can be spared."""
        return ProcessNames([ProcessName("worker", self.first + local) for local in range(self.workers)])

    def variables(self, local: int) -> Mapping[str, str]:
        """What one worker is told: ``TF_CONFIG`` where all addresses are known, and always what torchrun would say.

        Args:
            local: the worker's number on this node.

        Example:
            >>> RankAssignment(0, 0, 1, 2, 0, 2, "h:1", ("h:1", "h:2")).variables(1)["TF_CONFIG"]
            '{"cluster": {"worker": ["h:1", "h:2"]}, "task": {"type": "worker", "index": 1}}'
        """
        rank = self.first + local
        host, port = split_address("coordinator", self.meeting)
        told = {
            "RANK": rank,
            "WORLD_SIZE": self.all_workers,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": self.workers,
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": self.nodes,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "LOCKSTEP_GENERATION": self.generation,
        }
        if self.addresses is None:  # Else MASTER_PORT would be taken for the port of torchrun itself.
            told[COORDINATOR] = self.meeting
        else:
            task = {"type": "worker", "index": rank}
            told["TF_CONFIG"] = json.dumps({"cluster": {"worker": list(self.addresses)}, "task": task})
        return {name: str(value) for name, value in told.items()}


@dataclass(frozen=True)
class ServerRankAssignment:
    """What the processes are in one generation where servers keep the variables: all are on this machine.

    Args:
        generation: how many times all were started before.
        cluster: ``host:port`` of the processes of each kind, as ``TF_CONFIG`` names them.
    """

    generation: int
    cluster: Mapping[str, Sequence[str]]

    @classmethod
    def at(cls, generation: int, processes: Mapping[str, int], addresses: Iterable[str]) -> "ServerRankAssignment":
        """So many processes of each kind at these addresses."""
        rest = iter(addresses)
        return cls(generation, {job: list(itertools.islice(rest, number)) for job, number in processes.items()})

    @property
    def tasks(self) -> ProcessNames:
        """All processes: workers can be lost, and the job is done when its chief is."""
        every = [ProcessName(job, index) for job, addresses in self.cluster.items() for index in range(len(addresses))]
        return ProcessNames(every, frozenset(task for task in every if task.job == "worker"), ProcessName("chief", 0))

    def variables(self, local: int) -> Mapping[str, str]:
        """What one process is told: nothing that torchrun would say, as these are not alike.

        Args:
            local: its number among the tasks.

        Example:
            >>> ServerRankAssignment(0, {"chief": ["h:1"], "worker": ["h:2"], "ps": ["h:3"]}).variables(2)["TF_CONFIG"]
            '{"cluster": {"chief": ["h:1"], "worker": ["h:2"], "ps": ["h:3"]}, "task": {"type": "ps", "index": 0}}'
        """
        task = self.tasks.all[local]
        config = {"cluster": self.cluster, "task": {"type": task.job, "index": task.index}}
        return {"TF_CONFIG": json.dumps(config), "LOCKSTEP_GENERATION": str(self.generation)}


AnyPlace = RankAssignment | ServerRankAssignment


def find_node(job: LaunchConfig) -> int | None:
    """This node's rank: what was said, or which of the hosts is this machine; None where nodes that meet have not said it.

    Raises:
        OptionError: neither tells.
    """
    if job.meeting_address is None and (job.nodes > 1 or job.is_elastic):
        raise OptionError(
            f"--nnodes {job.nodes_said}: say where worker 0 is, --coordinator HOST:PORT, or --hosts with all nodes."
        )
    if job.node_rank is not None:
        return job.node_rank
    if job.hosts is not None and job.nodes > 1:
        return _find_among_hosts(job)
    if job.nodes > 1 and not job.is_elastic:
        raise OptionError(f"--nnodes {job.nodes}: say which node this is, --node-rank 0 to {job.nodes - 1}.")
    return None if job.is_elastic else 0


def _find_among_hosts(job: LaunchConfig) -> int:
    first_workers = (job.addresses or ())[:: job.workers]
    here = [rank for rank, address in enumerate(first_workers) if is_here(split_address("--hosts", address)[0])]
    if len(here) != 1:
        found = "none of the hosts is" if not here else f"{len(here)} of the hosts are"
        raise OptionError(
            f"--hosts: {found} this machine ({socket.gethostname()}); say which node it is with --node-rank."
        )
    return here[0]


def is_here(host: str) -> bool:
    """Whether a host is this machine: only then can a socket have its address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as test:
            test.bind(address)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def reserved_addresses(count: int) -> Iterator[tuple[str, ...]]:
    """Loopback addresses that nobody else is given meanwhile.

    The sockets stay bound, but do not listen: Linux then gives their ports to those only who ask for them by number and
    with SO_REUSEADDR, as servers do. Other systems refuse that, so there the ports are free again at once.
    """
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((_LOOPBACK, 0))
        addresses = tuple(f"{_LOOPBACK}:{one.getsockname()[1]}" for one in sockets)
        if sys.platform != "linux":
            held.close()
        yield addresses
