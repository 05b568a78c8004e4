"""The wait before a start: who begins when, and when it is in vain. Arithmetic only; times are of the caller's clock."""

from collections.abc import Collection, Mapping, Sequence

from lockstep.distributed.control.wait_logger import listed
from lockstep.launch.rendezvous.node_messages import JobSpec, NodeInfo

__all__ = ["QuorumWait", "in_order"]


class QuorumWait:
    """One wait.

    Args:
        terms: how many nodes are needed, and how long to wait.
        opened: when it began.
        not_before: when a start is allowed.
    """

    def __init__(self, terms: JobSpec, opened: float, not_before: float) -> None:
        self._terms = terms
        self._opened, self._not_before = opened, not_before
        self._enough_since: float | None = None

    def may_begin(self, here: int, now: float) -> bool:
        """Whether ``here`` nodes start now."""
        if here < self._terms.least:
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        has_waited = now >= self._enough_since + self._terms.join_seconds
        return now >= self._not_before and (here >= self._terms.most or has_waited)

    def is_in_vain(self, here: int, now: float) -> bool:
        """Whether the limit of the wait has passed and there are too few."""
        return here < self._terms.least and now >= self._opened + self._terms.start_seconds

    def missing(self, nodes: Collection[NodeInfo]) -> str:
        """Whom this waits for."""
        terms = self._terms
        more = (terms.least if len(nodes) < terms.least else terms.most) - len(nodes)
        names = _absent(terms, nodes)
        which = f" of {listed(names)}" if names and len(names) > more else f", {listed(names)}" if names else ""
        number = f"{more} more node{'s' if more != 1 else ''}"
        return f"{number}{which} ({len(nodes)} of {terms.nodes} here)"

    def complaint(self, nodes: Collection[NodeInfo], gone: Mapping[str, str]) -> str:
        """That too few have come: who is here, who is not, and who was here once."""
        terms, absent = self._terms, _absent(self._terms, nodes)
        here = listed([node.process for node in nodes])
        lost = "".join(f" {name}: {why}." for name, why in gone.items())
        return (
            f"{len(nodes)} of at least {terms.least} nodes came within {terms.start_seconds:g} s ({here})"
            f"{f'; {listed(absent)} did not' if absent else ''}.{lost} Start the same command on each, and see that they can reach "
            f"{terms.coordinator}"
        )


def _absent(terms: JobSpec, nodes: Collection[NodeInfo]) -> list[str]:
    """Hosts that have not come, where it is known which there are."""
    ranks = {node.rank for node in nodes}
    return [host for rank, host in enumerate(terms.hosts) if rank not in ranks]


def in_order(nodes: Mapping[int, NodeInfo], most: int) -> Sequence[int]:
    """The keys of those that take part, in the order of their ranks: the host first, then as they say, then as they came.

    Example:
        >>> a, b, c = (NodeInfo("a", None, 1, "a", 1, True), NodeInfo("b", None, 1, "b", 1), NodeInfo("c", 1, 1, "c", 1))
        >>> in_order({5: b, 6: c, 7: a}, 3), in_order({5: b, 6: c, 7: a}, 2)
        ([7, 6, 5], [7, 6])
    """

    def order(key: int) -> tuple[bool, float, int]:
        rank = nodes[key].rank
        return not nodes[key].is_host, float("inf") if rank is None else rank, key

    return sorted(nodes, key=order)[:most]
