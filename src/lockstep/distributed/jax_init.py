"""Starts JAX over several processes, with a share of the GPUs for each and a check of host names; keeps the job that was joined.

``jax.distributed`` aborts a process when anything is wrong. So the control channel comes first: it has checked that all workers
are there and equal, it checks here that they can reach each other, and it detects losses before JAX does.
"""

import atexit
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from lockstep._errors import ClusterError
from lockstep._logging import counted, listed
from lockstep.devices.cpu_devices import has_started, reserve_threads
from lockstep.distributed.cluster.addresses import chosen_port, host_of, is_loopback, join_address, split_address
from lockstep.distributed.cluster.env_reader import (
    NetworkOptions,
    gpu_files,
    has_accelerators,
    job_generation,
    visible_gpus,
)
from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.consistency import describe_process
from lockstep.distributed.control.connect import open_control_channel
from lockstep.distributed.control.control_client import ControlClient
from lockstep.distributed.control.handshake import open_listener
from lockstep.distributed.control.heartbeat import LONG_SECONDS
from lockstep.distributed.control.termination import ExitGuard, install_sigabrt_handler
from lockstep.distributed.control.transport import EventLoop

JAX_PORT = "LOCKSTEP_JAX_PORT"  # port of JAX's service at worker 0; by default any free one
_CONNECT_SECONDS = 10.0
_MAX_SECONDS = 2**31 - 1  # of a limit of JAX
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")


def start_jax(
    client: ControlClient,
    cpu_devices: int,
    timeout_seconds: float,
    environ: Mapping[str, str],
    log: Callable[[str], None],
) -> None:
    """Start JAX with the devices of all workers; all call this, once in a process. ``environ`` may set the port.

    Raises:
        ClusterError: JAX has started already, or cannot start; or the workers cannot reach each other.
    """
    _check_not_started(client)
    group = client.group
    visible = client.gather("the GPUs", [_gpus_here(), ",".join(visible_gpus(environ))])
    gpus = share_of_gpus(visible, group.index)
    if gpus is not None and gpus[0] == 0 and (idle := _idle_gpus(visible, group.index)):
        log(
            f"{counted(idle, 'GPU')} of this machine will not be used: its workers get equal shares of those that they see"
        )
    if not any(client.gather("whether there are accelerators", has_accelerators(environ))):
        check_hostnames(client)
        set_batch_scheduling()
    service = find_jax_address(client, environ, log)
    reserve_threads(cpu_devices)
    bind_address = _bind_address(service, NetworkOptions.of(environ))
    _initialize(group, service, gpus, bind_address, limit=int(timeout_seconds) + 1)


def _initialize(group: WorkerGroup, service: str, gpus: list[int] | None, bind_address: str | None, limit: int) -> None:
    """Have JAX connect the processes.

    Raises:
        ClusterError: it cannot start.
    """
    jax.config.update("jax_enable_recoverability", True)  # Or JAX aborts a process whose peer has died.
    jax.config.update("jax_enable_preemption_service", False)  # It swallows SIGTERM.
    seconds, long_seconds = min(limit, _MAX_SECONDS), min(4 * limit, _MAX_SECONDS)
    try:
        jax.distributed.initialize(
            service,
            group.workers,
            group.index,
            local_device_ids=gpus,
            cluster_detection_method="deactivate",
            initialization_timeout=seconds,
            heartbeat_timeout_seconds=long_seconds,  # The control channel is earlier, and names the worker.
            shutdown_timeout_seconds=seconds,
            coordinator_bind_address=bind_address,
        )
    except RuntimeError as error:
        raise ClusterError(
            f"{group.name}: JAX cannot start over the processes of the job at {service}: {error}. Fix: check that all "
            "workers reach that address."
        ) from error


def _check_not_started(client: ControlClient) -> None:
    """Check that JAX has not started in any worker, where it would have only that worker's own devices."""
    started = client.gather("whether JAX has started", has_started())
    names = [str(peer) for peer, has in zip(client.peers, started, strict=True) if has]
    if names:
        raise ClusterError(
            f"{listed(names)}: JAX has started already, on the devices of one process alone, before it could see those of the other "
            "workers. JAX starts with the first array, model or optimizer. Fix: make the MultiWorkerMirroredStrategy before those."
        )


def share_of_gpus(visible: list[tuple[str, str]], index: int) -> list[int] | None:
    """Return which of the visible GPUs a worker uses: its share if the workers of a machine see the same ones.

    Args:
        visible: for each worker its machine with the GPUs that it may open there, and the visible ones of them, as ``"0,1"``.
        index: number of the worker.

    Returns:
        Positions among the visible ones; None: all of them.

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


def _idle_gpus(visible: list[tuple[str, str]], index: int) -> int:
    """Return how many GPUs are left where :func:`share_of_gpus` divides those of a machine."""
    machine, own = visible[index]
    return len(own.split(",")) % sum(host == machine for host, _ in visible)


def _gpus_here() -> str:
    """Return an ID that is equal for processes that can open the same GPUs of one machine."""
    return " ".join([machine_id(), *gpu_files()])


def check_gpus_differ(client: ControlClient, devices: Sequence[jax.Device], environ: Mapping[str, str]) -> None:
    """Check that no two workers compute on the same GPU, which NCCL refuses; all workers call this.

    Raises:
        ClusterError: on all workers, if two of them have the same GPU.
    """
    visible, machine = visible_gpus(environ), _gpus_here()
    numbers = [device.local_hardware_id for device in devices if device.local_hardware_id is not None]
    own = [f"{visible[number] if number < len(visible) else number} {machine}" for number in numbers]
    users: dict[str, list[str]] = {}
    for peer, names in zip(client.peers, client.gather("the GPUs of the strategy", own), strict=True):
        for name in names:
            users.setdefault(name, []).append(str(peer))
    for name, workers in users.items():
        if len(workers) > 1:
            raise ClusterError(
                f"{listed(workers)} compute on the same GPU, number {name.split()[0]} of their machine, which NCCL refuses. Fix: start at most "
                "one worker for each GPU, or one worker with replicas=…, which share it."
            )


# The address of JAX's coordination service.


def find_jax_address(client: ControlClient, environ: Mapping[str, str], log: Callable[[str], None]) -> str:
    """Return ``host:port`` of JAX's service, after a check that all workers can reach it; all call this. ``environ`` may set the port.

    JAX aborts a process that cannot open or reach that port. So the chief opens it first, the other workers connect to it, and all
    learn which of them cannot. Nothing listens there any more when this returns.

    Raises:
        ClusterError: on all workers, if the chief cannot listen there or a worker cannot reach it.
    """
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(_open_port(client, environ, log)) if client.group.is_chief else None
        address, error = client.broadcast("the address of JAX's service", own)
        if error is None:
            reasons = client.gather(
                "the way to JAX's service", None if client.group.is_chief else _try_connect(address)
            )
            lost = [(peer, reason) for peer, reason in zip(client.peers, reasons, strict=True) if reason is not None]
            error = _unreachable(address, *lost[0]) if lost else None
    if error is not None:
        raise ClusterError(error)
    return str(address)


@contextlib.contextmanager
def _open_port(
    client: ControlClient, environ: Mapping[str, str], log: Callable[[str], None]
) -> Iterator[tuple[str, str | None]]:
    """Accept connections at the chief and close them; yield the address, and why listening has failed."""
    network, host = NetworkOptions.of(environ), host_of(client.group.coordinator)
    port = chosen_port(environ, JAX_PORT, "the port of JAX's service") or free_port(network.bind_host or host)
    address = join_address(host, port)
    try:
        listener = open_listener(address, network, log, "JAX's service")
    except ClusterError as error:
        yield address, f"{client.peers[0]}: JAX's service ({JAX_PORT}): {error}"
    else:
        # Linux drops new connections while those that are not accepted fill the backlog, here the ones of 129 workers.
        accepting = EventLoop("lockstep-jax-port")
        accepting.listen(listener, socket.socket.close, log)
        accepting.start()
        try:
            yield address, None
        finally:
            accepting.stop()
            listener.close()


def _bind_address(service: str, network: NetworkOptions) -> str:
    """Return where JAX's service listens at worker 0; without one, JAX would read JAX_COORDINATOR_BIND_ADDRESS, with another port."""
    host, port = split_address("the address of JAX's service", service)
    every = host if is_loopback(host) else "::"  # JAX's own default
    return join_address(network.bind_host or every, port)


def free_port(host: str) -> int:
    """Return a port of this machine, at which nothing listens, for a listener on ``host``."""
    with socket.create_server(("127.0.0.1" if is_loopback(host) else "", 0)) as free:
        return int(free.getsockname()[1])


def _try_connect(address: str) -> str | None:
    """Return why an address cannot be reached from here; None if it can."""
    try:
        socket.create_connection(split_address("the address of JAX's service", address), _CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _unreachable(address: str, peer: object, reason: str) -> str:
    return (
        f"{peer} does not reach port {split_address('JAX', address)[1]} of worker 0, where JAX's service will be, at {address}: {reason}. "
        f"Fix: open a port for it between the machines, and set {JAX_PORT} to it on worker 0."
    )


# Host names, at which the collectives of CPUs listen.


def check_hostnames(client: ControlClient) -> None:
    """Check that the host name of each machine leads to an address of it, which the other machines, if there are any, can reach; all workers
    call this.

    The collectives of CPUs (Gloo) listen at that address. On Debian it is 127.0.1.1 by default, which other machines cannot reach;
    Gloo would fail in the first step, with a message about sockets.

    Raises:
        ClusterError: on all workers; it names the first worker whose name fails, and the line to write into /etc/hosts.
    """
    reachable = outgoing_address(*split_address("the coordinator", client.group.coordinator))
    own = [machine_id(), socket.gethostname(), hostname_address(), reachable]
    every = client.gather("the machine and its name", own)
    has_one_machine = len({one[0] for one in every}) == 1
    for peer, (_, name, address, reachable) in zip(client.peers, every, strict=True):
        if address is None or (is_loopback(address) and not has_one_machine):
            leads = (
                "has no address of that machine"
                if address is None
                else f"leads to {address} there, which the other machines cannot reach"
            )
            line = f"{'127.0.0.1' if has_one_machine else reachable or 'its address in the network'} {name}"
            raise ClusterError(
                f"{peer}: the name of its machine, {name!r}, {leads}; the collectives of CPUs (Gloo) listen at the address of that name. "
                f"Fix: write the line {line!r} into /etc/hosts there, and remove the other lines with that name."
            )


def machine_id() -> str:
    """Return an ID of this network namespace; processes with the same ID share a loopback address."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink(_NETWORK_NAMESPACE)}"
    except OSError:
        return socket.gethostname()


def hostname_address() -> str | None:
    """Return the first address of this machine's host name that a socket can be bound to, as Gloo selects it."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return str(address[0])
    return None


def outgoing_address(host: str, port: int) -> str | None:
    """Return the address from which this machine connects to another one; nothing is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if is_loopback(own) else own


# Scheduling of threads.


def set_batch_scheduling() -> None:
    """Set the policy ``SCHED_BATCH`` for this thread and those that it starts, so that they do not preempt running threads.

    Gloo, which carries the collectives of CPUs, has a thread for its sockets. If a reply arrives while another thread still sends,
    Gloo's thread wakes, finds the connection locked, and retries in a loop. If it has preempted the sender, that lasts until the
    kernel's next tick, some milliseconds later.

    Does nothing if the kernel is not Linux or does not allow it, or if another policy is set already.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def prepare_threads(cpu_devices: int, environ: Mapping[str, str] = os.environ) -> None:
    """Prepare the threads of a JAX that was initialized over processes by the program and has not started its devices."""
    if not has_accelerators(environ):
        set_batch_scheduling()
    reserve_threads(cpu_devices)


@dataclass(frozen=True)
class ProcessJob:
    """A job that this process has joined; if it ``owns_jax``, Lockstep has initialized JAX over the processes, and so shuts it down."""

    client: ControlClient
    guard: ExitGuard
    owns_jax: bool = True

    @property
    def group(self) -> WorkerGroup:
        """The workers."""
        return self.client.group

    def leave(self) -> None:
        """Leave in order, unless the job has failed; the chief, which runs JAX's service, waits until the other workers have left.

        JAX is shut down only if Lockstep has initialized it. Else the program does that, its engine, or JAX at the end of the process,
        where it waits for all processes without looking for lost ones. So all workers wait here until each has left.

        After a preemption all workers wait, too: what has started the processes may stop all of them soon after the first has ended,
        and the chief may still write the last checkpoint.

        After an uncaught exception that another hook than that of ``guard`` got, the process does not leave but ends.
        """
        self.guard.end_after_missed_exception()
        if self.group.is_chief or not self.owns_jax:
            self.client.leave(LONG_SECONDS, stays=not self.owns_jax)
        if self.owns_jax and self.client.failure is None:
            jax.distributed.shutdown()
        self.client.leave(LONG_SECONDS, stays=self.client.ends_with_others)
        self.guard.restore()


_joined: list[ProcessJob] = []  # At most one, as a process can start JAX over several processes only once.
_lock = threading.Lock()


def job_of_this_process(
    group: WorkerGroup,
    cpu_devices: int,
    timeout_seconds: float,
    log: Callable[[str], None],
    environ: Mapping[str, str],
) -> ProcessJob:
    """Join the other workers of a group of several, or return the job that was joined before; ``environ`` has its generation, secret and ports.

    Raises:
        ClusterError: a worker is missing or differs, JAX has started already, or the process belongs to another job.
    """

    def make() -> ProcessJob:
        def start(client: ControlClient) -> None:
            start_jax(client, cpu_devices, timeout_seconds, environ, log)

        return join_job(group, NetworkOptions.of(environ), timeout_seconds, log, environ, start=start)

    job = job_made_once(make)
    before, now = ((g.workers, g.index, g.coordinator) for g in (job.group, group))
    if before != now:
        raise ClusterError(
            f"This process is {job.group.name} already, and JAX lets it join one job only; this strategy needs it to be {group.name}. Fix: use "
            "the same cluster for all strategies of a process."
        )
    return job


def joined_job() -> ProcessJob | None:
    """Return the job that this process has joined, if any."""
    return _joined[0] if _joined else None


def job_made_once(make: Callable[[], ProcessJob]) -> ProcessJob:
    """Return the job that this process has joined, or that ``make`` joins now."""
    with _lock:
        if not _joined:
            _joined.append(make())
        return _joined[0]


def join_job(
    group: WorkerGroup,
    network: NetworkOptions,
    timeout_seconds: float,
    log: Callable[[str], None],
    environ: Mapping[str, str],
    listener: socket.socket | None = None,
    start: Callable[[ControlClient], None] | None = None,
    guard: ExitGuard | None = None,
) -> ProcessJob:
    """Open the control channel to the other workers, and have the end of this process leave the job in order.

    Args:
        group: the workers, more than one.
        network: the job's secret and addresses.
        timeout_seconds: limit of every wait.
        log: takes lines about waits.
        environ: has the job's generation.
        listener: a listening socket for the chief; None: it opens one.
        start: starts JAX over the processes; None: it has been initialized, and does not belong to Lockstep.
        guard: ends the process after an uncaught exception; None: a new one.

    Raises:
        ClusterError: a worker is missing or differs.
    """
    guard = guard or ExitGuard()
    guard.install()  # First, so that the process has the right exit code also if the workers do not come.
    try:
        guard.client = client = open_control_channel(
            group,
            describe_process(),
            generation=job_generation(environ),
            network=network,
            timeout_seconds=timeout_seconds,
            long_seconds=max(LONG_SECONDS, timeout_seconds),
            listener=listener,
            on_failure=guard.on_failure,
            log=log,
        )
        install_sigabrt_handler(client)
        if start is not None:
            start(client)
    except BaseException as error:
        guard.leave_after(error)
        raise
    job = ProcessJob(client, guard, owns_jax=start is not None)
    atexit.register(job.leave)
    return job
