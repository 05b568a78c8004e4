"""``lockstep top``: show the state of the workers of a job, from the status file that its chief writes."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lockstep._atomic_files import read_file
from lockstep._errors import OptionError, seconds
from lockstep._logging import counted
from lockstep.checkpoint.serialization import STATUS, checkpoints_in, step_of

_MAX_STATUS_BYTES = 1 << 24
_SHORTEST = 0.1  # seconds between two updates
STALE = 10.0  # seconds without a new status after which the chief counts as dead
_NOTABLE = 0.05  # share of the time; a worker that waits less for its data is not reported as slow

_COLUMNS = ("worker", "host", "pid", "step", "does", "for", "waits for data", "reads data")


def watch(directory: str, interval: float, console: Console, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show the state every ``interval`` seconds, until Ctrl-C.

    Raises:
        OptionError: there is no status file, or the interval is out of its range.
    """
    if seconds("--interval", interval, above=None) < _SHORTEST:
        raise OptionError(
            f"--interval: expected {_SHORTEST} seconds or more, got {interval:g}. Fix: give at least {_SHORTEST}."
        )
    with Live(picture(directory), console=console, auto_refresh=False) as live:
        try:
            while True:
                sleep(interval)
                live.update(picture(directory), refresh=True)
        except KeyboardInterrupt:
            return


def picture(directory: str | Path, now: Callable[[], float] = time.time) -> RenderableType:
    """Render the state of a run.

    Raises:
        OptionError: there is no status file, or it cannot be read.
    """
    status, path = _read(Path(directory)), Path(directory)
    try:
        lines = [_state(status, now()), _progress(status), *_checkpoint(path, now())]
        rows = status["workers"]
        slow = slowest(rows)
        if slow is not None:
            lines.append(f"slowest: {_describe_slowest(rows, slow)}")
        return Group(*(Text(line) for line in lines), _table(rows, slow, status["state"] == "ended"))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _unreadable(path, repr(error)) from error


def slowest(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of the worker whose input delays the steps; None if there is none, or only one worker.

    If workers compare their batches, all wait for the one that reads: among those that wait, it is the one that reads longest.

    Example:
        >>> slowest([{"worker": 0, "waited": 0.6, "read": 0.1}, {"worker": 1, "waited": 0.6, "read": 0.9}])
        1
    """
    waiting = [row for row in rows if row.get("waited", 0.0) >= _NOTABLE]
    if len(rows) < 2 or not waiting:
        return None
    return max(waiting, key=lambda row: row.get("read", 0.0))["worker"]


def _read(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_file(directory / STATUS, _MAX_STATUS_BYTES))
    except FileNotFoundError:
        raise OptionError(
            f"{directory}: no {STATUS} found. Fix: give the folder of a lockstep.callbacks.BackupAndRestore or TensorBoard among the "
            "callbacks of fit."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(directory, str(error)) from error
    if not isinstance(found, dict) or found.get("version") != 1:
        raise _unreadable(directory, "its version is not 1")
    return found


def _unreadable(directory: Path, why: str) -> OptionError:
    return OptionError(
        f"{directory / STATUS}: not a readable status of a run: {why}. Fix: give the folder of a run, and use the version of Lockstep "
        "that wrote it."
    )


def _state(status: Mapping[str, Any], now: float) -> str:
    age = now - status["time"]
    if status["state"] != "running":
        reason = f": {status['reason']}" if status["reason"] else ""
        return f"{status['state']} {_ago(age)}{reason}"
    lasts = f"for {_format_duration(status['time'] - status['begun'])}"
    return f"running {lasts}" if age < STALE else f"no status update for {_format_duration(age)}; it ran {lasts}"


def _progress(status: Mapping[str, Any]) -> str:
    of_steps = f" of {status['steps']:,}" if status["steps"] else ""
    text = f"epoch {status['epoch']} of {status['epochs']}, step {status['step']:,}{of_steps} ({status['steps_in_all']:,} in all)"
    if status["rows_per_second"] is not None:
        text += f"; {status['rows_per_second']:,.0f} rows/s, {status['seconds_per_step']:.3g} s a step"
    return f"{text}; {counted(len(status['workers']), 'worker')}, {counted(status['devices'], 'device')}"


def _checkpoint(directory: Path, now: float) -> list[str]:
    try:
        newest = checkpoints_in(directory)[-1]
        return [f"last checkpoint: step {step_of(newest.name):,}, {_ago(now - newest.stat().st_mtime)}"]
    except (IndexError, FileNotFoundError):
        return []


def _describe_slowest(rows: Sequence[Mapping[str, Any]], slow: int) -> str:
    row = next(row for row in rows if row["worker"] == slow)
    return (
        f"worker {slow} ({row['host']}, process {row['pid']}), which reads its data for {row.get('read', 0):.0%} of the time; "
        f"{row['waited']:.0%} of the time no step could run for lack of them"
    )


def _table(rows: Sequence[Mapping[str, Any]], slow: int | None, has_ended: bool) -> Table:
    """Return a row for each worker; after the end without what the last heartbeats said of its step, which is older."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("host", "does") else "right", no_wrap=True)
    for row in rows:
        silent = f"silent for {_format_duration(row['silent'])}" if row["silent"] > 3 else row["phase"]
        step, does, lasts = f"{row['step']:,}", "has left" if row["left"] else silent, _format_duration(row["seconds"])
        if has_ended:
            step, does, lasts = "-", "has ended", "-"
        portions = (f"{row[name]:.0%}" if name in row else "-" for name in ("waited", "read"))
        cells = (row["worker"], row["host"], row["pid"], step, does, lasts, *portions)
        table.add_row(*map(str, cells), style="yellow" if row["worker"] == slow else None)
    return table


def _ago(seconds: float) -> str:
    return f"{_format_duration(seconds)} ago"


def _format_duration(seconds: float) -> str:
    """Format a duration.

    Example:
        >>> _format_duration(7.4), _format_duration(400), _format_duration(90000)
        ('7 s', '6 min 40 s', '25 h 0 min')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole // 60 % 60} min"
