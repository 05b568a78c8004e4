"""Whether calls of ``fit`` are looked at: a setting of the process, and a variable of its environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["VARIABLE", "is_on", "set_doctor"]

VARIABLE = "LOCKSTEP_DOCTOR"  # "0" switches it off


@dataclass
class _DoctorSetting:
    enabled: bool = True


_setting = _DoctorSetting()  # of the process; only set_doctor changes it


def set_doctor(enabled: bool = True) -> None:
    """Have each ``fit`` of a strategy's model look at loss, labels and batch first, and say in a line what is wrong; it does so by default.

    ``LOCKSTEP_DOCTOR=0`` in the environment switches it off as well. ``docs/doctor.md`` lists what may be found.

    Args:
        enabled: False: nothing is looked at.

    Example:
        >>> import lockstep
        >>> lockstep.config.set_doctor(False)
        >>> lockstep.config.set_doctor(True)
    """
    _setting.enabled = bool(enabled)


def is_on(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether they are looked at."""
    return _setting.enabled and environ.get(VARIABLE) != "0"
