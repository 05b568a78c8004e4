"""What a worker does with variables that are kept on servers: fill, pull, push. All servers are asked at the same time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep._errors import ClusterError
from lockstep._logging import log_info
from lockstep.distributed.control.peer import Peer
from lockstep.parameter_server.variables.array_transport import CheckRequest, Message
from lockstep.parameter_server.variables.messages import (
    INDICES,
    VALUE,
    as_arrays,
    judge_of_values,
    no_arrays,
    only_values,
    value_of,
)
from lockstep.parameter_server.variables.rpc_client import Response, RpcClient, connect
from lockstep.parameter_server.variables.sharding import Shard, ShardingPlan
from lockstep.parameter_server.variables.sparse_gradients import Gradient, share

__all__ = ["BatchPart", "PendingPush", "VariableClient"]

RowsAsked = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class BatchPart:
    """What a gradient is part of, in synchronous training: see :class:`lockstep.parameter_server.variables.sync_aggregator.SyncAggregator`.

    Args:
        round: number of the update.
        part: which part of its global batch.
        parts: number of parts.
    """

    round: int
    part: int
    parts: int


class PendingPush:
    """A gradient on its way.

    Args:
        answers: of all servers.
    """

    def __init__(self, answers: "Sequence[Future[Response]]") -> None:
        self._answers = answers

    @property
    def is_done(self) -> bool:
        """Whether all servers have answered, or will not."""
        return all(answer.done() for answer in self._answers)

    def wait(self) -> list[Message]:
        """What each server has said.

        Raises:
            ClusterError: one of them did not take it; it is named.
        """
        return [answer.result()[0] for answer in self._answers]


class VariableClient:
    """The way of one process to all servers; used by one thread at a time.

    Args:
        plan: where all variables are.
        addresses: ``host:port`` of each server.
        me: this process.
        secret: of the job.
        timeout_seconds: limit of every wait.
        announce: takes a line while this waits for a server to start.

    Raises:
        ClusterError: a server cannot be reached in time, or is none of this job.

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
        announce: Callable[[str], Any] = log_info,
    ) -> None:
        self._plan, self._timeout = plan, timeout_seconds
        self._couriers: list[RpcClient] = []
        self.versions = [0] * plan.servers
        try:
            for number, address in enumerate(addresses):
                known = replace(me, identity=plan.identity_of(number) | dict(me.identity))
                self._couriers.append(connect(f"ps {number}", address, known, secret, timeout_seconds, announce))
        except ClusterError:
            self.close()
            raise

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that were sent and received."""
        sent, received = zip(*(courier.traffic for courier in self._couriers), strict=True)
        return sum(sent), sum(received)

    def fill(
        self,
        values: Mapping[str, np.ndarray],
        optimizers: Sequence[Mapping[str, np.ndarray]] = (),
        *,
        version: int = 0,
        task: int = 0,
    ) -> None:
        """Set all values; the chief may.

        Args:
            values: of all variables, by name.
            optimizers: for each server what its optimizer knows; none: they begin anew.
            version: number of updates that made all this.
            task: all batches with smaller numbers are in it.
        """
        parts = self._plan.split(values)
        if optimizers:
            parts = [part | dict(known) for part, known in zip(parts, optimizers, strict=True)]
        about = {"kind": "fill", "version": version, "task": task}
        arrays = [{VALUE + name: array for name, array in part.items()} for part in parts]
        PendingPush(self._ask([about] * len(parts), arrays, [no_arrays] * len(parts))).wait()

    def pull(
        self, rows: RowsAsked | None = None, *, at_least: int = 0, takes_part: bool = True
    ) -> dict[str, np.ndarray]:
        """The newest values; waits while this worker is too far ahead of the slowest.

        Args:
            rows: of which variables only some rows are needed, and which: a vector of their numbers.
            at_least: number of updates that must have been made.
            takes_part: whether this worker is about to push a gradient, so that others may have to wait for it.

        Returns:
            By name the whole values, or the rows in the order in which they were asked for.

        Raises:
            ClusterError: a server is lost, or had to wait for too long; it is named, and for whom it has waited.
        """
        rows = rows or {}
        message = {"kind": "pull", "at_least": at_least, "seconds": self._timeout, "takes_part": takes_part}
        asked = [_asked(self._plan.at(number), rows) for number in range(self._plan.servers)]
        judges = [judge_of_values(one, self._plan.specs_at(number)) for number, one in enumerate(asked)]
        replies = [answer.result() for answer in self._ask([message] * len(asked), asked, judges)]
        self.versions = [int(reply["version"]) for reply, _ in replies]
        parts = [value_of(arrays) for _, arrays in replies]
        return {name: _joined(shards, parts, rows.get(name)) for name, shards in self._plan.shards.items()}

    def push(
        self,
        gradients: Mapping[str, Gradient],
        *,
        weight: float = 1.0,
        part: BatchPart | None = None,
        task: int | None = None,
        below: int = 0,
    ) -> PendingPush:
        """Send a gradient to the servers, which apply it at once; does not wait for that.

        Args:
            gradients: of all variables, by name; arrays must not change until they are there.
            weight: of this part among those of its round.
            part: what it is part of; None: an update of its own.
            task: number of the batch. A server applies the gradient of a number once, whoever computed it.
            below: all batches with smaller numbers are done, so that servers need not remember which.
        """
        arrays = [
            as_arrays({one.spec.name: share(gradients[one.variable.name], one) for one in self._plan.at(number)})
            for number in range(self._plan.servers)
        ]
        about = {} if part is None else {"round": part.round, "part": part.part, "parts": part.parts}
        about |= {} if task is None else {"task": task, "below": below}
        messages = [{"kind": "push", "weight": weight, "pulled": version, **about} for version in self.versions]
        return PendingPush(self._ask(messages, arrays, [no_arrays] * len(arrays)))

    def rest(self) -> None:
        """This worker has nothing to do until it pulls again: nobody waits for it."""
        self._tell("rest")

    def state(self) -> list[tuple[int, dict[str, np.ndarray]]]:
        """For each server the number of its updates, and all its arrays, of variables and optimizer: for a checkpoint."""
        count = self._plan.servers
        replies = [
            each.result() for each in self._ask([{"kind": "state"}] * count, [{}] * count, [only_values] * count)
        ]
        return [(int(reply["version"]), value_of(arrays)) for reply, arrays in replies]

    def statistics(self) -> list[Message]:
        """For each server ``updates``, and ``staleness``: pairs of a staleness and how many gradients had it."""
        return self._tell("statistics")

    def close(self) -> None:
        """Say what is still to be said, and end."""
        for courier in self._couriers:
            courier.close()

    def _tell(self, kind: str) -> list[Message]:
        count = self._plan.servers
        return PendingPush(self._ask([{"kind": kind}] * count, [{}] * count, [no_arrays] * count)).wait()

    def _ask(
        self, messages: Iterable[Message], arrays: Iterable[Mapping[str, np.ndarray]], judges: Iterable[CheckRequest]
    ) -> "list[Future[Response]]":
        asked = zip(self._couriers, messages, arrays, judges, strict=True)
        return [courier.ask(message, each, judge) for courier, message, each, judge in asked]


def _asked(shards: Iterable[Shard], rows: RowsAsked) -> dict[str, np.ndarray]:
    """Of one server's shards the rows that are asked for, as they travel."""
    numbers = {one: np.asarray(rows[one.variable.name], np.int32) for one in shards if one.variable.name in rows}
    return {INDICES + one.spec.name: one.rows_here(each) for one, each in numbers.items()}


def _joined(
    shards: Sequence[Shard], parts: Sequence[Mapping[str, np.ndarray]], indices: np.ndarray | None
) -> np.ndarray:
    """A variable from its shards: whole, or the rows ``indices``."""
    pieces = [parts[one.server][one.spec.name] for one in shards]
    if len(pieces) == 1:
        return pieces[0]
    if indices is None:
        return np.concatenate(pieces)
    found = np.empty((len(indices), *pieces[0].shape[1:]), pieces[0].dtype)
    for shard, piece in zip(shards, pieces, strict=True):
        found[shard.are_here(indices)] = piece
    return found
