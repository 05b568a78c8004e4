"""Reads the text of compiled programs: their collectives, and what they exchange with the host."""

import math
import re
from dataclasses import dataclass

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f8e4m3fn": 8, "f8e5m2": 8} | {
    f"{kind}{bits}": bits for kind in "sufc" for bits in (4, 8, 16, 32, 64, 128)
}
_SHAPE = re.compile(r"\b(" + "|".join(_BITS) + r")\[([0-9,]*)\]")
_NAMES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all|collective-broadcast"
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ({_NAMES})(-start)?\(", re.MULTILINE)
HOST = re.compile(r" (infeed|outfeed|send|recv|host-compute)\(")


@dataclass(frozen=True)
class Collective:
    """One collective of a program: its name, and the bytes of its result on a device."""

    name: str
    bytes: int


def collectives(text: str) -> list[Collective]:
    """Return the collectives of a compiled program; of a start and a done instruction the start counts."""
    return [
        Collective(match[2], _result_bytes(match[1], is_started=bool(match[3]) and match[2] != "all-reduce"))
        for match in _INSTRUCTION.finditer(text)
    ]


def _result_bytes(shapes: str, is_started: bool) -> int:
    sizes = [
        _BITS[dtype] * math.prod(int(length) for length in lengths.split(",") if length) // 8
        for dtype, lengths in _SHAPE.findall(shapes)
    ]
    if is_started and len(sizes) > 1:  # the operands, then the results
        half = len(sizes) // 2
        return max(sum(sizes[:half]), sum(sizes[half:]))
    return sum(sizes)
