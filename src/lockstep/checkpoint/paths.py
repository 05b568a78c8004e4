"""File names in a run's folder: checkpoints by their step, temporary directories, and the status file.

A checkpoint is ``step-000000123``. If a step is written again, the second is ``step-000000123-2``, because no directory can replace
another atomically: it appears beside the first, which is then removed. Modification times are not used.
"""

import re
from pathlib import Path

__all__ = ["REMOVED", "STATUS", "WRITTEN", "checkpoints_in", "free_name", "is_leftover", "step_of"]

WRITTEN, REMOVED = ".writing-", ".removing-"
STATUS = "status.json"

_NAME = re.compile(r"step-(\d{9,})(?:-([2-9]|[1-9]\d+))?", re.ASCII)


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint of this name; None if no checkpoint has such a name.

    Example:
        >>> step_of("step-000000123"), step_of("step-000000123-2"), step_of("model.keras")
        (123, 123, None)
    """
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def free_name(step: int, present: list[Path]) -> str:
    """Return a name for the next checkpoint of a step; readers prefer it to the present ones.

    Example:
        >>> free_name(123, []), free_name(123, [Path("step-000000123"), Path("step-000000123-2")])
        ('step-000000123', 'step-000000123-3')
    """
    times = [_order(path)[1] for path in present if step_of(path.name) == step]
    return f"step-{step:09}" + (f"-{max(times) + 1}" if times else "")


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the directories with names of checkpoints, the newest last; none if ``directory`` does not exist yet."""
    try:
        return sorted((path for path in directory.iterdir() if step_of(path.name) is not None), key=_order)
    except FileNotFoundError:
        return []


def is_leftover(name: str) -> bool:
    """Return whether a killed writer may have left a file of this name."""
    return any(name.startswith(mark) and step_of(name.removeprefix(mark)) is not None for mark in (WRITTEN, REMOVED))


def _order(path: Path) -> tuple[int, int]:
    found = _NAME.fullmatch(path.name)
    return (int(found[1]), int(found[2] or 1)) if found else (-1, 0)
