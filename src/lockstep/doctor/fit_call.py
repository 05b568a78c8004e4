"""What the checks look at: a compiled model, what its ``fit`` is given, and where it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import currentframe
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from lockstep.data.fit_entry import InputOptions

__all__ = ["ROWS", "FitCall", "RuntimeSettings", "caller", "in_memory", "spread", "step_of"]

ROWS = 32  # of a batch of arrays, where nothing else is said: Keras's own
_PACKAGES = (*(str(Path(module.__file__ or "").parent) for module in (keras, jax)), str(Path(__file__).parents[1]))


@dataclass(frozen=True)
class RuntimeSettings:
    """Where a program runs.

    Args:
        replicas: their number.
        devices: of all processes.
        processes: that train in step.
        input_options: of the strategy.
        has_strategy: whether there is one, or this is plain Keras on one device.
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
        arguments: others of the call, by name.
        setting: where it runs.
        fit_at: ``file:line`` of the call, "" where that is not known.
        compiled_at: of ``compile``, likewise.
        numbers: of an array that are looked at, at most.
        rows_read: of a batch, where one was read.
    """

    model: keras.Model
    x: Any
    y: Any = None
    sample_weight: Any = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    setting: RuntimeSettings = field(default_factory=RuntimeSettings)
    fit_at: str = ""
    compiled_at: str = ""
    numbers: int = 1_000_000
    rows_read: int | None = None

    @property
    def rows(self) -> int | None:
        """Rows of a batch, where they are known without reading one, or one was read."""
        if self.rows_read is not None:
            return self.rows_read
        lengths = [len(leaf) for leaf in keras.tree.flatten(self.x) if in_memory(leaf) is not None and np.ndim(leaf)]
        return min(self.arguments.get("batch_size") or ROWS, lengths[0]) if lengths else None

    @property
    def is_read(self) -> bool:
        """Whether a batch is what an input gives, and not cut out of arrays."""
        return self.rows_read is not None

    @property
    def at_fit(self) -> str:
        """The call of fit, for messages."""
        return f"fit at {self.fit_at}" if self.fit_at else "fit"

    @property
    def at_compile(self) -> str:
        """The call of compile, for messages; that of fit where it is not known."""
        return f"compiled at {self.compiled_at}" if self.compiled_at else self.at_fit


def caller() -> str:
    """``file:line`` of the code of somebody else that this was called from; "" where there is none."""
    frame = currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*_PACKAGES, "<frozen")) and Path(path).name not in ("contextlib.py", "functools.py"):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def in_memory(leaf: Any) -> Any:
    """An array that lies in memory as a whole, or a table of pandas as one; None for anything else."""
    if isinstance(leaf, (np.ndarray, jax.Array)):
        return leaf
    return np.asarray(leaf) if type(leaf).__module__.partition(".")[0] == "pandas" else None


def spread(array: Any, numbers: int) -> tuple[np.ndarray, str]:
    """Rows of an array that have ``numbers`` numbers in all at most, evenly over its length; and which, in words.

    Example:
        >>> import numpy as np
        >>> found, said = spread(np.zeros((1000, 10)), 2000)
        >>> len(found), said
        (200, '200 of 1,000 rows, evenly spread')
    """
    every = step_of(array, numbers)
    found = np.asarray(array[::every])
    return found, f"all {len(array):,} rows" if every == 1 else f"{len(found):,} of {len(array):,} rows, evenly spread"


def step_of(array: Any, numbers: int) -> int:
    """From one row to the next that is looked at."""
    width = max(1, int(np.prod(np.shape(array)[1:])))
    return max(1, -(-len(array) * width // numbers))
