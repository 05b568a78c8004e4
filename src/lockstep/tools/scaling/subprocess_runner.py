"""Run each setting in a fresh process: the parent starts and kills it, the child measures and writes JSON."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from lockstep._errors import LockstepError, OptionError
from lockstep._keras.graph import cause_of
from lockstep.devices.cpu_devices import reserve_devices
from lockstep.strategies.setup import override_devices
from lockstep.tools.child_process import read_request, run_child
from lockstep.tools.run_until_fit import NoFitError
from lockstep.tools.scaling.benchmark import measure
from lockstep.tools.scaling.results import Budget, ScalingSetting, SettingFailure, SettingResult, from_json
from lockstep.tools.scaling.workload import Workload, run_workload

ProgressCallback = Callable[[ScalingSetting, "SettingResult | SettingFailure | None"], None]


def measure_all(
    workload: Workload,
    settings: Sequence[ScalingSetting],
    budget: Budget,
    environment: Mapping[str, str],
    report: ProgressCallback,
) -> list[SettingResult | SettingFailure]:
    """Measure settings one after the other.

    A fresh process for each setting sets the number of CPU devices before JAX starts, has its own memory, and may crash alone.

    Args:
        workload: the training to measure.
        settings: devices and batch of each.
        budget: how much each trains, and its time limit.
        environment: variables of this process.
        report: called before each setting with None, and after it with its result.

    Raises:
        OptionError: the script calls no ``fit``.
    """
    results: list[SettingResult | SettingFailure] = []
    fixed: set[int] = (
        set()
    )  # numbers of devices whose input has its own batches: another batch size would change nothing
    for setting in settings:
        if setting.devices not in fixed:
            report(setting, None)
            result = measure_in_child(workload, setting, budget, environment)
            report(setting, result)
            if isinstance(result, SettingFailure) and result.ends_all:
                raise OptionError(result.reason)
            results.append(result)
            if isinstance(result, SettingResult) and result.has_own_batches:
                fixed.add(setting.devices)
    return results


def measure_in_child(
    workload: Workload, setting: ScalingSetting, budget: Budget, environment: Mapping[str, str]
) -> SettingResult | SettingFailure:
    """Measure a setting in a child process, which is killed with its children at the time limit."""
    request = {"setting": asdict(setting), "budget": asdict(budget), "workload": asdict(workload)}
    found = run_child("lockstep.tools.scaling.subprocess_runner", request, budget.limit, environment)
    if found.failure:
        hint = " Fix: raise --limit, or train on fewer rows." if found.is_late else ""
        return SettingFailure(setting, found.failure + hint)
    return from_json(found.content)


def main(arguments: Sequence[str]) -> None:
    """Measure the setting in the request file, and write the result: the entry point of the child.

    Args:
        arguments: paths of the request and of the result, two files of JSON.
    """
    content, write = read_request(arguments)
    setting = ScalingSetting(**content["setting"])
    reserve_devices(max(1, setting.devices))
    write(asdict(measure_workload(Workload(**content["workload"]), setting, Budget(**content["budget"]))))


def measure_workload(workload: Workload, setting: ScalingSetting, budget: Budget) -> SettingResult | SettingFailure:
    """Measure a workload in one setting; an exception becomes a :class:`SettingFailure`."""
    import keras

    results: list[SettingResult] = []
    keras.utils.set_random_seed(0)  # Unless the program sets another seed.
    try:
        with override_devices(setting.devices):
            run_workload(workload, lambda first: results.append(measure(first, setting, budget)))
    except Exception as error:
        return SettingFailure(setting, _reason_of(error), ends_all=isinstance(error, NoFitError))
    return results[0]


def _reason_of(error: Exception) -> str:
    """Describe an error in one line."""
    if "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError):
        return f"out of memory: {cause_of(error)[:300]}"
    return str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {cause_of(error)[:300]}"


if __name__ == "__main__":
    main(sys.argv[1:])
