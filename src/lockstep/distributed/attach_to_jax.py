"""Joins the processes of a JAX that the program, or the engine that runs it, has initialized: Ray's ``JaxTrainer``, a TPU pod, a script.

JAX says how many processes there are and which one this is. What the control channel needs besides is exchanged over JAX itself,
by one small program on all devices: the address of the chief, which listens at a free port, and a secret that the chief draws
unless the processes have one. From then on the job is like any other, except that Lockstep does not shut JAX down.
"""

import json
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep._errors import PEER_LOST, ClusterError
from lockstep._logging import WaitLogger, listed
from lockstep.distributed.cluster.addresses import COORDINATOR, is_loopback, resolve_coordinator
from lockstep.distributed.cluster.env_reader import NetworkOptions
from lockstep.distributed.cluster.membership import WorkerGroup, check_reachable
from lockstep.distributed.cluster.secret import SECRET, SECRET_FILE
from lockstep.distributed.control.handshake import open_listener
from lockstep.distributed.control.termination import ExitGuard
from lockstep.distributed.jax_init import (
    ProcessJob,
    free_port,
    hostname_address,
    job_made_once,
    join_job,
    joined_job,
    machine_id,
    outgoing_address,
)

SOURCE = "jax.distributed"
_MESSAGE_BYTES = 4096  # Of one process; the array has the same shape on all.
_MAX_ERROR = 900  # characters, of at most 4 bytes
_POLL_SECONDS = 0.2
_WILDCARDS = ("", "0.0.0.0", "::")
# Reserved for documentation (RFC 5737): the way there is the default route. Nothing is sent.
_ANY_ADDRESS = ("192.0.2.1", 9)

Log = Callable[[str], None]


def is_to_attach() -> bool:
    """Return whether JAX was initialized over processes, but not by Lockstep."""
    job = joined_job()
    return jax.distributed.is_initialized() if job is None else not job.owns_jax


def compare_with_jax(source: WorkerGroup, is_chosen: bool) -> str | None:
    """Compare what a resolver says with the processes of JAX, which has started.

    Args:
        source: source of the resolver's description.
        is_chosen: whether the user has passed the resolver or written ``TF_CONFIG``; else its variables may be inherited.

    Returns:
        A note if the resolver contradicts JAX in what inherited variables may say; else None.

    Raises:
        ClusterError: the resolver contradicts JAX.
    """
    workers, index = jax.process_count(), jax.process_index()
    if (source.workers, source.index) == (workers, index):
        return None
    says = f"{source.source} says that this process is worker {source.index} of {source.workers}"
    has = f"JAX is initialized already, with this process as {index} of {workers}"
    if is_chosen or source.workers not in (1, workers):
        raise ClusterError(
            f"{says}, but {has}. Fix: give jax.distributed.initialize() the same numbers, or leave that call to Lockstep, or leave "
            f"out what says it ({source.source}): then the processes of JAX train."
        )
    return f"{says}. That is not used, as {has}."


def attach_job(check: Callable[[], None], timeout_seconds: float, log: Log, environ: Mapping[str, str]) -> ProcessJob:
    """Join the other processes of JAX, which has started, or return the job that was joined before; if ``check`` raises ClusterError in one, all
    raise that error.

    Raises:
        ClusterError: a process is missing or differs.
    """
    if joined_job() is not None:
        check()
    return job_made_once(lambda: _attach(check, timeout_seconds, log, environ))


def _attach(check: Callable[[], None], timeout_seconds: float, log: Log, environ: Mapping[str, str]) -> ProcessJob:
    guard = ExitGuard()
    guard.install()  # JAX holds a process that ends after an error for minutes, waiting for the others.
    try:
        group, network, listener = _exchange(check, timeout_seconds, log, environ)
    except BaseException as error:
        guard.leave_after(error)
        raise
    return join_job(group, network, timeout_seconds, log, environ, listener, guard=guard)


def _exchange(
    check: Callable[[], None], timeout_seconds: float, log: Log, environ: Mapping[str, str]
) -> tuple[WorkerGroup, NetworkOptions, socket.socket | None]:
    """Return what the control channel needs, as all processes agree on it; the socket is that of the chief."""
    exchange = partial(_gather_over_jax, limit=timeout_seconds, log=log)
    every = exchange(_introduction(check, environ), "an introduction")
    _raise_first(every)
    _check_secrets(every)
    machines = [one["machine"] for one in every]
    own = jax.process_index()
    listener = None
    offer: dict[str, Any] = {}
    if own == 0:
        offer, listener = _open_channel(machines, every[0], environ, log)
    (offer, *_) = offers = exchange(offer, "the address of the chief")
    _raise_first(offers)
    network = NetworkOptions.of(environ)
    if offer["secret"] is not None:
        network = replace(network, secret=offer["secret"].encode())
    group = WorkerGroup(
        len(every),
        own,
        offer["coordinator"],
        local_index=machines[:own].count(machines[own]),
        local_workers=machines.count(machines[own]),
        source=SOURCE,
    )
    return group, network, listener


def _introduction(check: Callable[[], None], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what this process tells the others: its machine, the address of that, whether it has a secret, or why it cannot join."""
    try:
        check()
        has_secret = NetworkOptions.of(environ).secret is not None
    except ClusterError as error:
        return {"error": str(error)[:_MAX_ERROR]}
    named = hostname_address()
    address = outgoing_address(*_ANY_ADDRESS) if named is None or is_loopback(named) else named
    return {"machine": machine_id(), "address": address, "has_secret": has_secret}


def _raise_first(every: list[dict[str, Any]]) -> None:
    """Raise the error of the first process that has one, the same on all processes."""
    for index, one in enumerate(every):
        if "error" in one:
            raise ClusterError(f"process {index} of {len(every)} of JAX: {one['error']}")


def _check_secrets(every: list[dict[str, Any]]) -> None:
    without = [str(index) for index, one in enumerate(every) if not one["has_secret"]]
    if 0 < len(without) < len(every):
        raise ClusterError(
            f"no secret is set for process {listed(without)} of {len(every)} of JAX, and others have one. Fix: set {SECRET} or {SECRET_FILE} for all "
            "processes, or for none: then worker 0 draws one for this job."
        )


def _open_channel(
    machines: list[str], own: dict[str, Any], environ: Mapping[str, str], log: Log
) -> tuple[dict[str, Any], socket.socket | None]:
    """Listen at the chief; return what it offers to the other processes, and the socket."""
    network, is_one_machine = NetworkOptions.of(environ), len(set(machines)) == 1
    drawn = secrets.token_hex(32) if network.secret is None else None

    def find() -> tuple[str, int]:
        host = "127.0.0.1" if is_one_machine else own["address"]
        if network.bind_host not in (None, *_WILDCARDS):
            host = network.bind_host
        if host is None:
            raise ClusterError(
                f"this machine has no address that the others can reach. Fix: set {COORDINATOR}=host:port for worker 0."
            )
        return host, free_port(host)

    try:
        coordinator = resolve_coordinator(environ, find)
        if not is_one_machine:
            check_reachable(WorkerGroup(len(machines), 0, coordinator, source=SOURCE))
        listening = network if drawn is None else replace(network, secret=drawn.encode())
        listener = open_listener(coordinator, listening, log)
    except ClusterError as error:
        return {"error": str(error)[:_MAX_ERROR]}, None
    return {"coordinator": coordinator, "secret": drawn}, listener


def _gather_over_jax(own: dict[str, Any], what: str, limit: float, log: Log) -> list[dict[str, Any]]:
    """Return the values of all processes of JAX, in their order; all processes call this.

    JAX's own wait has no limit, so it is in a thread, which is left behind if the limit has passed.

    Raises:
        ClusterError: another process did not come within ``limit`` seconds, or JAX has lost it.
    """
    me, count = jax.process_index(), jax.process_count()
    if count == 1:
        return [own]
    found: list[np.ndarray | Exception] = []

    def gather() -> None:
        try:
            found.append(_all_gather(json.dumps(own, ensure_ascii=False).encode()))
        except Exception as error:  # Of JAX, whose types depend on what has failed.
            found.append(error)

    others = f"process {listed(str(index) for index in range(count) if index != me)} of {count} of JAX"
    wait, thread = WaitLogger(log), threading.Thread(target=gather, name="lockstep-attach", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        if wait.seconds > limit and not found:
            raise ClusterError(
                f"process {me} of {count} of JAX: {others} did not all make their MultiWorkerMirroredStrategy within {limit:g} s "
                f"({what}). Fix: see what they print; all must make it, in the same place; or raise timeout_seconds.",
                PEER_LOST,
            )
        wait.log(f"{others}, for {what}")
    (every,) = found
    if isinstance(every, Exception):
        raise ClusterError(
            f"process {me} of {count} of JAX: {what} was not exchanged with {others}: {every}. Fix: see what they print.",
            PEER_LOST,
        ) from every
    return [json.loads(bytes(row).decode()) for row in every]


def _all_gather(own: bytes) -> np.ndarray:
    """Return the bytes of all processes, a row each, over all devices of JAX, as other programs than those on all may not run."""
    devices = jax.devices()
    row = np.frombuffer(own.ljust(_MESSAGE_BYTES), np.uint8)[None]
    mesh = Mesh(np.array(devices), ("device",))
    parts = [jax.device_put(row, device) for device in devices if device.process_index == jax.process_index()]
    cut, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("device",), ()))
    rows = jax.make_array_from_single_device_arrays((len(devices), _MESSAGE_BYTES), cut, parts)
    gathered = np.asarray(jax.jit(lambda x: x, out_shardings=whole)(rows).addressable_data(0))
    processes = [device.process_index for device in devices]
    return gathered[[processes.index(index) for index in range(jax.process_count())]]
