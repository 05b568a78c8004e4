"""Checks of the environment: versions, devices and variables, and the network between the processes of a cluster."""

import errno
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import keras
import numpy as np

from lockstep._errors import ClusterError, DeviceError, ModelError, without_fix
from lockstep._logging import capitalized, counted
from lockstep.devices.cpu_devices import check_thread_pool, usable_cores
from lockstep.devices.host_memory import HostMemory, host_memory, returned_memory_reason, size_text
from lockstep.devices.placement import is_large
from lockstep.distributed.cluster.addresses import host_of, is_loopback, split_address
from lockstep.distributed.cluster.env_reader import NO_SECRET, NetworkOptions
from lockstep.distributed.cluster.membership import Membership
from lockstep.distributed.cluster.secret import SECRET, SECRET_FILE
from lockstep.distributed.control.handshake import needs_secret, open_listener
from lockstep.doctor.base import Finding, FitCall, array_in_memory

# Package, the first version that works, the first that no longer does, why, and the source of that.
VERSIONS: tuple[tuple[str, tuple[int, ...], tuple[int, ...], str, str], ...] = (
    (
        "keras",
        (3, 15),
        (3, 16),
        "Lockstep uses parts of Keras 3.15 that other versions do not have",
        "docs/versions.md",
    ),
    ("jax", (0, 10), (), "Lockstep was made for JAX 0.10 and not tested with older versions", "pyproject.toml"),
)


def check_versions(call: FitCall, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Find packages of a version that is known not to work."""
    for package, first, end, why, source in VERSIONS:
        found = version(package)
        numbers = tuple(int(part) for part in found.split(".")[:2])
        if numbers < first or (end and numbers >= end):
            wanted = f"{package}>={'.'.join(map(str, first))}"
            wanted += f",<{'.'.join(map(str, end))}" if end else ""
            why = f"{why} (source: {source})"
            yield Finding("bad-version", f"{package} {found}", "the environment", why, f"pip install '{wanted}'")


def check_thread_pool_size(call: FitCall, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Find several CPU devices of a plain ``keras.distribution`` whose thread pool is too small, which deadlocks."""
    distribution = keras.distribution.distribution()
    if call.settings.has_strategy or distribution is None or jax.default_backend() != "cpu":
        return
    try:
        check_thread_pool(len(jax.local_devices()), environ)
    except DeviceError as error:
        yield Finding(
            "cpu-thread-pool",
            f"{type(distribution).__name__} over {len(jax.local_devices())} CPU devices on a pool of too few threads",
            "keras.distribution",
            "XLA deadlocks in an all-reduce, and aborts the process after 40 s",
            str(error).rstrip("."),
        )


def check_allocator(call: FitCall, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Find an allocator that returns the memory of each step to the system."""
    on_cpus = any(device.platform == "cpu" for device in call.settings.devices)
    reason = returned_memory_reason(environ) if on_cpus and call.settings.has_strategy else None
    if reason:
        yield Finding(
            "memory-given-back",
            f"the allocator gives large temporaries back to the system after each step: {reason}",
            "the environment",
            "each step then pays for the page faults; one of a convolutional net took up to twice as long (docs/decisions/0027)",
            "Unset LOCKSTEP_KEEP_MEMORY, or start the script with lockstep run --allocator tcmalloc or jemalloc",
        )


def _own_devices(call: FitCall) -> list[jax.Device]:
    return [device for device in call.settings.devices if device.process_index == jax.process_index()]


def check_cores(call: FitCall, environ: Mapping[str, str], cores: int | None = None) -> Iterator[Finding]:
    """Find CPU devices that are as many as the cores or more, though one device could use all cores."""
    own = _own_devices(call)
    cores = cores or usable_cores()
    if len(own) > 1 and own[0].platform == "cpu" and cores <= len(own):
        yield Finding(
            "cpu-devices-without-cores",
            f"{len(own)} CPU devices on {counted(cores, 'core')}",
            "devices",
            "the devices wait for each other in each step, and XLA uses all cores for one device: MNIST took 2.07 ms a step on two devices of two "
            "cores, and 0.93 ms on one",
            f'Use MirroredStrategy(["cpu:0"], replicas={call.settings.replicas}), which gives the same results',
        )


def check_memory(
    call: FitCall,
    of_a_step: int | None = None,
    batches: tuple[int, int] | None = None,
    host: HostMemory | None = None,
) -> Iterator[Finding]:
    """Find steps and caches that need more memory than there is.

    Args:
        call: the call to check.
        of_a_step: bytes on each device of a compiled step; by default those of weights, gradients and optimizer.
        batches: number of batches of a pass and bytes of one; None if unknown.
        host: memory of this machine.
    """
    step = of_a_step or minimum_bytes(call)
    subject = "a step needs" if of_a_step else "weights, gradients and optimizer need"
    cached = bytes_of_cache(call, batches)
    own = _own_devices(call)
    on_devices = call.settings.input_options.cache == "device"
    on_host = 0 if on_devices else cached
    if own and own[0].platform == "cpu":
        on_host += len(own) * (step + (cached if on_devices else 0))
    else:
        yield from _on_a_device(call, own, step + (cached if on_devices else 0), subject)
    free = (host or host_memory()).free
    if free is not None and on_host > free:
        kept = f", and the cache {size_text(cached)}" if cached else ""
        yield Finding(
            "host-memory",
            f"{subject} {size_text(step)} on each of {len(own)} devices{kept}; {size_text(free)} are free",
            call.at_fit,
            "the system kills a process that uses more memory than there is, without a Python error",
            _fix_of_memory(cached > step),
        )


def check_layout(call: FitCall) -> Iterator[Finding]:
    """Find rules for sharding that do not fit the model, and a layout that shards little of it."""
    if call.settings.layout is None or len(call.settings.devices) == 1:
        return
    try:
        layout = call.settings.layout(call.model)
    except ModelError as error:
        what, _, fix = str(error).removeprefix("layout: ").partition(" Fix: ")
        yield Finding(
            "layout-rule",
            what,
            call.at_fit,
            "the first step ends with this error",
            capitalized(fix.removesuffix(".")) if fix else "Change the rule",
        )
        return
    if layout is None or all(row.axis is None for row in layout.variables if row.owner == "model"):
        return  # Whole by design, as with shard="optimizer", or by the caller's choice.
    whole = [row for row in layout.variables if row.axis is None and is_large(row.shape)]
    size = sum(row.device_bytes for row in whole)
    if size > layout.device_bytes / 2:
        yield Finding(
            "variables-whole",
            f"{len(whole)} large variables are whole on each device, the first is {whole[0].path!r}: {size_text(size)} of "
            f"{size_text(layout.device_bytes)}",
            call.at_fit,
            "more devices do not make room for them",
            "strategy.layout(model) has the reasons. Take sizes that are divisible by the number of devices, or rules for these variables",
        )


def minimum_bytes(call: FitCall) -> int:
    """Return the bytes of weights, gradients and optimizer variables on each device, as far as they exist."""
    model, optimizer = call.model, call.model.optimizer
    layout = call.settings.layout(model) if call.settings.layout is not None else None
    if layout is not None:
        trained = {variable.path for variable in model.trainable_variables}
        gradients = [row.device_bytes for row in layout.variables if row.owner == "model" and row.path in trained]
        return layout.device_bytes + sum(gradients)
    return sum(map(_size, [*model.variables, *model.trainable_variables, *(optimizer.variables if optimizer else [])]))


def bytes_of_data(data: Any) -> int:
    """Return the bytes of the arrays in a tree."""
    arrays = [array_in_memory(leaf) for leaf in keras.tree.flatten(data)]
    return sum(int(array.nbytes) for array in arrays if array is not None)


def bytes_of_cache(call: FitCall, batches: tuple[int, int] | None) -> int:
    """Return the bytes that ``InputOptions(cache=…)`` keeps in memory."""
    cache = call.settings.input_options.cache
    if cache not in ("memory", "device"):
        return 0
    if call.rows is not None:
        return bytes_of_data((call.x, call.y, call.sample_weight)) if cache == "device" else 0
    return batches[0] * batches[1] if batches else 0


def _on_a_device(call: FitCall, devices: list[jax.Device], need: int, subject: str) -> Iterator[Finding]:
    for device in devices[:1]:  # All have the same memory.
        limit = (device.memory_stats() or {}).get("bytes_limit")
        if limit and need > limit:
            yield Finding(
                "device-memory",
                f"{subject} {size_text(need)} on each device, with what is cached there; {device} has {size_text(limit)}",
                call.at_fit,
                "the first step ends with RESOURCE_EXHAUSTED",
                _fix_of_memory(call.settings.input_options.cache == "device"),
            )


def _fix_of_memory(is_cache: bool) -> str:
    if is_cache:
        return 'Use InputOptions(cache="a/file") or no cache'
    return 'Use a smaller batch, an optimizer with less state (such as SGD), shard="variables", or mixed_bfloat16'


def _size(variable: keras.Variable) -> int:
    return int(np.prod(variable.shape)) * jax.numpy.dtype(variable.dtype).itemsize


LIMIT = 4.0  # seconds for all connections
_NOT_LISTENING = "nothing listens there yet"


@dataclass(frozen=True)
class ClusterPeer:
    """A process of the cluster.

    Args:
        name: for messages.
        address: ``host:port``.
        is_own: whether it is this process.
        listens: whether other processes connect to it at that port.
    """

    name: str
    address: str
    is_own: bool
    listens: bool


def peers_of(membership: Membership) -> list[ClusterPeer]:
    """Return all processes whose address is known.

    Workers that train in step connect to worker 0 only; with parameter servers, all processes except the workers accept connections.
    """
    spec, group = membership.spec, membership.group
    has_servers = "ps" in spec.jobs and spec.num_tasks("ps") > 0
    found = []
    for job in spec.jobs:
        for index in spec.task_indices(job):
            address = spec.task_address(job, index)
            first = address == group.coordinator if group else job == "chief"
            listens = job in ("chief", "ps") if has_servers else first
            is_own = (job, index) == (membership.task_type, membership.task_id)
            found.append(ClusterPeer(f"{job} {index}", address, is_own, listens))
    return found


def check_network(
    peers: Sequence[ClusterPeer], network: NetworkOptions = NO_SECRET, limit: float = LIMIT
) -> Iterator[Finding]:
    """Find addresses that cannot be reached, or that are wrong; all connections together get ``limit`` seconds."""
    others = [peer for peer in peers if not peer.is_own]
    remote = [peer for peer in peers if not is_loopback(host_of(peer.address))]
    for peer in peers:
        if remote and is_loopback(host_of(peer.address)):
            yield Finding(
                "loopback-in-cluster",
                f"{peer.name} is at {peer.address}, and {remote[0].name} at {remote[0].address}, on another machine",
                "the cluster",
                "on every machine a loopback address means that machine itself",
                f"Use the name or address that the machine of {peer.name} has in the network",
            )
        if peer.is_own and needs_secret(peer.address, network):
            yield Finding(
                "no-secret",
                f"{peer.name}, which is this process, is at {peer.address} and has no secret",
                "the cluster",
                "it will refuse to start, because anyone on that network could read and change the training",
                f"Set {SECRET} or {SECRET_FILE} for all processes of the job (docs/security.md)",
            )
        elif peer.is_own and peer.listens:
            yield from _own_port(peer, network)
    for peer, failure in zip(others, _connect_all(others, limit), strict=True):
        yield from _unreachable(peer, failure, limit)


def _own_port(peer: ClusterPeer, network: NetworkOptions) -> Iterator[Finding]:
    try:
        open_listener(peer.address, network, lambda _: None, peer.name).close()
    except (ClusterError, OSError) as error:
        yield Finding(
            "port-not-free",
            f"{peer.name}, which is this process, cannot listen at {peer.address}",
            "the cluster",
            without_fix(error),
            "Stop the process that uses the port, or use another port in all processes of the job",
        )


def _unreachable(peer: ClusterPeer, failure: str | None, limit: float) -> Iterator[Finding]:
    """Explain a failed connection; a refusal shows that the machine is reachable, and is normal for processes that do not listen."""
    if failure is None or (failure == _NOT_LISTENING and not peer.listens):
        return
    if failure == _NOT_LISTENING:
        what = f"{peer.name} at {peer.address} refused: {_NOT_LISTENING}"
        why = (
            "that is normal if it has not been started; otherwise something between the machines refuses the connection"
        )
        fix = "Start it and run the check again; if it runs, check that it listens at this address and that no firewall blocks the port"
    elif failure.startswith("name"):
        what = f"{peer.name}: the name {host_of(peer.address)!r} has no address"
        why, fix = failure, "Add it to DNS or to /etc/hosts of this machine, or use addresses in the cluster"
    else:
        what = f"{peer.name} at {peer.address}: {failure}"
        why = "its machine is off or has another address, or a firewall drops the packets"
        fix = "Check the address, and open the ports of the job between the machines"
    yield Finding("worker-not-reached", what, f"from this machine, within {limit:g} s", why, fix)


def _connect_all(peers: Sequence[ClusterPeer], limit: float) -> list[str | None]:
    """Try to connect to all peers; return for each why it failed, or None."""
    deadline = time.monotonic() + limit
    found: queue.Queue[tuple[int, str | None]] = queue.Queue()

    def connect(number: int, address: str) -> None:
        found.put((number, _connect(address, max(0.1, deadline - time.monotonic()))))

    for number, peer in enumerate(peers):  # Daemon threads, because a name lookup has no timeout.
        threading.Thread(target=connect, args=(number, peer.address), daemon=True).start()
    failures: list[str | None] = [f"no answer within {limit:g} s"] * len(peers)
    for _ in peers:
        try:
            number, failure = found.get(timeout=max(0.05, deadline + 0.2 - time.monotonic()))
        except queue.Empty:
            break
        failures[number] = failure
    return failures


def _connect(address: str, limit: float) -> str | None:
    """Try to connect; return why it failed, or None."""
    try:
        socket.create_connection(split_address("the cluster", address), timeout=limit).close()
    except socket.gaierror as error:
        return f"name lookup: {error.strerror}"
    except TimeoutError:
        return f"no answer within {limit:.0f} s"
    except OSError as error:
        return _NOT_LISTENING if error.errno == errno.ECONNREFUSED else str(error.strerror)
    return None
