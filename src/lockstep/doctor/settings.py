"""The switch of the checks at ``fit``: a setting of the process, and an environment variable."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["VARIABLE", "doctor_enabled", "set_doctor"]

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

    Example:
        >>> import lockstep
        >>> lockstep.config.set_doctor(False)
        >>> lockstep.config.set_doctor(True)
    """
    _setting.enabled = bool(enabled)


def doctor_enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether calls of ``fit`` are checked."""
    return _setting.enabled and environ.get(VARIABLE) != "0"
