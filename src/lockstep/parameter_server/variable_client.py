"""Client of the variable servers: fill, pull and push. Requests go to all servers at the same time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep._errors import ClusterError
from lockstep._logging import log_info
from lockstep.distributed.control.handshake import Peer
from lockstep.parameter_server.array_transport import CheckRequest, Message
from lockstep.parameter_server.messages import (
    INDICES,
    VALUE,
    check_only_values,
    encode_gradients,
    pull_response_check,
    strip_prefixes,
)
from lockstep.parameter_server.rpc import Response, RpcClient, check_no_arrays, connect_rpc
from lockstep.parameter_server.sharding import Shard, ShardingPlan
from lockstep.parameter_server.sparse_rows import Gradient, gradient_of_shard


@dataclass(frozen=True)
class BatchPart:
    """Part of a global batch in synchronous training: see :class:`lockstep.parameter_server.variable_server.SyncAggregator`.

    Args:
        update: number of the update.
        part: number of the part.
        parts: number of parts.
    """

    update: int
    part: int
    parts: int


class VariableClient:
    """Connections of one process to all servers; used by one thread at a time.

    Args:
        plan: assignment of all variables to servers.
        addresses: ``host:port`` of each server.
        me: this process.
        secret: secret of the job.
        timeout_seconds: limit of each wait.
        log: takes a line while this waits for a server to start.
        raise_failure: raises why a server will not start, if that is known.

    Raises:
        ClusterError: a server cannot be reached in time, or belongs to another job.

    Attributes:
        versions: for each server the number of updates in the values that were pulled last.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        addresses: Sequence[str],
        me: Peer,
        *,
        secret: bytes | None = None,
        timeout_seconds: float = 60.0,
        log: Callable[[str], None] = log_info,
        raise_failure: Callable[[], object] = lambda: None,
    ) -> None:
        self._plan, self._timeout = plan, timeout_seconds
        self._rpc_clients: list[RpcClient] = []
        self.versions = [0] * plan.servers
        try:
            for number, address in enumerate(addresses):
                known = replace(me, identity=plan.identity_of(number) | dict(me.identity))
                self._rpc_clients.append(
                    connect_rpc(f"ps {number}", address, known, secret, timeout_seconds, log, raise_failure)
                )
        except ClusterError:
            self.close()
            raise

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that were sent and received."""
        sent, received = zip(*(rpc_client.traffic for rpc_client in self._rpc_clients), strict=True)
        return sum(sent), sum(received)

    def fill(
        self,
        values: Mapping[str, np.ndarray],
        optimizers: Sequence[Mapping[str, np.ndarray]] = (),
        *,
        version: int = 0,
        task: int = 0,
    ) -> None:
        """Set all values; only the chief may.

        Args:
            values: values of all variables, by name.
            optimizers: for each server the state of its optimizer; none: the initial state.
            version: number of updates that made this state.
            task: the pushes of all tasks with smaller numbers are in it.
        """
        parts = self._plan.split(values)
        if optimizers:
            parts = [part | dict(known) for part, known in zip(parts, optimizers, strict=True)]
        message = {"kind": "fill", "version": version, "task": task}
        arrays = [{VALUE + name: array for name, array in part.items()} for part in parts]
        self._send_all([message] * len(parts), arrays)

    def pull(
        self,
        rows: Mapping[str, np.ndarray] | None = None,
        *,
        part: BatchPart | None = None,
        will_push: bool = True,
    ) -> dict[str, np.ndarray]:
        """Return the newest values; waits while this worker is too far ahead of the slowest one.

        Args:
            rows: numbers of the rows, as vectors, of those variables of which only some rows are needed.
            part: part of a synchronous update, which needs the values before that update, also if it was applied meanwhile.
            will_push: whether a push of this worker follows, so that the staleness bound counts it as active.

        Returns:
            By name the whole values, or the rows in the requested order.

        Raises:
            ClusterError: a server is lost, or had to wait too long; the message names it and the workers it waited for.
        """
        rows = rows or {}
        message = {"kind": "pull", "seconds": self._timeout, "will_push": will_push}
        message |= {} if part is None else {"update": part.update}
        requested = [_encode_row_request(self._plan.shards_at(n), rows) for n in range(self._plan.servers)]
        checks = [pull_response_check(one, self._plan.specs_at(number)) for number, one in enumerate(requested)]
        replies = self._send_all([message] * len(requested), requested, checks)
        self.versions = [int(reply["version"]) for reply, _ in replies]
        parts = [strip_prefixes(arrays) for _, arrays in replies]
        return {name: join_shards(shards, parts, rows.get(name)) for name, shards in self._plan.shards.items()}

    def push(
        self,
        gradients: Mapping[str, Gradient],
        *,
        weight: float = 1.0,
        part: BatchPart | None = None,
        task: int | None = None,
        below: int = 0,
    ) -> list[Message]:
        """Send a gradient to the servers, which apply it at once, and return their responses.

        Args:
            gradients: gradients of all variables, by name.
            weight: weight of this part among those of its update.
            part: part of a synchronous update; None: the gradient is an update by itself.
            task: number of the task. A server applies the gradient of a task once, even if two workers push it.
            below: all tasks with smaller numbers are done, so servers need not remember them.

        Raises:
            ClusterError: a server did not accept it; the message names it.
        """
        arrays = [
            encode_gradients(
                {
                    shard.spec.name: gradient_of_shard(gradients[shard.variable.name], shard)
                    for shard in self._plan.shards_at(number)
                }
            )
            for number in range(self._plan.servers)
        ]
        about = {} if part is None else {"update": part.update, "part": part.part, "parts": part.parts}
        about |= {} if task is None else {"task": task, "below": below}
        messages = [{"kind": "push", "weight": weight, "pulled": version, **about} for version in self.versions]
        return [reply for reply, _ in self._send_all(messages, arrays)]

    def pause(self) -> None:
        """Tell the servers that this worker has no task until it pulls again, so that the staleness bound ignores it."""
        self._request_all("pause")

    def state(self) -> list[dict[str, np.ndarray]]:
        """Return for each server all arrays of its variables and optimizer."""
        count = self._plan.servers
        replies = self._send_all([{"kind": "state"}] * count, [{}] * count, [check_only_values] * count)
        return [strip_prefixes(arrays) for _, arrays in replies]

    def statistics(self) -> list[Message]:
        """Return for each server ``updates``, and ``staleness``: pairs of a staleness and the number of gradients that had it."""
        return self._request_all("statistics")

    def close(self) -> None:
        """Send what is still queued, and close the connections."""
        for rpc_client in self._rpc_clients:
            rpc_client.close()

    def _request_all(self, kind: str) -> list[Message]:
        count = self._plan.servers
        return [reply for reply, _ in self._send_all([{"kind": kind}] * count, [{}] * count)]

    def _send_all(
        self,
        messages: Iterable[Message],
        arrays: Iterable[Mapping[str, np.ndarray]],
        checks: Iterable[CheckRequest] | None = None,
    ) -> list[Response]:
        """Send a request to each server and return the responses; ``checks`` are theirs, by default that no arrays follow."""
        checks = checks or [check_no_arrays] * self._plan.servers
        requests = zip(self._rpc_clients, messages, arrays, checks, strict=True)
        responses = [client.call(message, each, check) for client, message, each, check in requests]
        return [response.result() for response in responses]


def _encode_row_request(shards: Iterable[Shard], rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the requested rows of one server's shards as the arrays of a pull."""
    numbers = {one: np.asarray(rows[one.variable.name], np.int32) for one in shards if one.variable.name in rows}
    return {INDICES + one.spec.name: one.local_rows(each) for one, each in numbers.items()}


def join_shards(
    shards: Sequence[Shard], parts: Sequence[Mapping[str, np.ndarray]], indices: np.ndarray | None = None
) -> np.ndarray:
    """Return a variable from its shards: all of it, or the rows ``indices``."""
    pieces = [parts[one.server][one.spec.name] for one in shards]
    if len(pieces) == 1:
        return pieces[0]
    if indices is None:
        return np.concatenate(pieces)
    found = np.empty((len(indices), *pieces[0].shape[1:]), pieces[0].dtype)
    for shard, piece in zip(shards, pieces, strict=True):
        found[shard.mask(indices)] = piece
    return found
