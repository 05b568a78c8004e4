"""Synchronous training on servers: an update waits until all parts of its global batch are there, whoever computed them."""

from lockstep._errors import OptionError
from lockstep.parameter_server.variables.variable_store import Push

__all__ = ["SyncAggregator"]


class SyncAggregator:
    """Collects the parts of the next update. A part that comes twice, as its worker was taken for dead, counts once.

    Args:
        number: of updates so far.

    Example:
        >>> rounds, one, two = SyncAggregator(), Push({}), Push({}, weight=3)
        >>> rounds.add(0, part=1, parts=2, push=two) is None
        True
        >>> rounds.add(0, part=0, parts=2, push=one) == [one, two]
        True
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._parts: dict[int, Push] = {}
        self._count = 0

    def add(self, number: int, part: int, parts: int, push: Push) -> list[Push] | None:
        """One part.

        Args:
            number: of the round; one that is over takes nothing more.
            part: which part of its global batch, from 0.
            parts: how many there are.
            push: its gradients and weight.

        Returns:
            All parts of the round in their order, where this was the last that missed; then the next round begins.

        Raises:
            OptionError: the round has not begun, or has another number of parts.
        """
        if number < self.number:
            return None
        if number > self.number or not 0 <= part < parts or self._count not in (0, parts):
            raise OptionError(
                f"part {part} of {parts} of round {number}: round {self.number} is due"
                + (f", which has {self._count} parts." if self._count else ".")
            )
        self._count = parts
        self._parts.setdefault(part, push)
        if len(self._parts) < parts:
            return None
        complete = [self._parts[index] for index in range(parts)]
        self.number, self._parts, self._count = self.number + 1, {}, 0
        return complete
