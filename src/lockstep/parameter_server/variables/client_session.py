"""A worker that has come to a server, and what it is answered."""

from collections.abc import Callable, Mapping

import numpy as np

from lockstep.distributed.control.peer import Peer
from lockstep.parameter_server.variables.array_transport import Message, ProtocolError

__all__ = ["Answer", "ClientSession", "seconds_of"]

_LONGEST_SECONDS = 3600.0

Answer = tuple[Message, Mapping[str, np.ndarray]]


class ClientSession:
    """A worker from its coming to its going; one that comes again makes another visit.

    Args:
        peer: the worker.
        is_gone: whether it went away while it waits for an answer.
    """

    def __init__(self, peer: Peer, is_gone: Callable[[], bool] = lambda: False) -> None:
        self.peer, self.is_gone = peer, is_gone

    def __str__(self) -> str:
        return str(self.peer)


def seconds_of(message: Message) -> float:
    """How long one who asks wants to wait; ProtocolError where that is no number of seconds."""
    seconds = message.get("seconds")
    if isinstance(seconds, (int, float)) and 0 <= seconds <= _LONGEST_SECONDS:
        return float(seconds)
    raise ProtocolError(f"seconds: expected a number from 0 to {_LONGEST_SECONDS:g}, got {str(seconds)[:40]!r}")
