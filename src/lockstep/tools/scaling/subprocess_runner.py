"""Run each setting in a fresh process: the parent starts and kills it, the child measures and writes JSON."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from lockstep._errors import LockstepError, OptionError
from lockstep.devices.cpu_devices import reserve_devices
from lockstep.launch.worker_process import die_with_parent
from lockstep.strategies.setup import override_devices
from lockstep.tools.run_until_fit import NoFitError
from lockstep.tools.scaling.benchmark import measure
from lockstep.tools.scaling.results import Budget, ScalingSetting, SettingFailure, SettingResult, from_json, to_json
from lockstep.tools.scaling.workload import Workload, run_workload

__all__ = ["main", "measure_all", "measure_in_child", "measure_workload"]

_KILL_SECONDS = 10.0

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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        request, result_file = folder / "request.json", folder / "result.json"
        content = {
            "setting": asdict(setting),
            "budget": asdict(budget),
            "workload": asdict(workload),
            "parent": os.getpid(),
        }
        request.write_text(json.dumps(content))
        with (folder / "output").open("wb") as output:
            code = _run([str(request), str(result_file)], budget.limit, environment, output.fileno())
        if code is None:
            return SettingFailure(
                setting, f"Not finished within {budget.limit:g} s. Fix: raise --limit, or train on fewer rows."
            )
        if code or not result_file.exists():
            return SettingFailure(setting, _describe_exit(code, (folder / "output").read_text(errors="replace")))
        return from_json(json.loads(result_file.read_text()))


def _run(files: list[str], limit: float, environment: Mapping[str, str], output: int) -> int | None:
    """Run the child and return its exit code; None if it reached the time limit."""
    command = [sys.executable, "-m", "lockstep.tools.scaling.subprocess_runner", *files]
    source = str(Path(__file__).parents[3])
    paths = environment.get("PYTHONPATH", "")
    variables = {"KERAS_BACKEND": "jax", **environment, "PYTHONPATH": os.pathsep.join(filter(None, [source, paths]))}
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables, start_new_session=True
    )
    try:
        return child.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # A driver or a disk may block it.
            child.wait(_KILL_SECONDS)


def _describe_exit(code: int, output: str) -> str:
    """Describe why a child ended without a result."""
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "no output")[:300]
    if code == -signal.SIGKILL:
        return "The process was killed (SIGKILL), usually because memory ran out."
    ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    return f"The process ended {ended}: {last}"


def main(arguments: Sequence[str]) -> None:
    """Measure the setting in the request file, and write the result: the entry point of the child.

    Args:
        arguments: paths of the request and of the result, two files of JSON.
    """
    request, result_file = map(Path, arguments)
    content = json.loads(request.read_text())
    die_with_parent(content["parent"])
    setting = ScalingSetting(**content["setting"])
    reserve_devices(max(1, setting.devices))
    result = measure_workload(Workload(**content["workload"]), setting, Budget(**content["budget"]))
    result_file.write_text(json.dumps(to_json(result)))


def measure_workload(workload: Workload, setting: ScalingSetting, budget: Budget) -> SettingResult | SettingFailure:
    """Measure a workload in one setting; an exception becomes a :class:`SettingFailure`."""
    import keras

    results: list[SettingResult] = []
    keras.utils.set_random_seed(0)  # Unless the program sets another seed.
    try:
        with override_devices(setting.devices):
            run_workload(workload, lambda first: results.append(measure(first, setting, budget)))
    except Exception as error:
        return SettingFailure(setting, reason_of(error), ends_all=isinstance(error, NoFitError))
    return results[0]


def reason_of(error: Exception) -> str:
    """Describe an error in one line."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or isinstance(error, MemoryError):
        return f"out of memory: {_first_line(text) or 'allocation failed'}"
    return text if isinstance(error, LockstepError) else f"{type(error).__name__}: {_first_line(text)}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]


if __name__ == "__main__":
    main(sys.argv[1:])
