"""Reads the text of compiled programs: their collectives, and what they exchange with the host."""

import math
import re
from dataclasses import dataclass

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f8e4m3fn": 8, "f8e5m2": 8} | {
    f"{kind}{bits}": bits for kind in "sufc" for bits in (4, 8, 16, 32, 64, 128)
}
_SHAPE = re.compile(r"\b(" + "|".join(_BITS) + r")\[([0-9,]*)\]")
_NAMES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all|collective-broadcast"
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ({_NAMES})(-start)?\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> (.*) \{$")
_CHAIN = re.compile(r"\bchain_id=\"(\d+)\"")
# S(5) is the memory of the host, for TPUs.
_HOST = re.compile(r" (infeed|outfeed|send|recv|host-compute)\(|custom_call_target=\"([^\"]*callback[^\"]*)\"|(S\(5\))")
_ALIASES = re.compile(r"\binput_output_alias=\{((?:\s*\{[\d, ]*\}: \([^)]*\),?)*)")


@dataclass(frozen=True)
class Collective:
    """One collective of a program: its name, and the bytes of its result on a device."""

    name: str
    bytes: int


def collectives(text: str) -> list[Collective]:
    """Return the collectives of a compiled program.

    Of a start and a done instruction the start counts. On TPUs an all-reduce in a computation ``all-reduce-scatter`` is a
    reduce-scatter, and a collective that runs beside other work is in several computations, as one chain.
    """
    found, parts = [], set()
    computation = result = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation, result = header.groups()
        elif match := _INSTRUCTION.match(line):
            shapes, name, start = match.groups()
            if computation.startswith("all-reduce-scatter"):
                found.append(Collective("reduce-scatter", _result_bytes(result, is_started=False)))
                continue
            size = _result_bytes(shapes, is_started=bool(start) and name != "all-reduce")
            chain = _CHAIN.findall(line)
            if not chain or (name, *chain) not in parts:
                found.append(Collective(name, size))
            parts.add((name, *chain))
    return found


def host_instructions(text: str) -> list[str]:
    """Return what a compiled program exchanges with the host: the names of instructions, callbacks and memories."""
    return ["".join(found) for found in _HOST.findall(text)]


def donated(text: str) -> int:
    """Return the number of arguments whose memory the results of a compiled program reuse."""
    aliases = _ALIASES.search(text)
    return aliases[1].count("-alias)") if aliases else 0


def _result_bytes(shapes: str, is_started: bool) -> int:
    """Return the bytes of a result; that of a start instruction is (operands, results, …)."""
    if is_started:
        parts = _top_level(shapes)
        shapes = parts[1] if len(parts) > 1 else shapes
    return sum(
        _BITS[dtype] * math.prod(int(length) for length in lengths.split(",") if length) // 8
        for dtype, lengths in _SHAPE.findall(shapes)
    )


def _top_level(shapes: str) -> list[str]:
    """Divide ``(a, (b, c))`` at the commas that are in no inner parentheses, brackets or braces."""
    parts, depth = [""], 0
    for character in shapes.removeprefix("(").removesuffix(")"):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts
