"""Configuration of ``lockstep run``: one validated, immutable dataclass, and what the printed job scripts take from it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep._errors import OptionError, seconds, whole_number
from lockstep.distributed.cluster.addresses import DEFAULT_PORT, MAX_PORT, is_loopback, join_address, split_address

MAX_WORKERS = 1024  # on one node


@dataclass(frozen=True)
class LaunchConfig:
    """One program on all workers of all nodes, and the rank of this node.

    Args:
        program: a script or the name of a module, then its arguments.
        is_module: whether it is a module, as after ``python -m``.
        workers: number of workers on each node.
        servers: number of variable servers for asynchronous training, which a chief then coordinates. None: synchronous training.
        has_evaluator: whether there is an evaluator, too; only with ``servers``.
        nodes: number of nodes, each with its own supervisor; the maximum if ``min_nodes`` is set.
        min_nodes: the fewest nodes that the job runs on; None: it needs all.
        node_rank: this node's number, from 0; None if there is one node, or if ``hosts`` or the rendezvous determines it.
        coordinator: ``host:port`` of worker 0; None: chosen on this machine.
        hosts: hosts of all nodes in order, each ``host`` or ``host:port``; the workers of a node take this port and those above it.
        max_restarts: limit of restarts: of all processes after one has failed, or of a single worker that the job can lose.
        join_seconds: how long to wait for more nodes when ``min_nodes`` have joined.
        start_seconds: limit of the wait for ``min_nodes`` nodes.
        log_dir: folder for the output of each worker; None: it goes to the terminal.
        tee: to both.
        timeout: limit for the whole run in seconds; None: no limit.
        grace: seconds that workers have to exit after SIGTERM.
        allocator: "auto", "system", "jemalloc" or "tcmalloc".
        container_image: image for the containers of a printed job script; None: a placeholder, or no container.
        container_mounts: further mounts of these containers in a script for Slurm, as Pyxis takes them.

    Raises:
        OptionError: the options do not fit together.
        ClusterError: an address is invalid.

    Example:
        >>> LaunchConfig(("train.py",), workers=2, nodes=2, hosts=("a", "b:5000")).addresses
        ('a:12421', 'a:12422', 'b:5000', 'b:5001')
    """

    program: tuple[str, ...]
    is_module: bool = False
    workers: int = 1
    servers: int | None = None
    has_evaluator: bool = False
    nodes: int = 1
    min_nodes: int | None = None
    node_rank: int | None = None
    coordinator: str | None = None
    hosts: tuple[str, ...] | None = None
    max_restarts: int = 0
    join_seconds: float = 30.0
    start_seconds: float = 600.0
    log_dir: Path | None = None
    tee: bool = False
    timeout: float | None = None
    grace: float = 30.0
    allocator: str = "auto"
    container_image: str | None = None
    container_mounts: str | None = None

    def __post_init__(self) -> None:
        whole_number("--nproc-per-node" if self.servers is None else "--workers", self.workers, maximum=MAX_WORKERS)
        if self.servers is not None:
            whole_number("--servers", self.servers, maximum=MAX_WORKERS)
        whole_number("--nnodes", self.nodes)
        whole_number("--max-restarts", self.max_restarts, 0)
        if self.min_nodes is not None and not 1 <= self.min_nodes <= self.nodes:
            raise OptionError(
                f"--nnodes: expected MIN:MAX with 1 <= MIN <= MAX, got {self.min_nodes}:{self.nodes}. Fix: give the smaller number first."
            )
        self._check_seconds()
        self._check_addresses()
        if self.tee and self.log_dir is None:
            raise OptionError(
                "--tee: it shows what --log-dir writes to files, but --log-dir is missing. Fix: give --log-dir, too."
            )

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change; the nodes then hold a rendezvous before each start."""
        return self.min_nodes is not None

    @property
    def processes(self) -> Mapping[str, int]:
        """Number of processes of each kind on each node."""
        if self.servers is None:
            return {"worker": self.workers}
        evaluators = {"evaluator": 1} if self.has_evaluator else {}
        return {"chief": 1, "worker": self.workers, "ps": self.servers, **evaluators}

    @property
    def least_nodes(self) -> int:
        """The fewest nodes that the job runs on."""
        return self.min_nodes or self.nodes

    @property
    def nnodes(self) -> str:
        """The number of nodes as ``--nnodes`` takes it."""
        return f"{self.min_nodes}:{self.nodes}" if self.is_elastic else str(self.nodes)

    @property
    def addresses(self) -> tuple[str, ...] | None:
        """``host:port`` of every worker; None if the options do not determine it."""
        firsts = self.first_addresses
        if len(firsts) < self.nodes:
            return None
        return tuple(address for first in firsts for address in self._addresses_from(first))

    @property
    def coordinator_address(self) -> str | None:
        """``host:port`` of worker 0; None if the options do not determine it."""
        return next(iter(self.first_addresses), None)

    @property
    def first_addresses(self) -> list[str]:
        """``host:port`` of the first worker on each node that the options name."""
        if self.hosts is not None:
            return [_with_port("--hosts", host) for host in self.hosts]
        return [] if self.coordinator is None else [_with_port("--coordinator", self.coordinator)]

    def _addresses_from(self, first: str) -> list[str]:
        host, port = split_address("address", first)
        self._check_ports(first, port)
        return [join_address(host, port + local) for local in range(self.workers)]

    def _check_ports(self, address: str, port: int) -> None:
        if port + self.workers - 1 > MAX_PORT:
            raise OptionError(
                f"{address}: there are no ports for {self.workers} workers from {port} to {MAX_PORT}. Fix: give a lower port."
            )

    def _check_seconds(self) -> None:
        waits = {"--join-seconds": self.join_seconds, "--start-seconds": self.start_seconds}
        for name, limit in {"--timeout": self.timeout, "--grace": self.grace, **waits}.items():
            if limit is not None:
                seconds(name, limit, above=None)

    def _check_addresses(self) -> None:
        if self.hosts is not None and self.coordinator is not None:
            raise OptionError(
                "--coordinator: the first of --hosts is the coordinator. Fix: give one of the two options only."
            )
        if self.hosts is not None and len(self.hosts) != self.nodes:
            raise OptionError(
                f"--hosts: expected {self.nodes} hosts, as there are {self.nodes} nodes, got {len(self.hosts)}. Fix: name one for each "
                "node, or correct --nnodes."
            )
        if self.node_rank is not None and not 0 <= self.node_rank < self.nodes:
            raise OptionError(
                f"--node-rank: expected 0 to {self.nodes - 1}, got {self.node_rank}. Fix: number the nodes from 0."
            )
        self._check_reachable()
        for address in self.first_addresses if self.is_elastic else ():  # That port is the one of the rendezvous.
            self._check_ports(address, split_address("address", address)[1] + 1)
        addresses = self.addresses or ()
        if len(set(addresses)) != len(addresses):
            twice = next(address for address in addresses if addresses.count(address) > 1)
            raise OptionError(
                f"--hosts: two workers would have the address {twice}. Fix: give each node its own ports."
            )

    def _check_reachable(self) -> None:
        """Check that other machines can reach worker 0; with ``hosts``, all nodes may be on one machine."""
        nodes = [split_address("address", address)[0] for address in self.first_addresses]
        if self.nodes == 1 or self.is_elastic or not nodes or not is_loopback(nodes[0]):
            return
        if self.hosts is None or not all(map(is_loopback, nodes)):
            option = "--coordinator" if self.hosts is None else "--hosts"
            raise OptionError(
                f"{option}: {nodes[0]!r} is its own machine for each node, so the others cannot reach worker 0 there. Fix: give the "
                "name or address that the machine of node 0 has in the network."
            )


def _with_port(option: str, address: str) -> str:
    """Add the default port to an address without one; a bare IPv6 address has none."""
    if address.count(":") > 1 and not address.startswith("["):
        address = join_address(address, DEFAULT_PORT)
    elif ":" not in address or address.endswith("]"):
        address = f"{address}:{DEFAULT_PORT}"
    split_address(option, address)
    return address


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def run_options(job: LaunchConfig) -> list[str]:
    """Return the options of ``lockstep run`` that are the same on each node, without the addresses of the nodes."""
    options = ["-n", str(job.workers), "--nnodes", job.nnodes]
    options += ["--max-restarts", str(job.max_restarts)] if job.max_restarts else []
    if job.is_elastic:
        options += ["--join-seconds", _number(job.join_seconds), "--start-seconds", _number(job.start_seconds)]
    options += ["--timeout", _number(job.timeout)] if job.timeout is not None else []
    options += ["--grace", _number(job.grace)]
    options += ["--allocator", job.allocator]
    options += ["--log-dir", str(job.log_dir)] if job.log_dir is not None else []
    return options + (["--tee"] if job.tee else [])


def program_words(job: LaunchConfig) -> list[str]:
    """Return the program and its arguments, the end of the command line."""
    return [*(["-m"] if job.is_module else ["--"]), *job.program]


def job_name(job: LaunchConfig) -> str:
    """Return a name for the job that every scheduler accepts: a letter, then at most 39 lower-case letters, digits and dashes.

    Example:
        >>> job_name(LaunchConfig(("experiments/Train_2.py",))), job_name(LaunchConfig(("2.py",)))
        ('train-2', 'job-2')
    """
    program = job.program[0].rpartition("/")[2].removesuffix(".py")
    name = re.sub("[^a-z0-9]+", "-", program.lower()).strip("-") or "lockstep"
    return (name if name[0].isalpha() else f"job-{name}")[:40].rstrip("-")


def first_port(job: LaunchConfig) -> int:
    """Return the port of worker 0."""
    return DEFAULT_PORT if job.coordinator_address is None else split_address("coordinator", job.coordinator_address)[1]
