"""How a worker meets the others before anything else starts: it connects, says who it is, and waits until all are here."""

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep._errors import ClusterError
from lockstep._logging import log_info
from lockstep.distributed.cluster import exit_codes
from lockstep.distributed.cluster.worker_group import WorkerGroup
from lockstep.distributed.control.control_client import ControlClient
from lockstep.distributed.control.coordinator import LINGER_SECONDS, Coordinator
from lockstep.distributed.control.failure_detector import START, Limits
from lockstep.distributed.control.failures import Failure
from lockstep.distributed.control.framed_socket import FramedSocket
from lockstep.distributed.control.handshake_client import RetryableConnectError, connect, introduce
from lockstep.distributed.control.handshake_server import HANDSHAKE_SECONDS, HandshakeError, introduction
from lockstep.distributed.control.listener import open_listener
from lockstep.distributed.control.peer import Peer
from lockstep.distributed.control.protocol import plain
from lockstep.distributed.control.termination import ExitGuard
from lockstep.distributed.control.wait_logger import WaitLogger, listed

__all__ = ["join"]

_RETRY_SECONDS = 0.2
_CONNECT_SECONDS = 5.0

Met = tuple[FramedSocket, tuple[Peer, ...]]  # The way to the chief, and all workers.


def join(
    group: WorkerGroup,
    identity: Mapping[str, Any],
    *,
    information: Mapping[str, Any] | None = None,
    generation: int = 0,
    secret: bytes | None = None,
    timeout_seconds: float = 60.0,
    start_seconds: float | None = None,
    long_seconds: float = 1800.0,
    bind_host: str | None = None,
    listener: socket.socket | None = None,
    on_failure: Callable[[Failure], None] | None = None,
    announce: Callable[[str], None] = log_info,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> ControlClient:
    """Meet the other workers of the job at the chief's address, and check that all were started alike.

    Args:
        group: who takes part. The chief, worker 0, listens at ``group.coordinator``; all others connect to it.
        identity: what must be equal on all workers, values of JSON: versions, the script's digest, options.
        information: what the others may know of this worker, in :attr:`ControlClient.peers`.
        generation: how many times this job was started again. Leftovers of an earlier start are turned away.
        secret: the workers prove to each other that they know it. None: whoever reaches the port may join. Nothing is encrypted.
        timeout_seconds: limit of every wait but the two that follow.
        start_seconds: limit of the wait for all workers here; None: ``timeout_seconds``.
        long_seconds: limit for what may take long: a worker in the activity ``"start"`` or ``"compiling"``.
        bind_host: address of this machine that the chief listens on; None: chosen by the coordinator's host.
        listener: a socket that listens already, for the chief; then nothing is bound.
        on_failure: is called once, in the session's thread, when the job cannot go on; None: the process says why and ends
            (:class:`lockstep.distributed.control.termination.ExitGuard`).
        announce: takes the lines about waits.
        clock: gives seconds, and is not set back.
        sleep: waits between two tries to connect.

    Raises:
        ClusterError: who is missing, or which worker differs in what; the same sentence on every worker.
        OptionError: what a worker says of itself is not of JSON, or too large; or a limit is out of its range.
    """
    me = Peer(
        index=group.index,
        workers=group.workers,
        host=socket.gethostname(),
        pid=os.getpid(),
        generation=generation,
        identity=plain(identity),
        information=plain(information or {}),
        address=group.coordinator if group.is_chief else "",
    )
    introduction(me)
    limits = Limits(timeout_seconds, long_seconds, start_seconds)
    wait = _Join(group, me, secret, limits, WaitLogger(announce, clock), clock, sleep)
    server = None
    if group.is_chief:
        if listener is None and group.workers > 1:
            listener = open_listener(group.coordinator, bind_host, announce)
        server = Coordinator(group, me, listener, secret, limits, announce, clock)
        connection, peers = wait.as_chief(server)
    else:
        connection, peers = wait.as_worker()
    if wait.notice.was_told:
        announce(f"all {group.workers} workers are here after {wait.notice.seconds:.0f} s")
    return ControlClient(
        group, peers, connection, server, limits, on_failure or ExitGuard().on_failure, announce, clock
    )


@dataclass(frozen=True)
class _Join:
    """The wait of one worker until all are here: its arguments are those of :func:`join`."""

    group: WorkerGroup
    me: Peer
    secret: bytes | None
    limits: Limits
    notice: WaitLogger
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def as_chief(self, server: Coordinator) -> Met:
        """Wait for the others; where the job cannot start, stay until they have heard why."""
        try:
            try:
                return self._until_all_are_here(server.connection)
            except ClusterError:
                server.all_told.wait(LINGER_SECONDS)
                raise
        except BaseException:
            server.stop()
            server.connection.close()
            raise

    def as_worker(self) -> Met:
        """Look for the chief until it lets this worker in."""
        while True:
            try:
                return self._try()
            except RetryableConnectError as error:
                reason = str(error)
            if self.notice.seconds > self.limits.until_all_are_here:
                raise ClusterError(
                    f"{self.group.name}: {self._chief}, was not met within {self.limits.until_all_are_here:g} s: {reason}. Is it started, and "
                    f"can it be reached from here?",
                    exit_codes.PEER_LOST,
                )
            self.notice.tell(f"{self._chief} ({reason})")
            self.sleep(_RETRY_SECONDS)

    @property
    def _chief(self) -> str:
        return f"worker 0 of {self.group.workers}, the chief at {self.group.coordinator}"

    def _try(self) -> Met:
        connection = connect(self.group.coordinator, self._at_most(_CONNECT_SECONDS))
        try:
            introduce(connection, self.me, self.secret, self._at_most(HANDSHAKE_SECONDS))
            return self._until_all_are_here(connection)
        except HandshakeError as error:
            connection.close()
            raise ClusterError(f"{self.group.name} cannot join {self._chief} {error}.") from None
        except BaseException:
            connection.close()
            raise

    def _at_most(self, seconds: float) -> float:
        """A limit that also ends this wait in time, and gives the last try a chance."""
        return min(seconds, max(_RETRY_SECONDS, self.limits.until_all_are_here - self.notice.seconds))

    def _until_all_are_here(self, connection: FramedSocket) -> Met:
        """All workers, as soon as the chief says that they are here; it also says when the wait is over."""
        heard = self.clock()
        while True:
            message = connection.wait(_RETRY_SECONDS)
            if message is not None:
                heard = self.clock()
                if message["kind"] == "welcome":
                    return connection, tuple(self._peer(known) for known in message["peers"])
                self._listen(message)
            elif connection.ended is not None or self.clock() - heard > self.limits.timeout:
                what = connection.ended or f"it said nothing for {self.limits.timeout:g} s"
                raise ClusterError(f"{self._chief}, went away before all had joined: {what}.", exit_codes.PEER_LOST)

    def _listen(self, message: dict[str, Any]) -> None:
        if message["kind"] == "beat" and START in message["missing"]:
            self.notice.tell(listed(message["missing"][START]["names"]))
        elif message["kind"] == "refuse" and message["again"]:
            raise RetryableConnectError(message["sentence"])
        elif message["kind"] == "refuse":
            raise ClusterError(message["sentence"], message["exit_code"])

    def _peer(self, known: dict[str, Any]) -> Peer:
        return replace(self.me, **known)
