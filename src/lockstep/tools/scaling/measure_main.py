"""The process that measures one setting: ``python -m lockstep.tools.scaling.measure_main REQUEST ANSWER``, two files of JSON."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep._errors import LockstepError
from lockstep.devices.cpu_devices import reserve_devices
from lockstep.launch.process_tree import die_with_parent
from lockstep.strategies.device_override import devices_imposed
from lockstep.tools.scaling.benchmark import measure
from lockstep.tools.scaling.results import Budget, ScalingSetting, SettingFailure, SettingResult, to_json
from lockstep.tools.scaling.workload import Workload, run_program

__all__ = ["main", "measure_program"]


def main(arguments: Sequence[str]) -> None:
    """Measure what the first file asks for, and write what came out into the second."""
    request, answer = map(Path, arguments)
    asked = json.loads(request.read_text())
    die_with_parent(asked["parent"])
    setting = ScalingSetting(**asked["setting"])
    reserve_devices(max(1, setting.devices))
    found = measure_program(Workload(**asked["program"]), setting, Budget(**asked["budget"]))
    answer.write_text(json.dumps(to_json(found)))


def measure_program(program: Workload, setting: ScalingSetting, budget: Budget) -> SettingResult | SettingFailure:
    """What a program gives in one setting; what goes wrong in it is an answer, too."""
    import keras

    found: list[SettingResult] = []
    keras.utils.set_random_seed(0)  # All settings begin alike, unless the program says otherwise.
    try:
        with devices_imposed(setting.devices):
            run_program(program, lambda first: found.append(measure(first, setting, budget)))
    except Exception as error:
        return SettingFailure(setting, reason_of(error))
    return found[0]


def reason_of(error: Exception) -> str:
    """One line about an error."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or isinstance(error, MemoryError):
        return f"out of memory: {_first_line(text) or 'no more could be had'}"
    return text if isinstance(error, LockstepError) else f"{type(error).__name__}: {_first_line(text)}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]


if __name__ == "__main__":
    main(sys.argv[1:])
