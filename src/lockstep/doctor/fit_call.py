"""The input of the checks: a compiled model, the arguments of its ``fit``, and the settings of the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import currentframe
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from lockstep.data.fit_entry import InputOptions

__all__ = [
    "ROWS",
    "FitCall",
    "RuntimeSettings",
    "array_in_memory",
    "calling_location",
    "sample_rows",
    "sampling_stride",
]

ROWS = 32  # Keras's default batch size
_PACKAGES = (*(str(Path(module.__file__ or "").parent) for module in (keras, jax)), str(Path(__file__).parents[1]))


@dataclass(frozen=True)
class RuntimeSettings:
    """Settings of the run.

    Args:
        replicas: number of replicas.
        devices: devices of all processes.
        processes: number of processes that train in step.
        input_options: of the strategy.
        has_strategy: False for plain Keras on one device.
    """

    replicas: int = 1
    devices: tuple[jax.Device, ...] = ()
    processes: int = 1
    input_options: InputOptions = field(default_factory=InputOptions)
    has_strategy: bool = True


@dataclass(frozen=True)
class FitCall:
    """A call of ``fit``.

    Args:
        model: compiled.
        x: as given.
        y: as given, or None.
        sample_weight: as given, or None.
        arguments: other arguments, by name.
        settings: of the run.
        fit_at: ``file:line`` of the call, "" if unknown.
        compiled_at: ``file:line`` of ``compile``, likewise.
        max_values: limit for the values of an array that are checked.
        rows_read: rows of the batch that was read; None if none was read.
    """

    model: keras.Model
    x: Any
    y: Any = None
    sample_weight: Any = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: RuntimeSettings = field(default_factory=RuntimeSettings)
    fit_at: str = ""
    compiled_at: str = ""
    max_values: int = 1_000_000
    rows_read: int | None = None

    @property
    def rows(self) -> int | None:
        """Rows of a batch; None if unknown before a batch is read."""
        if self.rows_read is not None:
            return self.rows_read
        lengths = [
            len(leaf) for leaf in keras.tree.flatten(self.x) if array_in_memory(leaf) is not None and np.ndim(leaf)
        ]
        return min(self.arguments.get("batch_size") or ROWS, lengths[0]) if lengths else None

    @property
    def is_read(self) -> bool:
        """Whether the data are a batch that was read from an input."""
        return self.rows_read is not None

    @property
    def at_fit(self) -> str:
        """Location of the call of fit, for messages."""
        return f"fit at {self.fit_at}" if self.fit_at else "fit"

    @property
    def at_compile(self) -> str:
        """Location of the call of compile, for messages; that of fit if unknown."""
        return f"compiled at {self.compiled_at}" if self.compiled_at else self.at_fit


def calling_location() -> str:
    """Return ``file:line`` of the innermost caller outside of Lockstep, Keras and JAX; "" if there is none."""
    frame = currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*_PACKAGES, "<frozen")) and Path(path).name not in ("contextlib.py", "functools.py"):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def array_in_memory(leaf: Any) -> Any:
    """Return an array in memory, also of a pandas table; None for any other input."""
    if isinstance(leaf, (np.ndarray, jax.Array)):
        return leaf
    return np.asarray(leaf) if type(leaf).__module__.partition(".")[0] == "pandas" else None


def sample_rows(array: Any, max_values: int) -> tuple[np.ndarray, str]:
    """Return evenly spread rows of an array with at most ``max_values`` values in all, and a text that says which.

    Example:
        >>> import numpy as np
        >>> found, which_rows = sample_rows(np.zeros((1000, 10)), 2000)
        >>> len(found), which_rows
        (200, '200 of 1,000 rows, evenly spread')
    """
    every = sampling_stride(array, max_values)
    found = np.asarray(array[::every])
    return (
        found,
        f"all {len(array):,} rows" if every == 1 else f"{len(found):,} of {len(array):,} rows, evenly spread",
    )


def sampling_stride(array: Any, max_values: int) -> int:
    """Return the distance between the rows that are checked."""
    width = max(1, int(np.prod(np.shape(array)[1:])))
    return max(1, -(-len(array) * width // max_values))
