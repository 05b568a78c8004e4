"""How a supervisor comes to the meeting: it listens itself, or looks for who does until it is let in."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep._errors import ClusterError
from lockstep.distributed.cluster.addresses import split_address
from lockstep.distributed.cluster.exit_codes import NO_PROGRESS, PEER_LOST
from lockstep.distributed.control.framed_socket import FramedSocket
from lockstep.distributed.control.handshake_client import RetryableConnectError, connect, introduce
from lockstep.distributed.control.handshake_server import HANDSHAKE_SECONDS, HandshakeError
from lockstep.distributed.control.listener import open_listener
from lockstep.distributed.control.peer import Peer
from lockstep.distributed.control.wait_logger import WaitLogger
from lockstep.launch.failure_report import USAGE
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.rank_assignment import is_here
from lockstep.launch.rendezvous.node_messages import JobSpec
from lockstep.launch.rendezvous.rendezvous_client import NodeExit, RendezvousClient, seconds_left, unwanted
from lockstep.launch.rendezvous.rendezvous_server import RendezvousServer
from lockstep.launch.signal_pipe import SignalPipe

__all__ = ["arrive"]

_RETRY_SECONDS = 0.2
_CONNECT_SECONDS = 5.0


def arrive(
    job: LaunchConfig,
    node: int | None,
    secret: bytes | None,
    received: SignalPipe,
    stop_at: float | None,
    say: Callable[[str], None],
) -> RendezvousClient | NodeExit:
    """Come to the meeting of a job.

    Args:
        job: what runs.
        node: which node this is; None: that is seen from the coordinator's address, and from who listens there already.
        secret: that all supervisors must know; None: there is none.
        received: the signals of the supervisor.
        stop_at: when the run must be over, on the monotonic clock.
        say: takes lines for the user.

    Returns:
        The course of this node; or why there is none.

    Raises:
        ClusterError: this is node 0, and it cannot listen.
    """
    terms = JobSpec.of(job)
    here = _RendezvousJoin(terms, _introduction(job, node, terms), secret, received, stop_at, say)
    if node == 0:
        return here.as_host()
    if node is None and is_here(split_address("--coordinator", terms.coordinator)[0]):
        with contextlib.suppress(RetryableConnectError):
            return here.as_guest()
        with contextlib.suppress(ClusterError):  # Another one was faster.
            return here.as_host()
    return here.as_patient_guest()


def _introduction(job: LaunchConfig, node: int | None, terms: JobSpec) -> Peer:
    """Where no hosts are named, the others see from where a node has come."""
    host, port = split_address("address", job.first_addresses[node or 0] if job.hosts else terms.coordinator)
    information = {"rank": node, "host": host if job.hosts else "", "port": port}
    identity = terms.as_identity()
    return Peer(-1, job.workers, socket.gethostname(), os.getpid(), identity=identity, information=information)


@dataclass(frozen=True)
class _RendezvousJoin:
    terms: JobSpec
    me: Peer
    secret: bytes | None
    received: SignalPipe
    stop_at: float | None
    say: Callable[[str], None]

    def as_host(self) -> RendezvousClient:
        """Listen."""
        listener = open_listener(self.terms.coordinator, None, self.say)
        host = RendezvousServer(self.terms, self.me, listener, self.secret, self.say)
        return self._guest(host.connection, host)

    def as_patient_guest(self) -> RendezvousClient | NodeExit:
        """Try until somebody lets this node in."""
        notice, reason = WaitLogger(self.say), "nobody listens there"
        while notice.seconds < self.terms.start_seconds:
            try:
                return self.as_guest()
            except RetryableConnectError as error:
                reason = str(error)
            notice.tell(f"node 0, where all meet at {self.terms.coordinator} ({reason})")
            numbers, _ = self.received.wait(_RETRY_SECONDS)
            asked = unwanted(numbers)
            if asked is not None:
                return asked
            if seconds_left(self.stop_at) <= 0:
                return NodeExit(NO_PROGRESS, f"{self._where} was not met within --timeout: {reason}")
        return NodeExit(
            PEER_LOST,
            f"{self._where} was not met within {self.terms.start_seconds:g} s: {reason}. Is the same command started there, and can it "
            "be reached from here?",
        )

    def as_guest(self) -> RendezvousClient | NodeExit:
        """Try once; RetryableConnectError where to try again is right."""
        connection = connect(self.terms.coordinator, _CONNECT_SECONDS)
        try:
            introduce(connection, self.me, self.secret, HANDSHAKE_SECONDS)
            _be_let_in(connection)
        except HandshakeError as error:
            connection.close()
            return NodeExit(USAGE, f"{self._where} does not let this node in {error}")
        except BaseException:
            connection.close()
            raise
        return self._guest(connection, None)

    def _guest(self, connection: FramedSocket, host: RendezvousServer | None) -> RendezvousClient:
        return RendezvousClient(connection, host, self._where, self.received, self.stop_at, self.say)

    @property
    def _where(self) -> str:
        return f"node 0, where all meet at {self.terms.coordinator},"


def _be_let_in(connection: FramedSocket) -> None:
    """Wait for the host's word; HandshakeError where it is no."""
    until = time.monotonic() + HANDSHAKE_SECONDS
    while connection.ended is None and time.monotonic() < until:
        message = connection.wait(until - time.monotonic())
        if message is not None and message["kind"] == "welcome":
            return
        if message is not None and message["kind"] == "refuse":
            if message["again"]:
                raise RetryableConnectError(message["sentence"])
            raise HandshakeError(message["sentence"])
    raise RetryableConnectError(connection.ended or "it says nothing")
