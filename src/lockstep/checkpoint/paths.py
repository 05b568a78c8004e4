"""The names in a run's folder: of checkpoints by their step, of what is not one yet or no longer, and of the run's status beside them.

A checkpoint is ``step-000000123``. Where a step is written again, the second is ``step-000000123-2``: it appears whole beside the
first, as no directory can be put in another's place at once; then the first goes. Times play no part.
"""

import re
from pathlib import Path

__all__ = ["REMOVED", "STATUS", "WRITTEN", "checkpoints_in", "free_name", "is_leftover", "step_of"]

WRITTEN, REMOVED = ".writing-", ".removing-"
STATUS = "status.json"

_NAME = re.compile(r"step-(\d{9,})(?:-([2-9]|[1-9]\d+))?", re.ASCII)


def step_of(name: str) -> int | None:
    """The step of a checkpoint of this name; None where it is the name of something else.

    Example:
        >>> step_of("step-000000123"), step_of("step-000000123-2"), step_of("model.keras")
        (123, 123, None)
    """
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def free_name(step: int, present: list[Path]) -> str:
    """A name for the next checkpoint of a step; readers prefer it to those that are there.

    Example:
        >>> free_name(123, []), free_name(123, [Path("step-000000123"), Path("step-000000123-2")])
        ('step-000000123', 'step-000000123-3')
    """
    times = [_order(path)[1] for path in present if step_of(path.name) == step]
    return f"step-{step:09}" + (f"-{max(times) + 1}" if times else "")


def checkpoints_in(directory: Path) -> list[Path]:
    """What is named as a checkpoint, the newest last; nothing where there is no directory yet."""
    try:
        return sorted((path for path in directory.iterdir() if step_of(path.name) is not None), key=_order)
    except FileNotFoundError:
        return []


def is_leftover(name: str) -> bool:
    """Whether a writer that was killed may have left it."""
    return any(name.startswith(mark) and step_of(name.removeprefix(mark)) is not None for mark in (WRITTEN, REMOVED))


def _order(path: Path) -> tuple[int, int]:
    found = _NAME.fullmatch(path.name)
    return (int(found[1]), int(found[2] or 1)) if found else (-1, 0)
