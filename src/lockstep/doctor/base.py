"""What all checks share: a finding, the call of ``fit`` that is checked, and the switch of the checks."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from inspect import currentframe
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from lockstep._errors import flag
from lockstep._keras import trainer
from lockstep._logging import counted
from lockstep.data.input_options import InputOptions
from lockstep.execution.variable_layout import ModelLayout

VARIABLE = "LOCKSTEP_DOCTOR"  # "0" switches it off


@dataclass
class _DoctorSetting:
    enabled: bool = True


_setting = _DoctorSetting()  # of the process; only set_doctor changes it


def set_doctor(enabled: bool = True) -> None:
    """Switch the checks at ``fit`` on or off. By default each ``fit`` of a strategy's model checks loss, labels and batch, and logs findings.

    ``LOCKSTEP_DOCTOR=0`` in the environment switches them off as well. ``docs/doctor.md`` lists all findings.

    Args:
        enabled: False: no checks.

    Raises:
        OptionError: it is not a bool.

    Example:
        >>> import lockstep
        >>> lockstep.config.set_doctor(False)
        >>> lockstep.config.set_doctor(True)
    """
    _setting.enabled = flag("enabled", enabled)


def doctor_enabled() -> bool:
    """Whether calls of ``fit`` are checked."""
    return _setting.enabled and os.environ.get(VARIABLE) != "0"


@dataclass(frozen=True)
class Finding:
    """A mistake in a program, or something that makes it slow.

    Args:
        name: short and stable, for example ``softmax-from-logits``.
        what: the observation.
        where: layer, variable, argument or file.
        why: why it matters.
        fix: the remedy.

    Example:
        >>> from lockstep.doctor.base import Finding
        >>> print(Finding("small-batch", "a batch of 2 rows on 3 replicas", "fit", "one is idle", "Use 3 or more").line)
        small-batch: a batch of 2 rows on 3 replicas (fit): one is idle. Use 3 or more
    """

    name: str
    what: str
    where: str
    why: str
    fix: str

    @property
    def line(self) -> str:
        """The finding in one line, without a full stop."""
        return f"{self.name}: {self.what} ({self.where}): {self.why}. {self.fix}"

    def __str__(self) -> str:
        return f"{self.name}: {self.what}\n  where  {self.where}\n  why    {self.why}\n  fix    {self.fix}"


@dataclass(frozen=True)
class Report:
    """The findings of all checks.

    Args:
        findings: in the order of the checks.
        looked_at: what was checked, one line each.
        left_out: what could not be checked, and why.

    Example:
        >>> from lockstep.doctor.base import Report
        >>> print(Report((), ("the loss",)))
        no findings
        checked:
          the loss
    """

    findings: tuple[Finding, ...]
    looked_at: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values.

        Returns:
            ``findings``, ``looked_at`` and ``left_out``.
        """
        found = [asdict(finding) for finding in self.findings]
        return {"findings": found, "looked_at": list(self.looked_at), "left_out": list(self.left_out)}

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __str__(self) -> str:
        count = len(self.findings)
        head = "no findings" if not count else counted(count, "finding")
        blocks = [head, *(f"\n{finding}" for finding in self.findings)]
        blocks += [("\n" if count else "") + "checked:", *(f"  {line}" for line in self.looked_at)]
        blocks += ["left out:", *(f"  {line}" for line in self.left_out)] if self.left_out else []
        return "\n".join(blocks)


_PACKAGES = (*(str(Path(module.__file__ or "").parent) for module in (keras, jax)), str(Path(__file__).parents[1]))
_BETWEEN = ("contextlib.py", "functools.py")


@dataclass(frozen=True)
class RuntimeSettings:
    """Settings of the run.

    Args:
        replicas: number of replicas.
        devices: devices of all processes.
        processes: number of processes that train in step.
        input_options: input options of the strategy.
        has_strategy: False for plain Keras on one device.
        layout: returns where the variables of a model lie, None if that is not known yet; None: all of them on each device.
    """

    replicas: int = 1
    devices: tuple[jax.Device, ...] = ()
    processes: int = 1
    input_options: InputOptions = field(default_factory=InputOptions)
    has_strategy: bool = True
    layout: Callable[[keras.Model], ModelLayout | None] | None = None


@dataclass(frozen=True)
class FitCall:
    """A call of ``fit``.

    Args:
        model: compiled.
        x: as given.
        y: as given, or None.
        sample_weight: as given, or None.
        arguments: other arguments, by name.
        settings: settings of the run.
        fit_at: ``file:line`` of the call, "" if unknown.
        compiled_at: ``file:line`` of ``compile``, likewise.
        max_values: limit for the values of an array that are checked.
        rows_read: rows of the batch that was read; None if none was read.
        is_only_batch: whether that batch is all data.
        is_validation: whether the data are those of ``validation_data``.
        may_build: whether the checks may build a model that has no weights yet, as nothing trains it afterwards.
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
    is_only_batch: bool = False
    is_validation: bool = False
    may_build: bool = False

    @property
    def rows(self) -> int | None:
        """Rows of a batch; None if unknown before a batch is read."""
        if self.rows_read is not None:
            return self.rows_read
        return None if self._rows_in_all is None else min(self.batch_size, self._rows_in_all)

    @property
    def _rows_in_all(self) -> int | None:
        leaves = keras.tree.flatten(self.x)
        return next((len(leaf) for leaf in leaves if array_in_memory(leaf) is not None and np.ndim(leaf)), None)

    @property
    def batch_size(self) -> int:
        """Rows of a batch of arrays, as Keras determines it from the arguments."""
        given, steps, rows = self.arguments.get("batch_size"), self.arguments.get("steps_per_epoch"), self._rows_in_all
        return -(-rows // steps) if given is None and steps and rows else given or trainer.DEFAULT_BATCH_SIZE

    @property
    def at_fit(self) -> str:
        """Location of the call of fit, for messages."""
        fit = f"fit at {self.fit_at}" if self.fit_at else "fit"
        return f"validation_data of {fit}" if self.is_validation else fit

    @property
    def at_compile(self) -> str:
        """Location of the call of compile, for messages; that of fit if unknown."""
        return f"compiled at {self.compiled_at}" if self.compiled_at else self.at_fit


def calling_location() -> str:
    """Return ``file:line`` of the innermost caller outside of Lockstep, Keras and JAX; "" if there is none."""
    frame = currentframe()
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_user_code(path: str) -> bool:
    """Return whether a source file is outside of Lockstep, Keras, JAX and what calls them."""
    return not path.startswith((*_PACKAGES, "<frozen")) and Path(path).name not in _BETWEEN


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
    which = f"all {len(array):,} rows" if every == 1 else f"{len(found):,} of {len(array):,} rows, evenly spread"
    return found, which


def sampling_stride(array: Any, max_values: int) -> int:
    """Return the distance between the rows that are checked."""
    width = max(1, int(np.prod(np.shape(array)[1:])))
    return max(1, -(-len(array) * width // max_values))
