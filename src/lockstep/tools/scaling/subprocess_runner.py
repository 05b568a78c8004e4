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

from lockstep._errors import LockstepError
from lockstep.devices.cpu_devices import reserve_devices
from lockstep.launch.reaper import die_with_parent
from lockstep.strategies.setup import override_devices
from lockstep.tools.scaling.benchmark import measure
from lockstep.tools.scaling.results import Budget, ScalingSetting, SettingFailure, SettingResult, from_json, to_json
from lockstep.tools.scaling.workload import Workload, run_program

__all__ = ["main", "measure_all", "measure_in_child", "measure_program"]

Told = Callable[[ScalingSetting, "SettingResult | SettingFailure | None"], None]


def measure_all(
    program: Workload, settings: Sequence[ScalingSetting], budget: Budget, environment: Mapping[str, str], tell: Told
) -> list[SettingResult | SettingFailure]:
    """Measure settings one after the other.

    Args:
        program: what is measured.
        settings: devices and batch of each.
        budget: how much each trains, and its limit.
        environment: variables of this process.
        tell: is called before each setting with None, and after it with what it gave.
    """
    found: list[SettingResult | SettingFailure] = []
    fixed: set[int] = set()  # numbers of devices for which another batch would be the same one
    for setting in settings:
        if setting.devices not in fixed:
            tell(setting, None)
            one = measure_in_child(program, setting, budget, environment)
            tell(setting, one)
            found.append(one)
            if isinstance(one, SettingResult) and one.has_own_batches:
                fixed.add(setting.devices)
    return found


def measure_in_child(
    program: Workload, setting: ScalingSetting, budget: Budget, environment: Mapping[str, str]
) -> SettingResult | SettingFailure:
    """What a setting gives in a process of its own, which is killed at the limit with all that it has started."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        request, answer = folder / "request.json", folder / "answer.json"
        asked = {
            "setting": asdict(setting),
            "budget": asdict(budget),
            "program": asdict(program),
            "parent": os.getpid(),
        }
        request.write_text(json.dumps(asked))
        with (folder / "output").open("wb") as output:
            code = _run([str(request), str(answer)], budget.limit, environment, output.fileno())
        if code is None:
            return SettingFailure(
                setting, f"Not done within {budget.limit:g} s. Raise --limit, or train on fewer rows."
            )
        if code or not answer.exists():
            return SettingFailure(setting, _end_of(code, (folder / "output").read_text(errors="replace")))
        return from_json(json.loads(answer.read_text()))


def _run(files: list[str], limit: float, environment: Mapping[str, str], output: int) -> int | None:
    """Exit code of the child; None where the limit came first."""
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
        child.wait()


def _end_of(code: int, output: str) -> str:
    """Why a process has ended without an answer."""
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "it said nothing")[:300]
    if code == -signal.SIGKILL:
        return "The process was killed (SIGKILL): out of memory, as a rule."
    ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    return f"The process ended {ended}: {last}"


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
        with override_devices(setting.devices):
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
