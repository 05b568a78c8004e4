"""Which of the numbers 0, 1, 2, … are done: all below one, and some above."""

__all__ = ["CompletedIds"]


class CompletedIds:
    """A set of whole numbers that is small while they come nearly in order.

    Args:
        below: all smaller numbers are done from the beginning.

    Attributes:
        below: all smaller numbers are done, this one is not.

    Example:
        >>> done = CompletedIds()
        >>> done.add(0), done.add(2), done.add(2), done.below, 2 in done
        (True, True, False, 1, True)
        >>> done.add(1), done.below
        (True, 3)
        >>> done.raise_to(7), done.below, done.add(6)
        (None, 7, False)
    """

    def __init__(self, below: int = 0) -> None:
        self.below = below
        self._above: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self._above

    def __len__(self) -> int:
        return self.below + len(self._above)

    def raise_to(self, below: int) -> None:
        """All smaller numbers are done, also those that were never added."""
        if below > self.below:
            self.below = below
            self._above = {number for number in self._above if number >= below}
            self._close_up()

    def add(self, number: int) -> bool:
        """One more is done; False where it was already."""
        if number in self:
            return False
        self._above.add(number)
        self._close_up()
        return True

    def _close_up(self) -> None:
        while self.below in self._above:
            self._above.remove(self.below)
            self.below += 1
