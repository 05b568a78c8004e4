"""The supervisor of ``lockstep run``: starts the processes of this node, restarts them, and reports why they failed.

A restart loop yields the rank assignment of each generation of workers, decided here or by the rendezvous (``rendezvous.py``).
"""

import contextlib
import io
import itertools
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from lockstep._atomic_files import open_own
from lockstep._errors import DONE, NO_PROGRESS, OptionError
from lockstep.distributed.cluster.env_reader import NetworkOptions, visible_gpus
from lockstep.distributed.control.handshake import check_closed
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.local_workers import IDLE_STOP_SIGNALS, LocalWorkers, RemoteStop
from lockstep.launch.log_multiplexer import TerminalWriter
from lockstep.launch.rank_assignment import (
    AnyRankAssignment,
    ProcessName,
    RankAssignment,
    ServerRankAssignment,
    cannot_start,
    find_node_rank,
    format_counts,
    reserved_addresses,
)
from lockstep.launch.reaper import adopt_orphans, child_pids
from lockstep.launch.rendezvous import NodeExit, RendezvousClient, join_rendezvous
from lockstep.launch.restart_policy import RestartBudget, backoff_seconds
from lockstep.launch.signals import FORWARDED, SignalPipe
from lockstep.launch.worker_environment import (
    MallocSelection,
    choose_allocator,
    glibc_version,
    gpu_variables,
    inherited_variables,
    library_folders,
)
from lockstep.launch.worker_process import WorkerProcess

_FLUSH_SECONDS = 2.0  # For a reader to take the last output, or some of it at the very end.


def supervise(job: LaunchConfig, environment: Mapping[str, str], output: io.RawIOBase, messages: io.RawIOBase) -> int:
    """Run a job's workers, which inherit ``environment``, on this node until they have exited; no process remains. Both streams are unbuffered.

    This function takes over the signals of the calling process and, on Linux, the orphans below it.

    Returns:
        The exit code of the job, see ``docs/launching.md``.

    Raises:
        OptionError: the rank of this node, the program or the allocator cannot be found.
        ClusterError: the nodes are several machines and there is no secret, or it is too short.
    """
    node = find_node_rank(job)
    stop_at = None if job.timeout is None else time.monotonic() + job.timeout
    if not job.is_module and not os.path.isfile(job.program[0]):
        fix = "give the script after the options of lockstep run."
        if os.path.isdir(job.program[0]):
            raise OptionError(
                f"{job.program[0]}: is a folder, not a script. Fix: {fix} For a package, give -m and its name."
            )
        raise OptionError(f"{job.program[0]}: there is no such file. Fix: {fix}")
    gpus = visible_gpus(environment)
    allocator = choose_allocator(
        job.allocator, environment, library_folders(environment), glibc_version(), uses_gpus=bool(gpus)
    )
    inherited = {**inherited_variables(job, environment), **allocator.variables}
    network = NetworkOptions.of(inherited)
    if job.coordinator_address is not None:
        check_closed(job.coordinator_address, network, "this node")
    adopt_orphans()
    signals = SignalPipe(FORWARDED)
    with contextlib.closing(signals):
        colours = not environment.get("NO_COLOR")
        terminals = [
            TerminalWriter(stream, lambda: signals.post(signal.SIGPIPE), colours) for stream in (output, messages)
        ]
        supervisor = _Supervisor(
            job=job,
            environment=inherited,
            network=network,
            gpus=gpus,
            restarts=RestartBudget(job.max_restarts),
            signals=signals,
            stop_at=stop_at,
            excluded=child_pids(),
            output=terminals[0],
            messages=terminals[1],
        )
        with contextlib.closing(supervisor):
            supervisor.log_configuration(node, allocator, "TF_CONFIG" in environment)
            return supervisor.run(node)


@dataclass
class LocalRestartLoop:
    """Restart loop of a node that restarts its workers on its own, until ``stop_at`` on the monotonic clock; None: without limit."""

    job: LaunchConfig
    node: int
    restarts: RestartBudget
    signals: SignalPipe
    log: Callable[[str], None]
    stop_at: float | None = None
    remote_stop: None = None
    code: int = field(default=DONE, init=False)
    _is_over: bool = field(default=False, init=False)

    def assignments(self) -> Generator[AnyRankAssignment, None, None]:
        """Yield assignments as long as workers fail and may be restarted; it is resumed when the workers of the last one have ended."""
        for generation in itertools.count():
            if generation and not self._take_restart():
                return
            with self._assignment(generation) as assignment:
                yield assignment
            if self._is_over:
                return

    def record(self, workers: LocalWorkers) -> None:
        """Record how a generation has ended here."""
        self.code, self._is_over = workers.code, workers.code == DONE or workers.is_final

    def close(self) -> None:
        """Do nothing: there are no resources."""

    @contextlib.contextmanager
    def _assignment(self, generation: int) -> Iterator[AnyRankAssignment]:
        workers, nodes = self.job.workers, self.job.nodes
        if self.job.servers is not None:
            with reserved_addresses(sum(self.job.processes.values())) as addresses:
                yield ServerRankAssignment.at(generation, self.job.processes, addresses)
        else:
            with self._addresses() as (coordinator, known):
                yield RankAssignment(
                    generation=generation,
                    node=self.node,
                    nodes=nodes,
                    workers=workers,
                    first=self.node * workers,
                    all_workers=nodes * workers,
                    coordinator=coordinator,
                    addresses=known,
                    is_counted_here=nodes > 1,
                )

    @contextlib.contextmanager
    def _addresses(self) -> Iterator[tuple[str, Sequence[str] | None]]:
        """Yield the address of worker 0, and those of all workers if they are known; free ports are chosen anew each time."""
        if self.job.coordinator_address is not None:
            yield self.job.coordinator_address, self.job.addresses
        else:
            with reserved_addresses(self.job.workers) as addresses:
                yield addresses[0], addresses

    def _take_restart(self) -> bool:
        """Take a restart and wait; return False if none is left or the supervisor was asked to stop during the wait."""
        restart = self.restarts.take()
        return restart is not None and self._wait_before(restart)

    def _wait_before(self, restart: int) -> bool:
        seconds = backoff_seconds(restart)
        self.log(f"restart {restart} of {self.job.max_restarts} in {seconds:g} s.")
        start_at = time.monotonic() + seconds
        is_too_late = self.stop_at is not None and start_at >= self.stop_at
        until = self.stop_at if self.stop_at is not None and is_too_late else start_at
        while (left := until - time.monotonic()) > 0:
            numbers, _ = self.signals.wait(left)
            if set(numbers) & set(IDLE_STOP_SIGNALS):
                return False
        if is_too_late:
            self.code = NO_PROGRESS
            self.log("the run takes longer than --timeout allows.")
        return not is_too_late


@dataclass(frozen=True)
class _Supervisor:
    job: LaunchConfig
    environment: Mapping[str, str]
    network: NetworkOptions
    gpus: list[str]
    restarts: RestartBudget
    signals: SignalPipe
    stop_at: float | None
    excluded: Set[int]  # Children that existed before.
    output: TerminalWriter
    messages: TerminalWriter

    def run(self, node: int | None) -> int:
        """Run one generation of workers after the other until the restart loop ends."""
        loop = self._restart_loop(node)
        if isinstance(loop, NodeExit):
            self._log(f"{loop.sentence.removesuffix('.')}." if loop.sentence else "stopped by a signal.")
            return loop.code
        with contextlib.closing(loop), contextlib.closing(loop.assignments()) as assignments:
            for assignment in assignments:
                workers = self._run_generation(assignment, loop.remote_stop)
                if workers.failure is not None:
                    self._print(workers.failure.report)
                loop.record(workers)
        return loop.code

    def close(self) -> None:
        """Write what is left of the output, if it is read."""
        lost = self.output.close(_FLUSH_SECONDS)
        if lost:
            self._log(f"the output was not read in time: its last {lost:,} bytes are lost.")
        if self.output.error is not None:
            self._log(
                f"the output cannot be written ({self.output.error}): the rest of it is lost. Fix: --log-dir writes it to files."
            )
        self.messages.close(_FLUSH_SECONDS)

    def _restart_loop(self, node: int | None) -> LocalRestartLoop | RendezvousClient | NodeExit:
        if not self.job.is_elastic:
            return LocalRestartLoop(self.job, node or 0, self.restarts, self.signals, self._log, self.stop_at)
        return join_rendezvous(self.job, node, self.network, self.signals, self.stop_at, self._log)

    def _run_generation(self, assignment: AnyRankAssignment, remote_stop: RemoteStop | None) -> LocalWorkers:
        workers = LocalWorkers(
            assignment.processes,
            partial(self._start, assignment),
            restarts=self.restarts,
            signals=self.signals,
            grace=self.job.grace,
            stop_at=self.stop_at,
            excluded=self.excluded,
            log=self._log,
            remote_stop=remote_stop,
        )
        try:
            workers.run()
        finally:
            workers.kill_and_reap()
            self.output.flush(_FLUSH_SECONDS)  # Before messages about the end.
        return workers

    def _start(self, assignment: AnyRankAssignment, process: ProcessName) -> WorkerProcess:
        ranks = assignment.variables(assignment.processes.all.index(process))
        environment = {**self.environment, **ranks, **gpu_variables(self.gpus, process, assignment.processes)}
        prefix = self.output.prefix(process)
        log_file = self._open_log(process)
        is_shown = log_file is None or self.job.tee
        show = (lambda line: self.output.write(prefix + line + b"\n")) if is_shown else None
        try:
            return WorkerProcess(process, self.job, environment, log_file, show)
        except (OSError, RuntimeError) as error:
            raise cannot_start(process.name, error) from None

    def _open_log(self, process: ProcessName) -> io.FileIO | None:
        if self.job.log_dir is None:
            return None
        try:
            self.job.log_dir.mkdir(parents=True, exist_ok=True)
            return io.FileIO(open_own(self.job.log_dir / process.file_name, os.O_WRONLY | os.O_APPEND), "a")
        except OSError as error:
            raise OptionError(f"--log-dir {self.job.log_dir}: {error}. Fix: give a writable folder.") from None

    def log_configuration(self, node: int | None, allocator: MallocSelection, is_config_replaced: bool) -> None:
        """Print what was found and chosen."""
        job = self.job
        where = f"node {node} of {job.nodes}" if job.nodes > 1 else "this machine"
        if job.is_elastic:
            where = f"this one of {job.nnodes} nodes, rendezvous at {job.coordinator_address}"
        self._log(f"{format_counts(job.processes)} on {where}; allocator: {allocator.name}.")
        if 0 < len(self.gpus) < job.workers:
            self._log(
                f"{job.workers} workers share {len(self.gpus)} GPUs and each sees all of them, which NCCL refuses and their memory "
                "seldom allows. Fix: start at most one worker a GPU, or set JAX_PLATFORMS=cpu."
            )
        if is_config_replaced:
            self._log("TF_CONFIG of the environment is not used: lockstep run sets it for its workers.")
        if job.log_dir is not None:
            self._log(f"the output of the workers goes to {job.log_dir}{os.sep}*.log.")

    def _log(self, text: str) -> None:
        self._print(f"{text}\n")

    def _print(self, text: str) -> None:
        line = f"lockstep run: {text}".encode(errors="backslashreplace")
        self.messages.write(line, waits=False)  # It never waits for a reader.
