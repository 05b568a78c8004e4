"""Rendezvous of the supervisors of several nodes: node 0 runs the server, and each supervisor is a client."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep._errors import DONE, NO_PROGRESS, PEER_LOST, ClusterError, LockstepError, without_fix
from lockstep._logging import WaitLogger
from lockstep.distributed.cluster.addresses import host_of, split_address, unmapped
from lockstep.distributed.cluster.env_reader import NetworkOptions
from lockstep.distributed.control.admission import JoinRejection
from lockstep.distributed.control.failure_detector import SuspendDetector
from lockstep.distributed.control.handshake import (
    HANDSHAKE_SECONDS,
    CoordinatorRunsError,
    HandshakeError,
    HandshakeServer,
    Peer,
    RetryableConnectError,
    connect,
    introduce,
    open_listener,
    refusal,
    wait_until_admitted,
)
from lockstep.distributed.control.transport import CLOSED, MAX_BYTES, EventLoop, FramedSocket, encode
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.local_workers import IDLE_STOP_SIGNALS, LocalWorkers
from lockstep.launch.rank_assignment import RankAssignment, is_local_host
from lockstep.launch.rendezvous_state import (
    SILENT_SECONDS,
    GenerationOutcome,
    NodeInfo,
    Outbound,
    RendezvousState,
    identity_of,
)
from lockstep.launch.signals import SignalPipe
from lockstep.launch.worker_process import USAGE

_HEARTBEAT_SECONDS = 1.0
_TICK_SECONDS = 0.1
_DEAD_SECONDS = 35.0  # A machine that acknowledges nothing for so long is lost; the same as for an idle connection.
_LINGER_SECONDS = 2.0  # For the other nodes to receive the end of the job.
_LOCAL_KEY = 0  # The key of this node.


class RendezvousServer:
    """Serves the rendezvous of one job; the options of all other nodes must match those of this one.

    Attributes:
        connection: the end for this node's own client.
    """

    def __init__(
        self,
        job: LaunchConfig,
        me: Peer,
        listener: socket.socket,
        secret: bytes | None,
        log: Callable[[str], None],
    ) -> None:
        self._loop = EventLoop("lockstep-rendezvous")
        self._state = RendezvousState(job, time.monotonic)
        self._connections: dict[int, FramedSocket] = {}
        self._next_key, self._ticks = _LOCAL_KEY, 0
        self._end_delivered = threading.Event()
        server_end, client_end = socket.socketpair()
        self.connection = FramedSocket(client_end)
        own_host = split_address("the coordinator", job.coordinator_address)[0]
        self._add(FramedSocket(server_end), NodeInfo.of(me, own_host, is_server=True))
        HandshakeServer(self._loop, secret, self._on_join, log).listen(listener)
        self._loop.later(0.0, self._tick)
        self._loop.start()

    def stop(self, code: int, sentence: str) -> None:
        """End the job with this code if it has not ended yet, and close when the other nodes have received the end."""
        self._loop.call(lambda: self._finish(code, sentence))
        self._end_delivered.wait(_LINGER_SECONDS)
        self._loop.stop()

    def _finish(self, code: int, sentence: str) -> None:
        if (own := self._connections.get(_LOCAL_KEY)) is not None:
            for message in own.receive():  # This node may just have sent why it ends.
                self._on_message(_LOCAL_KEY, message)
        if not self._state.is_over:
            self._send(self._state.finish(code, sentence))
        self._check_end_delivered()

    def _on_join(self, connection: FramedSocket, peer: Peer) -> None:
        try:
            rejection = self._state.validate(peer)
            node = None if rejection else NodeInfo.of(peer, unmapped(host_of(connection.address)))
        except (LockstepError, TypeError, ValueError) as error:
            problem = f"{peer.process} sent an invalid description of its node ({without_fix(error)})"
            node, rejection = None, JoinRejection(f"{problem}. Fix: use the same Lockstep on all nodes.")
        if node is not None:
            connection.send(encode({"kind": "welcome"}))
            self._add(connection, node)
        elif rejection is not None:
            connection.send(encode(refusal(rejection.sentence, again=rejection.again)))
            self._loop.remove(connection)

    def _add(self, connection: FramedSocket, node: NodeInfo) -> None:
        key, self._next_key = self._next_key, self._next_key + 1
        self._connections[key] = connection
        connection.set_limit(MAX_BYTES)
        connection.limit_unacknowledged(_DEAD_SECONDS)
        self._loop.add(connection, lambda _, message: self._on_message(key, message), lambda _: self._on_close(key))
        self._send(self._state.add(key, node))

    def _on_message(self, key: int, message: dict[str, Any]) -> None:
        self._state.hear(key)
        try:
            if message["kind"] == "ended":
                self._send(self._state.record(key, GenerationOutcome.from_message(message)))
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            self._connections[key].ended = f"it sent an invalid message ({error!r})"

    def _on_close(self, key: int) -> None:
        why = self._connections.pop(key).ended or CLOSED
        self._send(self._state.remove(key, why))
        self._check_end_delivered()

    def _check_end_delivered(self) -> None:
        if self._state.is_over and not set(self._connections) - {_LOCAL_KEY}:
            self._end_delivered.set()

    def _tick(self) -> None:
        self._send(self._state.advance())
        self._ticks += 1
        if self._ticks % round(_HEARTBEAT_SECONDS / _TICK_SECONDS) == 0:
            heartbeat = encode({"kind": "heartbeat", "waits": self._state.describe_wait()})
            for key in self._state.idle_nodes():
                self._connections[key].send(heartbeat)
        self._loop.later(_TICK_SECONDS, self._tick)

    def _send(self, messages: Iterable[Outbound]) -> None:
        for to, message in messages:
            if to in self._connections:
                self._connections[to].send(encode(message))


_RETRY_SECONDS = 0.2
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class NodeExit:
    """Why this node leaves the job: the exit code, and a sentence for the user, which may be empty."""

    code: int
    sentence: str


@dataclass
class RendezvousClient:
    """Restart loop of a node whose generations are decided by the rendezvous.

    ``server`` is set at the node that runs it; ``stop_at`` is on the monotonic clock.
    """

    connection: FramedSocket
    server: RendezvousServer | None
    description: str
    signals: SignalPipe
    stop_at: float | None
    log: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _exit: NodeExit | None = field(default=None, init=False)
    _assignment: RankAssignment | None = field(default=None, init=False)  # Received and not yet started.
    _stop_reason: str | None = field(default=None, init=False)  # Why the current generation must stop.
    _last_code: int | None = field(default=None, init=False)  # Of the last generation.
    _waiting_for: str = field(default="", init=False)
    _received_at: float = field(default=0.0, init=False)  # Time of the last message.
    _next_heartbeat: float = field(default=0.0, init=False)  # Time of the next heartbeat.

    @property
    def code(self) -> int:
        """Exit code of the job on this node."""
        return DONE if self._exit is None else self._exit.code

    @property
    def remote_stop(self) -> "RendezvousClient":
        """This object: the server sends here that a generation must stop."""
        return self

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self.connection.fileno()

    def read(self) -> str | None:
        """Read messages; return the reason if the workers here must stop, else None."""
        self._receive()
        return self._stop_reason if self._exit is None else self._exit.sentence or "the job is over"

    def send_heartbeat_if_due(self) -> float:
        """Tell the server that this node is alive, if it is time to; return the seconds until it is again."""
        now = self.clock()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + _HEARTBEAT_SECONDS
            self.connection.flush()
            if not self.connection.has_unsent:  # A server that is stopped reads nothing.
                self.connection.send(encode({"kind": "heartbeat"}))
        return self._next_heartbeat - now

    def assignments(self) -> Generator[RankAssignment, None, None]:
        """Yield the rank assignment of each generation of this node."""
        while True:
            self._wait()
            if self._exit is not None or self._assignment is None:
                break
            current, self._assignment = self._assignment, None
            last = current.first + current.workers - 1
            workers = f"worker {last}" if current.workers == 1 else f"workers {current.first} to {last}"
            self.log(
                f"start {current.generation}: node {current.node} of {current.nodes}, {workers} of {current.all_workers}; "
                f"worker 0 is at {current.coordinator}."
            )
            yield current
        if self._exit is not None and self._exit.sentence:
            self.log(f"{self._exit.sentence.removesuffix('.')}.")

    def record(self, workers: LocalWorkers) -> None:
        """Report to the server how a generation has ended here."""
        self._last_code = workers.code
        outcome = self._outcome(workers)
        self.connection.send(encode({"kind": "ended", **asdict(outcome)}))
        if self._exit is None and (outcome.leaves or outcome.is_final):
            self._exit = NodeExit(workers.code if self.server is None else outcome.code, "")

    def close(self) -> None:
        """Leave; if the server runs here, the job ends on all nodes."""
        if self.server is not None:
            code = self.code or PEER_LOST
            self.server.stop(code, f"{self.description} has ended, and the job cannot continue without it")
        self.connection.flush()
        self.connection.close()

    def _outcome(self, workers: LocalWorkers) -> GenerationOutcome:
        if workers.was_asked_to_stop and self.server is not None:
            return GenerationOutcome(workers.code or PEER_LOST, "it was asked to stop", is_final=True, leaves=True)
        if workers.was_asked_to_stop:
            return GenerationOutcome(PEER_LOST if workers.code else DONE, "it was asked to stop", leaves=True)
        if workers.timed_out:
            return GenerationOutcome(workers.code, "the run took longer than --timeout allows", is_final=True)
        failure = workers.failure
        if failure is None:
            return GenerationOutcome(workers.code, "its workers were asked to stop", is_consequence=True)
        return GenerationOutcome(workers.code, failure.headline, failure.is_consequence, workers.is_final)

    def _wait(self) -> None:
        """Wait until there is an assignment or a reason to exit."""
        progress, suspends = WaitLogger(self.log), SuspendDetector()
        self._received_at = time.monotonic()
        while True:
            self._receive()
            if self._assignment is not None or self._exit is not None:
                return
            limit = min(_seconds_left(self.stop_at), self._seconds_until_silent(suspends))
            if limit <= 0:
                self._exit = self._exit_on_timeout()
                return
            numbers, _ = self.signals.wait(min(limit, self.send_heartbeat_if_due()), [self.fileno()])
            self._exit = _exit_on_signal(numbers, self._code_of_idle_node)
            if self._exit is not None and self.server is not None:
                self.log("node 0 was asked to stop, which ends the job on all nodes.")
            if self._waiting_for:
                progress.log(self._waiting_for)

    def _seconds_until_silent(self, suspends: SuspendDetector) -> float:
        """Return how long the server may still say nothing; the one of this process cannot be lost."""
        if self.server is not None:
            return float("inf")
        return max(self._received_at, suspends.since) + SILENT_SECONDS - suspends.tick()

    @property
    def _code_of_idle_node(self) -> int | None:
        """The exit code if a signal stops this node while no workers run; None: that of the signal."""
        if self.server is None or self._last_code is None:
            return self._last_code
        return self._last_code or PEER_LOST  # The other nodes are not done.

    def _exit_on_timeout(self) -> NodeExit:
        if _seconds_left(self.stop_at) <= 0:
            return NodeExit(NO_PROGRESS, "the run takes longer than --timeout allows")
        return NodeExit(
            PEER_LOST,
            f"{self.description} sent nothing for {SILENT_SECONDS:g} s, and the job cannot continue without it",
        )

    def _receive(self) -> None:
        for message in self.connection.receive():
            self._received_at = time.monotonic()
            self._handle(message)
        if self.connection.ended is not None and self._exit is None:
            why = self.connection.ended
            self._exit = NodeExit(
                PEER_LOST, f"{self.description} was lost ({why}), and the job cannot continue without it"
            )

    def _handle(self, message: dict[str, Any]) -> None:
        if message["kind"] == "start":
            self._assignment, self._stop_reason = RankAssignment(**message["assignment"]), None
            self._waiting_for = ""
        elif message["kind"] == "stop_generation":
            self._stop_reason = message["sentence"]
        elif message["kind"] == "generation_failed":
            self.log(f"{message['sentence'].removesuffix('.')}.")
        elif message["kind"] == "heartbeat":
            self._waiting_for = message["waits"]
        elif message["kind"] == "end" and self._exit is None:
            self._exit = NodeExit(int(message["code"]), message["sentence"])


def join_rendezvous(
    job: LaunchConfig,
    node: int | None,
    network: NetworkOptions,
    signals: SignalPipe,
    stop_at: float | None,
    log: Callable[[str], None],
) -> RendezvousClient | NodeExit:
    """Join the rendezvous of a job, or start its server.

    Args:
        job: what runs.
        node: rank of this node; None: a node at the coordinator's address starts the server if there is none yet.
        network: the secret that all supervisors must know, and where this one listens.
        signals: signals of the supervisor.
        stop_at: when the run must be over, on the monotonic clock.
        log: prints a line for the user.

    Returns:
        The restart loop of this node, or why it exits.

    Raises:
        ClusterError: this is node 0, and it cannot listen.
    """
    coordinator = job.coordinator_address or ""  # An elastic job without one is refused before.
    joining = _RendezvousJoin(job, coordinator, _own_peer(job, node), network, signals, stop_at, log)
    if node == 0:
        return joining.serve()
    if node is None and is_local_host(split_address("--coordinator", coordinator)[0]):
        with contextlib.suppress(RetryableConnectError):
            return joining.try_once()
        try:
            return joining.serve()
        except CoordinatorRunsError:  # Another supervisor on this machine was faster.
            pass
        except ClusterError:
            with contextlib.suppress(RetryableConnectError):
                return joining.try_once()
            raise
    return joining.try_until_admitted()


def _own_peer(job: LaunchConfig, node: int | None) -> Peer:
    """Describe this supervisor; without ``--hosts`` the server takes its host from the connection."""
    host, port = split_address("address", job.first_addresses[(node or 0) if job.hosts else 0])
    information = {"rank": node, "host": host if job.hosts else "", "port": port}
    return Peer(-1, job.workers, socket.gethostname(), os.getpid(), identity=identity_of(job), information=information)


@dataclass(frozen=True)
class _RendezvousJoin:
    job: LaunchConfig
    coordinator: str
    me: Peer
    network: NetworkOptions
    signals: SignalPipe
    stop_at: float | None
    log: Callable[[str], None]

    def serve(self) -> RendezvousClient:
        """Start the server at this node."""
        listener = open_listener(self.coordinator, self.network, self.log, "the rendezvous")
        server = RendezvousServer(self.job, self.me, listener, self.network.secret, self.log)
        return self._client(server.connection, server)

    def try_until_admitted(self) -> RendezvousClient | NodeExit:
        """Try to join until the server admits or rejects this node, or a limit is reached."""
        progress, reason = WaitLogger(self.log), "connection refused"
        while progress.seconds < self.job.start_seconds:
            try:
                return self.try_once()
            except RetryableConnectError as error:
                reason = str(error)
            progress.log(f"the rendezvous at node 0, {self.coordinator} ({reason})")
            numbers, _ = self.signals.wait(_RETRY_SECONDS)
            stopped = _exit_on_signal(numbers)
            if stopped is not None:
                return stopped
            if _seconds_left(self.stop_at) <= 0:
                return NodeExit(NO_PROGRESS, f"{self._description} was not reached within --timeout: {reason}")
        return NodeExit(
            PEER_LOST,
            f"{self._description} was not reached within {self.job.start_seconds:g} s: {reason}. Fix: start the same command there, "
            "and check that this node can connect to it",
        )

    def try_once(self) -> RendezvousClient | NodeExit:
        """Try to join once; raise RetryableConnectError if a later attempt may succeed."""
        connection = connect(self.coordinator, _CONNECT_SECONDS)
        try:
            introduce(connection, self.me, self.network.secret, HANDSHAKE_SECONDS)
            wait_until_admitted(connection, HANDSHAKE_SECONDS)
            connection.limit_unacknowledged(_DEAD_SECONDS)
        except HandshakeError as error:
            connection.close()
            return NodeExit(USAGE, f"{self._description} rejected this node: {error}".removesuffix("."))
        except BaseException:
            connection.close()
            raise
        return self._client(connection, None)

    def _client(self, connection: FramedSocket, server: RendezvousServer | None) -> RendezvousClient:
        return RendezvousClient(connection, server, self._description, self.signals, self.stop_at, self.log)

    @property
    def _description(self) -> str:
        return f"node 0 (rendezvous at {self.coordinator})"


def _seconds_left(stop_at: float | None) -> float:
    """Return the seconds until the run must be over."""
    return float("inf") if stop_at is None else stop_at - time.monotonic()


def _exit_on_signal(numbers: list[int], last_code: int | None = None) -> NodeExit | None:
    """Return the exit for a signal while no workers run: with the code of the last generation, if there was one."""
    stops = [number for number in numbers if number in IDLE_STOP_SIGNALS]
    if not stops:
        return None
    code = PEER_LOST if stops[0] == signal.SIGUSR1 else 128 + stops[0]
    return NodeExit(code if last_code is None else last_code, "")
