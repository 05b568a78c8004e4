"""What ``lockstep run`` does: starts the workers of this node, again where that is wanted, and says why they failed."""

import contextlib
import io
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from lockstep._errors import OptionError
from lockstep.cluster.exit_codes import DONE
from lockstep.cluster.ports import COORDINATOR, PORT
from lockstep.launch.allocator import Allocator, choose_allocator, glibc_version, library_folders
from lockstep.launch.failures import USAGE
from lockstep.launch.generation import ENDING, Generation
from lockstep.launch.gpus import gpus_of, share
from lockstep.launch.job import Job
from lockstep.launch.keeper import FORWARDED
from lockstep.launch.output import Terminal
from lockstep.launch.places import find_node, place_variables, reserved_addresses
from lockstep.launch.processes import adopt_orphans, children
from lockstep.launch.signals import Signals
from lockstep.launch.worker import Worker

__all__ = ["supervise"]

_LONGEST_PAUSE = 30.0  # seconds between two generations; the first is 1 s, each further one twice as long


def supervise(job: Job, environment: Mapping[str, str], output: io.RawIOBase, messages: io.RawIOBase) -> int:
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
    if not job.is_module and not Path(job.program[0]).is_file():
        raise OptionError(
            f"{job.program[0]}: there is no such file; give the script after the options of lockstep run."
        )
    gpus = gpus_of(environment)
    allocator = choose_allocator(
        job.allocator, environment, library_folders(environment), glibc_version(), uses_gpus=bool(gpus)
    )
    adopt_orphans()
    received = Signals(FORWARDED)
    with contextlib.closing(received):
        colours = not environment.get("NO_COLOR")
        terminals = [Terminal(stream, lambda: received.post(signal.SIGPIPE), colours) for stream in (output, messages)]
        inherited = {**_inherited(job, environment), **allocator.variables}
        supervisor = _Supervisor(job, node, inherited, gpus, received, children(), *terminals)
        supervisor.say_what_starts(allocator, "TF_CONFIG" in environment)
        return supervisor.run()


def _inherited(job: Job, environment: Mapping[str, str]) -> dict[str, str]:
    """All but what would contradict the options; and a secret, where no other machine has to know it."""
    replaced = {"TF_CONFIG"} if job.meeting_address is None else {"TF_CONFIG", COORDINATOR, PORT}
    secret = {"LOCKSTEP_SECRET": secrets.token_hex()} if job.nodes == 1 else {}
    return {**secret, **{name: value for name, value in environment.items() if name not in replaced}}


@dataclass(frozen=True)
class _Supervisor:
    job: Job
    node: int
    environment: Mapping[str, str]
    gpus: list[str]
    received: Signals
    spared: Set[int]
    output: Terminal
    messages: Terminal

    def run(self) -> int:
        """Start generations of workers until one has done its work or none is left to be started."""
        stop_at = None if self.job.timeout is None else time.monotonic() + self.job.timeout
        for generation in range(self.job.max_restarts + 1):
            watched = self._run_once(generation, stop_at)
            if watched.failure is not None:
                self.messages.write(f"lockstep run: {watched.failure.report}".encode())
            is_final = watched.code in (DONE, USAGE) or watched.is_late or watched.is_unwanted
            if is_final or generation == self.job.max_restarts or not self._pause(generation):
                break
        return watched.code

    def _run_once(self, generation: int, stop_at: float | None) -> Generation:
        workers: list[Worker] = []
        watched = Generation(workers, self.received, self.job.grace, stop_at, self.spared, self._say)
        with self._addresses() as (meeting, addresses):
            try:
                for local in range(self.job.workers):
                    told = place_variables(self.job, self.node, local, meeting, addresses, generation)
                    workers.append(self._start(local, told))
                watched.run()
            finally:
                watched.bury()
        return watched

    def _start(self, local: int, told: Mapping[str, str]) -> Worker:
        rank = self.node * self.job.workers + local
        gpus = share(self.gpus, local, self.job.workers)
        environment = {**self.environment, **told, **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})}
        prefix = self.output.prefix(rank)
        log = self._log(rank)
        is_shown = log is None or self.job.tee
        show = (lambda line: self.output.write(prefix + line + b"\n")) if is_shown else None
        return Worker(rank, self.job, environment, log, show)

    def _log(self, rank: int) -> io.FileIO | None:
        if self.job.log_dir is None:
            return None
        try:
            self.job.log_dir.mkdir(parents=True, exist_ok=True)
            return io.FileIO(self.job.log_dir / f"worker-{rank}.log", "a")
        except OSError as error:
            raise OptionError(f"--log-dir {self.job.log_dir}: {error}.") from None

    @contextlib.contextmanager
    def _addresses(self) -> Iterator[tuple[str, Sequence[str] | None]]:
        """Where worker 0 is reached, and all workers if that is known; ports of our choice are new in each generation."""
        if self.job.meeting_address is not None:
            yield self.job.meeting_address, self.job.addresses
        else:
            with reserved_addresses(self.job.workers) as addresses:
                yield addresses[0], addresses

    def _pause(self, generation: int) -> bool:
        """Wait before the next generation; whether it is still wanted then."""
        seconds = min(_LONGEST_PAUSE, 2.0**generation)
        self._say(f"restart {generation + 1} of {self.job.max_restarts} in {seconds:g} s.")
        start_at = time.monotonic() + seconds
        while (left := start_at - time.monotonic()) > 0:
            numbers, _ = self.received.wait(left)
            if set(numbers) & set(ENDING):
                return False
        return True

    def say_what_starts(self, allocator: Allocator, is_config_replaced: bool) -> None:
        """Tell the user what was found and chosen."""
        job = self.job
        where = f"node {self.node} of {job.nodes}" if job.nodes > 1 else "this machine"
        number = f"{job.workers} worker{'s' if job.workers > 1 else ''}"
        self._say(f"{number} on {where}; allocator: {allocator.name}.")
        if 0 < len(self.gpus) < job.workers:
            self._say(
                f"{number} share {len(self.gpus)} GPUs and each sees all of them, which NCCL refuses: start at most one worker "
                "a GPU, or set JAX_PLATFORMS=cpu."
            )
        if is_config_replaced:
            self._say("TF_CONFIG of the environment is not used; the workers are those of lockstep run.")
        if job.log_dir is not None:
            self._say(f"what they print goes to {job.log_dir}{os.sep}worker-*.log.")

    def _say(self, text: str) -> None:
        self.messages.write(f"lockstep run: {text}\n".encode())
