"""What ``lockstep run`` does: starts the processes of this node, again where that is wanted, and says why they failed."""

import contextlib
import io
import os
import secrets
import signal
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lockstep._errors import OptionError
from lockstep.distributed.cluster.ports import COORDINATOR, PORT
from lockstep.distributed.resolvers.torchrun import TorchrunClusterResolver
from lockstep.launch.gpus import gpu_variables, gpus_of
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.local_workers import LocalWorkers, RemoteStop
from lockstep.launch.log_multiplexer import TerminalWriter
from lockstep.launch.malloc_selection import MallocSelection, choose_allocator, glibc_version, library_folders
from lockstep.launch.process_names import ProcessName, counted
from lockstep.launch.process_tree import adopt_orphans, children
from lockstep.launch.rank_assignment import AnyPlace, find_node
from lockstep.launch.reaper import FORWARDED
from lockstep.launch.rendezvous.rendezvous_client import NodeExit
from lockstep.launch.rendezvous.rendezvous_join import arrive
from lockstep.launch.restart_budget import RestartBudget
from lockstep.launch.restart_loop import LocalRestartLoop, RestartLoop
from lockstep.launch.signal_pipe import SignalPipe
from lockstep.launch.worker_process import WorkerProcess

__all__ = ["SECRET", "supervise"]

SECRET = "LOCKSTEP_SECRET"  # of the job: workers read it, and supervisors that meet


def supervise(job: LaunchConfig, environment: Mapping[str, str], output: io.RawIOBase, messages: io.RawIOBase) -> int:
    """Run a job's workers on this node until they have ended; no process is left then.

    The calling process belongs to this function: its signals, and on Linux the orphans below it.

    Args:
        job: what to run.
        environment: what the workers inherit.
        output: unbuffered, for what they print.
        messages: unbuffered, for what there is to say about them.

    Returns:
        The exit code of the job, see ``docs/launching.md``.

    Raises:
        OptionError: this node, the program or the allocator cannot be found.
    """
    node = find_node(job)
    stop_at = None if job.timeout is None else time.monotonic() + job.timeout
    if not job.is_module and not Path(job.program[0]).is_file():
        raise OptionError(
            f"{job.program[0]}: there is no such file; give the script after the options of lockstep run."
        )
    gpus = gpus_of(environment)
    allocator = choose_allocator(
        job.allocator, environment, library_folders(environment), glibc_version(), uses_gpus=bool(gpus)
    )
    adopt_orphans()
    received = SignalPipe(FORWARDED)
    with contextlib.closing(received):
        colours = not environment.get("NO_COLOR")
        terminals = [
            TerminalWriter(stream, lambda: received.post(signal.SIGPIPE), colours) for stream in (output, messages)
        ]
        inherited = {**_inherited(job, environment), **allocator.variables}
        restarts = RestartBudget(job.max_restarts)
        supervisor = _Supervisor(job, inherited, gpus, restarts, received, stop_at, children(), *terminals)
        supervisor.say_what_starts(node, allocator, "TF_CONFIG" in environment)
        return supervisor.run(node)


def _inherited(job: LaunchConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """All but what would contradict the options; and a secret, where no other machine has to know it."""
    replaced = {"TF_CONFIG"}
    if job.meeting_address is not None:
        replaced |= {COORDINATOR, PORT}
    if job.servers is not None:
        replaced |= {COORDINATOR, PORT, *TorchrunClusterResolver.variables}
    secret = {SECRET: secrets.token_hex()} if job.nodes == 1 and not job.is_elastic else {}
    return {**secret, **{name: value for name, value in environment.items() if name not in replaced}}


@dataclass(frozen=True)
class _Supervisor:
    job: LaunchConfig
    environment: Mapping[str, str]
    gpus: list[str]
    restarts: RestartBudget
    received: SignalPipe
    stop_at: float | None
    spared: Set[int]
    output: TerminalWriter
    messages: TerminalWriter

    def run(self, node: int | None) -> int:
        """Run one generation of workers after the other, until there are no more."""
        course = self._course(node)
        if isinstance(course, NodeExit):
            self._say(f"{course.sentence}." if course.sentence else "asked to end.")
            return course.code
        with contextlib.closing(course), contextlib.closing(course.places()) as places:
            for place in places:
                ended = self._run_once(place, course.news)
                if ended.failure is not None:
                    self.messages.write(f"lockstep run: {ended.failure.report}".encode())
                course.note(ended)
        return course.code

    def _course(self, node: int | None) -> RestartLoop | NodeExit:
        if not self.job.is_elastic:
            return LocalRestartLoop(self.job, node or 0, self.restarts, self.received, self._say)
        secret = self.environment.get(SECRET)
        return arrive(self.job, node, secret.encode() if secret else None, self.received, self.stop_at, self._say)

    def _run_once(self, place: AnyPlace, news: RemoteStop | None) -> LocalWorkers:
        start, times = partial(self._start, place), (self.job.grace, self.stop_at)
        watched = LocalWorkers(place.tasks, start, self.restarts, self.received, *times, self.spared, self._say, news)
        try:
            watched.run()
        finally:
            watched.bury()
        return watched

    def _start(self, place: AnyPlace, task: ProcessName) -> WorkerProcess:
        told = place.variables(place.tasks.all.index(task))
        environment = {**self.environment, **told, **gpu_variables(self.gpus, task, place.tasks)}
        prefix = self.output.prefix(task)
        log = self._log(task)
        is_shown = log is None or self.job.tee
        show = (lambda line: self.output.write(prefix + line + b"\n")) if is_shown else None
        return WorkerProcess(task, self.job, environment, log, show)

    def _log(self, task: ProcessName) -> io.FileIO | None:
        if self.job.log_dir is None:
            return None
        try:
            self.job.log_dir.mkdir(parents=True, exist_ok=True)
            return io.FileIO(self.job.log_dir / task.file_name, "a")
        except OSError as error:
            raise OptionError(
                f"--log-dir {self.job.log_dir}: {error}. Give a folder in which files can be written."
            ) from None

    def say_what_starts(self, node: int | None, allocator: MallocSelection, is_config_replaced: bool) -> None:
        """Tell the user what was found and chosen."""
        job = self.job
        where = f"node {node} of {job.nodes}" if job.nodes > 1 else "this machine"
        if job.is_elastic:
            where = f"this of {job.nodes_said} nodes, which meet at {job.meeting_address}"
        self._say(f"{counted(job.processes)} on {where}; allocator: {allocator.name}.")
        if 0 < len(self.gpus) < job.workers:
            self._say(
                f"{job.workers} workers share {len(self.gpus)} GPUs and each sees all of them, which NCCL refuses and their memory "
                "seldom allows: start at most one worker a GPU, or set JAX_PLATFORMS=cpu."
            )
        if is_config_replaced:
            self._say("TF_CONFIG of the environment is not used; who takes part is what lockstep run says.")
        if job.log_dir is not None:
            self._say(f"what they print goes to {job.log_dir}{os.sep}*.log.")

    def _say(self, text: str) -> None:
        self.messages.write(f"lockstep run: {text}\n".encode())
