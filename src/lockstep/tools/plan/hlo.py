"""Reads the text of compiled programs: their collectives and their memory traffic."""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f8e4m3fn": 8, "f8e5m2": 8} | {
    f"{kind}{bits}": bits for kind in "sufc" for bits in (4, 8, 16, 32, 64, 128)
}
_SHAPE = re.compile(r"\b(" + "|".join(_BITS) + r")\[([0-9,]*)\]")
_NAMES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all|collective-broadcast"
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ({_NAMES})(-start)?\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> (.*) \{$")
_CHAIN = re.compile(r"\bchain_id=\"(\d+)\"")
_LISTED_GROUP = re.compile(r"\breplica_groups=\{\{([\d,]+)\}")
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # numbers from 0, in an array of this shape, whose axes are permuted
_IOTA_GROUPS = re.compile(rf"\breplica_groups=\[\d+,(\d+)\]<={_IOTA}")
_MESH_GROUPS = re.compile(
    rf"\breplica_groups=mesh\[([^\]]*)\](?:, device_ids=\((?:{_IOTA}|([\d,]+))\))? \{{([^}}]*)\}}"
)
_MESH_AXIS = re.compile(r"'(\w+)'=(\d+)")
# With the size of what is before a part of an axis, and its own.
_GROUP_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_RESULT = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(")
_NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_WITH_LAYOUT = re.compile(_SHAPE.pattern + r"(\{[^}]*\})?")
_FREE = {"parameter", "bitcast", "tuple", "get-tuple-element", "constant"}  # instructions that move nothing
_MAY_UPDATE = {"dynamic-update-slice", "fusion", "bitcast", "tuple"}  # instructions that may update an array in place
_CALLS = {"while", "conditional", "call"}
_CALLED = re.compile(r"\b(?:body|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_FUSED = re.compile(r"\bcalls=(%?[\w.\-]+)")
_TRIPS = re.compile(r"\"known_trip_count\":\{\"n\":\"(\d+)\"")


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Args:
        name: such as "all-reduce".
        bytes: size of its result on a device.
        group: the first devices that exchange with each other, by their places in the program; of a collective-permute each sender
            and its receiver; None: all devices, or unknown.
        rounds: how often it runs, in loops whose length XLA knows.
    """

    name: str
    bytes: int
    group: tuple[int, ...] | None = None
    rounds: int = 1


def collectives(text: str) -> list[Collective]:
    """Return the collectives of a compiled program.

    Of a start and a done instruction the start counts. On TPUs an all-reduce in a computation ``all-reduce-scatter`` is a
    reduce-scatter, and a collective that runs beside other work is in several computations, as one chain.
    """
    found, parts, rounds = [], set(), _rounds_of_computations(text)
    computation = result = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation, result = header.groups()
        elif match := _INSTRUCTION.match(line):
            shapes, name, start = match.groups()
            if computation.startswith("all-reduce-scatter"):
                size = _result_bytes(result, is_started=False)
                found.append(Collective("reduce-scatter", size, _group(line), rounds[computation]))
                continue
            size = _result_bytes(shapes, is_started=bool(start) and name != "all-reduce")
            chain = _CHAIN.findall(line)
            if not chain or (name, *chain) not in parts:
                found.append(Collective(name, size, _group(line), rounds[computation]))
            parts.add((name, *chain))
    return found


def _group(line: str) -> tuple[int, ...] | None:
    """Return the first group: of ``{{0,1},{2,3}}``, ``[2,2]<=[2,2]T(1,0)`` or ``mesh['a'=2,'b'=2] {'a'}``; or the pairs of a permute."""
    if found := _PAIRS.search(line):
        return tuple(map(int, re.findall(r"\d+", found[1])))
    if found := _LISTED_GROUP.search(line):
        return tuple(_numbers(found[1]))
    if found := _IOTA_GROUPS.search(line):
        size, shape, order = found.groups()
        return tuple(_iota(shape, order)[: int(size)].tolist())
    if found := _MESH_GROUPS.search(line):
        sizes, shape, order, listed, axes = found.groups()
        lengths = {name: int(length) for name, length in _MESH_AXIS.findall(sizes)}
        whole = str(math.prod(lengths.values()))
        ids = np.array(_numbers(listed)) if listed else _iota(shape or whole, order)
        parts = {name: (int(before or 1), int(own or lengths[name])) for name, before, own in _GROUP_AXIS.findall(axes)}
        split = [(*parts.get(name, (1, 1)), length) for name, length in lengths.items()]
        mesh = ids.reshape([each for before, own, length in split for each in (before, own, length // (before * own))])
        return tuple(mesh[(0, slice(None), 0) * len(split)].ravel().tolist())
    return None


def _iota(shape: str, order: str | None) -> np.ndarray:
    """Return the numbers of ``[2,4]T(1,0)``, ``(devices,)``."""
    lengths = _numbers(shape)
    numbers = np.arange(math.prod(lengths)).reshape(lengths)
    return numbers.transpose(_numbers(order) if order else None).ravel()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def memory_traffic(text: str) -> int:
    """Return the bytes that a compiled program moves to and from the memory of a device, if each result is written and read once.

    What XLA keeps in a faster memory (``S(1)``) is not counted, nor the arguments. The body of a loop counts as often as it runs, if
    XLA knows that, and of a conditional the branch that moves most. Of an array that is updated in place the update counts.
    """
    bodies, entry = _computations(text)

    @functools.cache
    def traffic(name: str) -> int:
        return sum(moved(name, line) for line in bodies.get(name, ()))

    def moved(name: str, line: str) -> int:
        match = _RESULT.match(line)
        if match is None or match[2].endswith("-start"):  # What is started counts where it is done.
            return 0
        if match[2] in _CALLS:
            called = [traffic(name) for names in _CALLED.findall(line) for name in re.findall(r"[\w.\-]+", names)]
            return max(called, default=0) * _rounds(bodies, line)
        if match[2] in _FREE:
            return 0
        sizes, updates = _sizes(match), _updates(bodies, name, line)
        known = updates if len(updates) == len(sizes) else [None] * len(sizes)
        return 2 * sum(size if update is None else min(size, update) for size, update in zip(sizes, known, strict=True))

    return traffic(entry)


def _sizes(result: re.Match[str]) -> list[int]:
    """Return the bytes of each array of a result; 0 for one in a faster memory."""
    shapes = _WITH_LAYOUT.findall(result[1])
    return [0 if "S(" in layout else _bytes_of(dtype, lengths) for dtype, lengths, layout in shapes]


def _rounds(bodies: Mapping[str, Sequence[str]], line: str) -> int:
    """Return how often the body of a loop runs: as XLA says, or by a condition that compares a counter, from 0, with a constant; else 1."""
    if known := _TRIPS.search(line):
        return int(known[1])
    condition = re.search(r"\bcondition=%?([\w.\-]+)", line)
    text = "\n".join(bodies.get(condition[1], ())) if condition else ""
    limits = re.findall(r" constant\((\d+)\)", text)
    return int(limits[0]) if len(limits) == 1 and re.search(r"ROOT .* compare\(.*direction=LT", text) else 1


def _rounds_of_computations(text: str) -> Mapping[str, int]:
    """Return how often each computation of a program runs, as far as the lengths of loops are known; 1 for others."""
    bodies, entry = _computations(text)
    found: defaultdict[str, int] = defaultdict(lambda: 1)

    def visit(name: str, rounds: int) -> None:
        found[name] = max(found[name], rounds)
        for line in bodies[name]:
            match = _RESULT.match(line)
            own = rounds * _rounds(bodies, line) if match and match[2] == "while" else rounds
            for names in (*_CALLED.findall(line), *_FUSED.findall(line)):
                for called in re.findall(r"[\w.\-]+", names):
                    if called in bodies and found.get(called, 0) < own:
                        visit(called, own)

    if entry:
        visit(entry, 1)
    return found


def _updates(bodies: Mapping[str, Sequence[str]], name: str, line: str) -> list[int | None]:
    """Return the bytes of the update for each array of a result that is updated in place, None for others.

    Args:
        bodies: lines of each computation by its name.
        name: name of the computation with the instruction.
        line: line of the instruction.
    """
    match = _RESULT.match(line)
    if match is None or match[2] not in _MAY_UPDATE:
        return [None]
    if match[2] == "fusion":
        called = re.search(r"\bcalls=%?([\w.\-]+)", line)
        inner = called[1] if called else ""
        return _updates(bodies, inner, next((one for one in bodies.get(inner, ()) if "ROOT " in one), ""))
    operands = re.findall(r"%([\w.\-]+)", line[match.end() :].partition(")")[0])
    made = {found[1]: one for one in bodies[name] if (found := _NAME.match(one))}
    lines = [made.get(operand, "") for operand in operands]
    if match[2] == "dynamic-update-slice":
        update = _RESULT.match("".join(lines[1:2]))
        return [sum(_sizes(update)) if update else None]
    return [size for one in lines for size in _updates(bodies, name, one)]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of each computation of a program by its name, and the name of the first to run."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name = header[1]
            entry = name if line.startswith("ENTRY") else entry
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _result_bytes(shapes: str, is_started: bool) -> int:
    """Return the bytes of a result; that of a start instruction is (operands, results, …)."""
    if is_started:
        parts = _top_level(shapes)
        shapes = parts[1] if len(parts) > 1 else shapes
    return sum(_bytes_of(dtype, lengths) for dtype, lengths in _SHAPE.findall(shapes))


def _bytes_of(dtype: str, lengths: str) -> int:
    return _BITS[dtype] * math.prod(int(length) for length in lengths.split(",") if length) // 8


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
