"""What every figure says beside it: processor, cores, versions, date."""

import os
import platform
import re
import time
from importlib.metadata import version
from pathlib import Path

__all__ = ["describe_machine"]

_PROCESSORS = Path("/proc/cpuinfo")


def describe_machine() -> str:
    """One line, for example ``AMD EPYC, 2 cores; Python 3.11.7, jax 0.10.2, keras 3.15.1, keras-lockstep 0.1.0; …``."""
    names = re.findall(r"model name\s*: (.+)", _PROCESSORS.read_text()) if _PROCESSORS.exists() else []
    processor = names[0].strip() if names else platform.processor()
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "keras", "keras-lockstep"))
    python = platform.python_version()
    return f"{processor}, {os.cpu_count()} cores; Python {python}, {versions}; {time.strftime('%Y-%m-%d')}."
