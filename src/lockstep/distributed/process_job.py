"""This process's part in a job of several: it joins once, and every strategy of the process uses that."""

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.cluster.worker_group import WorkerGroup
from lockstep.distributed.consistency_checks import identity
from lockstep.distributed.control.control_client import ControlClient
from lockstep.distributed.control.join import join
from lockstep.distributed.control.sigabrt_handler import last_words_before_abort
from lockstep.distributed.control.termination import ExitGuard
from lockstep.distributed.jax_init import start_jax

__all__ = ["ProcessJob", "job_of_this_process"]

GENERATION = "LOCKSTEP_GENERATION"  # how many times the launcher has started the job again
SECRET = "LOCKSTEP_SECRET"  # known to the workers of the job alone; they then prove it to each other

LONG_SECONDS = 1800.0  # limit of compiling, and of what a worker does alone at its end


@dataclass(frozen=True)
class ProcessJob:
    """What a process has joined.

    Args:
        session: its end of the control channel.
        guard: ends the process after an exception that nobody caught.
    """

    session: ControlClient
    guard: ExitGuard

    @property
    def group(self) -> WorkerGroup:
        """The workers."""
        return self.session.group

    def leave(self) -> None:
        """End in order, unless the job has failed: the chief, at whose place JAX's service is, waits until the others have left."""
        if self.group.is_chief:
            self.session.leave(LONG_SECONDS)
        if self.session.failure is None:
            jax.distributed.shutdown()
        self.session.leave()
        self.guard.restore()


_joined: list[ProcessJob] = []  # at most one: JAX joins its processes once, for as long as they live
_lock = threading.Lock()


def job_of_this_process(
    group: WorkerGroup,
    cpu_devices: int,
    timeout_seconds: float,
    announce: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
) -> ProcessJob:
    """Join the other workers, or find the job that was joined before.

    Args:
        group: who takes part, more than one.
        cpu_devices: number of logical CPU devices of this process.
        timeout_seconds: limit of every wait.
        announce: takes the lines about waits.
        environ: the job's generation, secret and ports.

    Raises:
        ClusterError: somebody is missing or different, JAX runs already, or the process belongs to another job.
    """
    with _lock:
        if not _joined:
            _joined.append(_join(group, cpu_devices, timeout_seconds, announce, environ))
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
    announce: Callable[[str], None],
    environ: Mapping[str, str],
) -> ProcessJob:
    own, guard = EnvReader("Lockstep", environ, "lockstep run sets it."), ExitGuard()
    guard.install()  # First, so that the process also has the right exit code where nobody comes.
    session = join(
        group,
        identity(),
        generation=own.whole(GENERATION, "the number of restarts", least=0) if GENERATION in environ else 0,
        secret=environ[SECRET].encode() if environ.get(SECRET) else None,
        timeout_seconds=timeout_seconds,
        long_seconds=max(LONG_SECONDS, timeout_seconds),
        on_failure=guard.on_failure,
        announce=announce,
    )
    guard.session = session
    job = ProcessJob(session, guard)
    last_words_before_abort(session)
    start_jax(session, cpu_devices, timeout_seconds, environ, announce)
    atexit.register(job.leave)
    return job
