"""The job of several processes that this process has joined; it joins once, and all of its strategies use that."""

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.env_reader import GENERATION, SECRET, EnvReader
from lockstep.distributed.cluster.worker_group import WorkerGroup
from lockstep.distributed.consistency_checks import describe_process
from lockstep.distributed.control.control_client import ControlClient
from lockstep.distributed.control.join import join
from lockstep.distributed.control.termination import ExitGuard, install_sigabrt_handler
from lockstep.distributed.jax_init import start_jax

__all__ = ["ProcessJob", "job_of_this_process"]

LONG_SECONDS = 1800.0  # Limit of compiling, and of what a worker does alone at its end.


@dataclass(frozen=True)
class ProcessJob:
    """A job that this process has joined.

    Args:
        client: the control client.
        guard: ends the process after an uncaught exception.
    """

    client: ControlClient
    guard: ExitGuard

    @property
    def group(self) -> WorkerGroup:
        """The workers."""
        return self.client.group

    def leave(self) -> None:
        """Leave in order, unless the job has failed; the chief, which runs JAX's service, waits until the other workers have left."""
        if self.group.is_chief:
            self.client.leave(LONG_SECONDS)
        if self.client.failure is None:
            jax.distributed.shutdown()
        self.client.leave()
        self.guard.restore()


_joined: list[ProcessJob] = []  # At most one, as a process can start JAX over several processes only once.
_lock = threading.Lock()


def job_of_this_process(
    group: WorkerGroup,
    cpu_devices: int,
    timeout_seconds: float,
    log: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
) -> ProcessJob:
    """Join the other workers, or return the job that was joined before.

    Args:
        group: the workers, more than one.
        cpu_devices: number of logical CPU devices of this process.
        timeout_seconds: limit of every wait.
        log: takes lines about waits.
        environ: has the job's generation, secret and ports.

    Raises:
        ClusterError: a worker is missing or differs, JAX has started already, or the process belongs to another job.
    """
    with _lock:
        if not _joined:
            _joined.append(_join(group, cpu_devices, timeout_seconds, log, environ))
        job = _joined[0]
        before, now = ((g.workers, g.index, g.coordinator) for g in (job.group, group))
        if before != now:
            raise ClusterError(
                f"This process is {job.group.name} already, and JAX lets it join one job only; now it was told to be {group.name}. Use "
                "the same cluster for all strategies of a process."
            )
        return job


def _join(
    group: WorkerGroup,
    cpu_devices: int,
    timeout_seconds: float,
    log: Callable[[str], None],
    environ: Mapping[str, str],
) -> ProcessJob:
    own, guard = EnvReader("Lockstep", environ, "lockstep run sets it."), ExitGuard()
    guard.install()  # First, so that the process has the right exit code also if the workers do not come.
    client = join(
        group,
        describe_process(),
        generation=own.integer(GENERATION, "the number of restarts", least=0) if GENERATION in environ else 0,
        secret=environ[SECRET].encode() if environ.get(SECRET) else None,
        timeout_seconds=timeout_seconds,
        long_seconds=max(LONG_SECONDS, timeout_seconds),
        on_failure=guard.on_failure,
        log=log,
    )
    guard.client = client
    job = ProcessJob(client, guard)
    install_sigabrt_handler(client)
    start_jax(client, cpu_devices, timeout_seconds, environ, log)
    atexit.register(job.leave)
    return job
