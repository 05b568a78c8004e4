"""JAX over the processes of a job: one service at the chief, and every process sees the devices of all.

``jax.distributed`` aborts a process that it is not content with, so the control channel comes first: it has found out that
all workers are there and alike, and it notices losses before JAX does.
"""

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from lockstep._errors import ClusterError
from lockstep.devices.cpu_devices import has_started, reserve_threads
from lockstep.devices.memory import NVIDIA_GPUS
from lockstep.distributed.cluster.addresses import host_of, is_loopback
from lockstep.distributed.control.control_client import ControlClient
from lockstep.distributed.control.wait_logger import listed
from lockstep.distributed.hostname_check import refuse_unreachable_names
from lockstep.distributed.jax_coordinator import address_of_jax
from lockstep.distributed.thread_policy import wake_without_preempting

__all__ = ["share_of_gpus", "start_jax"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def start_jax(
    session: ControlClient,
    cpu_devices: int,
    timeout_seconds: float,
    environ: Mapping[str, str],
    announce: Callable[[str], None],
) -> None:
    """Start JAX with the devices of all workers; called once a process.

    Args:
        session: the workers, who all call it.
        cpu_devices: number of logical CPU devices of this process.
        timeout_seconds: limit of the wait for the others.
        environ: may fix the port.
        announce: takes a line.

    Raises:
        ClusterError: JAX runs already, or cannot start; or the workers could not reach each other.
    """
    _refuse_started(session)
    group = session.group
    visible = session.gather("the GPUs", [socket.gethostname(), _visible_gpus(environ)])
    gpus = share_of_gpus(visible, group.index)
    if not any(seen for _, seen in visible):
        refuse_unreachable_names(session)
        wake_without_preempting()
    service = address_of_jax(session, environ, announce)
    reserve_threads(cpu_devices)
    jax.config.update("jax_enable_recoverability", True)  # Or JAX aborts a process whose peer has died.
    jax.config.update("jax_enable_preemption_service", False)  # It swallows SIGTERM.
    limit = int(timeout_seconds) + 1
    try:
        jax.distributed.initialize(
            service,
            group.workers,
            group.index,
            local_device_ids=gpus,
            cluster_detection_method="deactivate",
            initialization_timeout=limit,
            heartbeat_timeout_seconds=4 * limit,  # The control channel is earlier, and names the worker.
            shutdown_timeout_seconds=limit,
            coordinator_bind_address=service if is_loopback(host_of(service)) else None,
        )
    except RuntimeError as error:
        raise ClusterError(
            f"{group.name}: JAX cannot start over the processes of the job at {service}: {error}"
        ) from error


def _refuse_started(session: ControlClient) -> None:
    """Refuse to go on where JAX runs already in a worker, on its own devices alone."""
    started = session.gather("whether JAX has started", has_started())
    names = [str(peer) for peer, has in zip(session.peers, started, strict=True) if has]
    if names:
        raise ClusterError(
            f"{listed(names)}: JAX has started already, on the devices of one process alone, before it could see those of the other "
            "workers. JAX starts with the first array, model or optimizer: make the MultiWorkerMirroredStrategy before those."
        )


def share_of_gpus(visible: list[tuple[str, str]], index: int) -> list[int] | None:
    """Which of the GPUs that it sees a worker takes: its share, where the workers of a machine see the same ones.

    Args:
        visible: for each worker its machine and the GPUs that it sees, as ``"0,1"``.
        index: of the worker.

    Returns:
        Positions among those it sees; None: all of them.

    Example:
        >>> share_of_gpus([("a", "0,1"), ("a", "0,1"), ("b", "0,1")], 1)
        [1]
    """
    machine, own = visible[index]
    here = [number for number, (host, _) in enumerate(visible) if host == machine]
    count = len(own.split(",")) if own else 0
    if len(here) == 1 or count < len(here) or any(visible[number][1] != own for number in here):
        return None
    share = count // len(here)
    first = here.index(index) * share
    return list(range(first, first + share))


def _visible_gpus(environ: Mapping[str, str], gpus: Path = NVIDIA_GPUS) -> str:
    if _VISIBLE in environ:
        return environ[_VISIBLE]
    return ",".join(str(number) for number, _ in enumerate(gpus.iterdir())) if gpus.is_dir() else ""
