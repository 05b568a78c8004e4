"""What the chief has told at points of the script that all processes run, for those who come there later.

Whoever comes late needs the answers, or cannot go on; weights that are no longer kept only make what it computes of them older.
"""

from collections import deque
from collections.abc import Mapping

import numpy as np

from lockstep.parameter_server.variables.array_transport import Message
from lockstep.parameter_server.variables.messages import whole
from lockstep.parameter_server.variables.tcp_server import Response

__all__ = ["SyncPointLog"]

_LEAST_BYTES = 256  # What keeping one takes, however little it says.


class SyncPointLog:
    """The points 0, 1, 2, …; the oldest ones are forgotten where all together are too large. Used under its owner's lock.

    Args:
        limit_bytes: of the arrays of all of them, with some bytes for each; and as much again of weights. The newest of both are
            kept, whatever their size.

    Example:
        >>> points = SyncPointLog()
        >>> points.add({"done": False}, {})
        >>> points.answer_to({"kind": "ask", "point": 0})
        ({'kind': 'fact', 'what': {'done': False}}, {})
        >>> points.answer_to({"kind": "ask", "point": 1}) is None
        True
    """

    def __init__(self, limit_bytes: int = 2**26) -> None:
        self._limit, self._bytes, self._first = limit_bytes, 0, 0
        self._kept: deque[tuple[Message, Mapping[str, np.ndarray]]] = deque()
        self._weights: dict[int, Mapping[str, np.ndarray]] = {}  # by point, rising

    def add(
        self, what: Message, arrays: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """The next point, which is kept, whatever its size.

        Args:
            what: is told there.
            arrays: that go with it.
            weights: that go with it, too, while they are kept.
        """
        if weights is not None:
            self._weights[self._first + len(self._kept)] = weights
            while len(self._weights) > 1 and sum(map(_bytes_of, self._weights.values())) > self._limit:
                del self._weights[next(iter(self._weights))]
        self._kept.append((what, arrays))
        self._bytes += _bytes_of(arrays)
        while self._bytes > self._limit and len(self._kept) > 1:
            self._bytes -= _bytes_of(self._kept.popleft()[1])
            self._first += 1

    def answer_to(self, message: Message) -> Response | None:
        """What was told at the ``"point"`` of a message; None where there is none, or not yet."""
        if "point" not in message:
            return None
        number = whole(message, "point")
        if number >= self._first + len(self._kept):
            return None
        if number < self._first:
            return {"kind": "fact", "what": {"is_forgotten": True}}, {}
        what, arrays = self._kept[number - self._first]
        return {"kind": "fact", "what": what}, {**arrays, **self._weights.get(number, {})}


def _bytes_of(arrays: Mapping[str, np.ndarray]) -> int:
    return _LEAST_BYTES + sum(array.nbytes for array in arrays.values())
