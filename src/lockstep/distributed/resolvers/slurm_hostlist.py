"""Slurm's short way to write many hosts, ``n[1-3,07],login``, and many numbers, ``2(x3),1``."""

import re
from itertools import product
from math import prod

from lockstep._errors import ClusterError

__all__ = ["expand_counts", "expand_node_list"]

_NODE = re.compile(r"(?:[^\s,\[\]]|\[[^\s\[\]]+\])+")
_LIST = re.compile(rf"{_NODE.pattern}(?:,{_NODE.pattern})*")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
_MOST = 65536  # Slurm's own limit for a range


def expand_node_list(text: str) -> tuple[str, ...]:
    """The hosts of a node list, in its order: names with any number of ``[ranges]`` in them, separated by commas.

    A range is a number, or two with a hyphen between; its numbers are as wide as the first is written. Where a name has
    several ranges, the last one changes fastest, then the first, the second and so on: so ``scontrol show hostnames``
    does it, and the numbers of nodes follow it.

    Raises:
        ClusterError: it is no node list, or one of more than 65536 hosts.

    Example:
        >>> from lockstep.distributed.resolvers.slurm_hostlist import expand_node_list
        >>> expand_node_list("a[1-2,007],b,c[08-10]")
        ('a1', 'a2', 'a007', 'b', 'c08', 'c09', 'c10')
    """
    if not _LIST.fullmatch(text):
        raise ClusterError(f"expected a node list such as 'n[1-3,07],login', got {text!r}.")
    hosts: list[str] = []
    for node in _NODE.findall(text):
        pieces = re.findall(r"\[[^\]]+\]|[^\[]+", node)
        choices = [_numbers(piece[1:-1], text) if piece.startswith("[") else [piece] for piece in pieces]
        _refuse_excess(len(hosts) + prod(map(len, choices)), text)
        hosts += ["".join((*reversed(before), last)) for *before, last in product(*reversed(choices[:-1]), choices[-1])]
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """The numbers in ``2(x3),1``: 2, 2, 2, 1.

    Raises:
        ClusterError: it is something else.
    """
    matches = [_COUNT.fullmatch(piece) for piece in text.split(",")]
    found: list[int] = []
    for match in matches:
        if match is None:
            raise ClusterError(f"expected numbers such as '2(x3),1', got {text!r}.")
        repeated = int(match[2] or 1)
        _refuse_excess(len(found) + repeated, text)
        found += [int(match[1])] * repeated
    return tuple(found)


def _numbers(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for piece in ranges.split(","):
        match = _RANGE.fullmatch(piece)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or first > last:
            raise ClusterError(f"expected a range that rises, such as '1-3', got {piece!r} in the node list {text!r}.")
        _refuse_excess(len(found) + last - first + 1, text)
        found += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return found


def _refuse_excess(count: int, text: str) -> None:
    if count > _MOST:
        raise ClusterError(f"expected at most {_MOST} nodes, got {count} or more in {text!r}.")
