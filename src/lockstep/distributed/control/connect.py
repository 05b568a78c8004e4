"""Join a job: connect to the chief, and wait until all workers have joined."""

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep._errors import PEER_LOST, ClusterError
from lockstep._logging import WaitLogger, listed, log_info
from lockstep.distributed.cluster.env_reader import NO_SECRET, NetworkOptions
from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.control.control_client import ControlClient
from lockstep.distributed.control.control_server import LINGER_SECONDS, ControlServer
from lockstep.distributed.control.failure_detector import Failure
from lockstep.distributed.control.handshake import (
    HANDSHAKE_SECONDS,
    HandshakeError,
    Peer,
    RetryableConnectError,
    check_closed,
    connect,
    introduce,
    join_request,
    open_listener,
)
from lockstep.distributed.control.heartbeat import LONG_SECONDS, START, TIMEOUT_SECONDS, Limits
from lockstep.distributed.control.termination import ExitGuard
from lockstep.distributed.control.transport import FramedSocket, as_json

_RETRY_SECONDS = 0.2
_CONNECT_SECONDS = 5.0

Joined = tuple[FramedSocket, tuple[Peer, ...]]  # The connection to the chief, and all workers.


def open_control_channel(
    group: WorkerGroup,
    identity: Mapping[str, Any],
    *,
    generation: int = 0,
    network: NetworkOptions = NO_SECRET,
    timeout_seconds: float = TIMEOUT_SECONDS,
    long_seconds: float = LONG_SECONDS,
    listener: socket.socket | None = None,
    on_failure: Callable[[Failure], None] | None = None,
    log: Callable[[str], None] = log_info,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> ControlClient:
    """Join the other workers of the job at the chief's address, and check that all were started with the same identity.

    Args:
        group: the workers. The chief, worker 0, listens at ``group.coordinator``; all others connect to it.
        identity: what must be equal on all workers, values of JSON: versions, the script's digest, options.
        generation: how many times this job was restarted. Processes of an earlier start are refused.
        network: the workers prove to each other that they know its secret; without one, any process that reaches the port may join.
            Nothing is encrypted. It may also say at which address of this machine the chief listens.
        timeout_seconds: limit of every wait except the one that follows.
        long_seconds: limit for a worker in the activity ``"start"``, ``"compiling"`` or ``"saving"``.
        listener: a listening socket for the chief, which is used instead of a new one.
        on_failure: is called once, in the client's thread, when the job cannot continue; None: the process logs why and ends
            (:class:`lockstep.distributed.control.termination.ExitGuard`).
        log: takes lines about waits.
        clock: gives seconds, and is not set back.
        sleep: waits between two tries to connect.

    Raises:
        ClusterError: a worker is missing, or differs in its identity; the same sentence on every worker. Or there is no secret, and
            the workers are on several machines.
        OptionError: identity is not JSON, or too large; or a limit is out of its range.
    """
    me = Peer(
        index=group.index,
        workers=group.workers,
        host=socket.gethostname(),
        pid=os.getpid(),
        generation=generation,
        identity=as_json(identity),
        address=group.coordinator if group.is_chief else "",
    )
    join_request(me)  # Raises OptionError before any network use.
    limits = Limits(timeout_seconds, long_seconds)
    if group.workers > 1:
        check_closed(group.coordinator, network, group.name)
    joining = _Join(group, me, network.secret, limits, WaitLogger(log, clock), clock, sleep)
    server = None
    if group.is_chief:
        if listener is None and group.workers > 1:
            listener = open_listener(group.coordinator, network, log)
        server = ControlServer(group, me, listener, network.secret, limits, log, clock)
        connection, peers = joining.as_chief(server)
    else:
        connection, peers = joining.as_worker()
    if joining.wait_log.has_logged:
        log(f"all {group.workers} workers are here after {joining.wait_log.seconds:.0f} s")
    return ControlClient(group, peers, connection, server, limits, on_failure or ExitGuard().on_failure, log, clock)


@dataclass(frozen=True)
class _Join:
    """One worker's wait until all have joined; its arguments are those of :func:`open_control_channel`."""

    group: WorkerGroup
    me: Peer
    secret: bytes | None
    limits: Limits
    wait_log: WaitLogger
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def as_chief(self, server: ControlServer) -> Joined:
        """Wait for all workers; if the job cannot start, stay until they have been told why."""
        try:
            try:
                return self._wait_for_welcome(server.connection)
            except ClusterError:
                server.rejection_sent.wait(LINGER_SECONDS)
                raise
        except BaseException:
            server.stop()
            server.connection.close()
            raise

    def as_worker(self) -> Joined:
        """Try to join until the chief admits this worker."""
        while True:
            try:
                return self._try_once()
            except RetryableConnectError as error:
                reason = str(error)
            if self.wait_log.seconds > self.limits.timeout:
                raise ClusterError(
                    f"{self.group.name}: {self._chief}, was not met within {self.limits.timeout:g} s: {reason}. Fix: check that "
                    f"it is started and can be reached from here.",
                    PEER_LOST,
                )
            self.wait_log.log(f"{self._chief} ({reason})")
            self.sleep(_RETRY_SECONDS)

    @property
    def _chief(self) -> str:
        return f"worker 0 of {self.group.workers}, the chief at {self.group.coordinator}"

    def _try_once(self) -> Joined:
        connection = connect(self.group.coordinator, self._at_most(_CONNECT_SECONDS))
        try:
            introduce(connection, self.me, self.secret, self._at_most(HANDSHAKE_SECONDS))
            return self._wait_for_welcome(connection)
        except HandshakeError as error:
            connection.close()
            raise ClusterError(
                f"{self.group.name} cannot join {self._chief}: {error}. Fix: give all workers the same secret and the same Lockstep."
            ) from None
        except BaseException:
            connection.close()
            raise

    def _at_most(self, seconds: float) -> float:
        """Return a limit that also ends this wait in time, but leaves the last try a moment."""
        return min(seconds, max(_RETRY_SECONDS, self.limits.timeout - self.wait_log.seconds))

    def _wait_for_welcome(self, connection: FramedSocket) -> Joined:
        """Return all workers as soon as the chief reports that they have joined; it also ends a wait that takes too long."""
        heard, is_admitted = self.clock(), False
        while True:
            message = connection.wait(_RETRY_SECONDS)
            if message is not None:
                heard, is_admitted = self.clock(), True
                if message["kind"] == "welcome":
                    return connection, tuple(replace(self.me, **known) for known in message["peers"])
                self._handle(message)
            elif connection.ended is not None and not is_admitted:
                raise RetryableConnectError(connection.ended)
            elif connection.ended is not None or self.clock() - heard > self.limits.timeout:
                what = connection.ended or f"it sent nothing for {self.limits.timeout:g} s"
                raise ClusterError(
                    f"{self._chief}, went away before all had joined: {what}. Fix: see what it prints.", PEER_LOST
                )

    def _handle(self, message: dict[str, Any]) -> None:
        if message["kind"] == "heartbeat" and START in message["missing"]:
            self.wait_log.log(listed(message["missing"][START]["names"]))
        elif message["kind"] == "refused" and message["again"]:
            raise RetryableConnectError(message["sentence"])
        elif message["kind"] == "refused":
            raise ClusterError(message["sentence"], message["exit_code"])
