"""Compiles all batches of a training step for one target and one strategy, in this process or in a child of it."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep._errors import LockstepError
from lockstep.collectives.cost_model import NetworkLink
from lockstep.devices.cpu_devices import reserve_devices
from lockstep.doctor.checks import check_call
from lockstep.strategies.setup import override_devices
from lockstep.tools.child_process import read_request
from lockstep.tools.commands.doctor_command import fit_call_of
from lockstep.tools.plan.compiled_step import (
    CompiledStep,
    Memory,
    StepCompiler,
    TrainingCall,
    describe_failure,
    largest_batch,
    last_batch,
    survey,
)
from lockstep.tools.plan.hardware import Accelerator, Target, known_accelerators
from lockstep.tools.plan.measured import Check, check_steps
from lockstep.tools.run_until_fit import FirstFit
from lockstep.tools.scaling.workload import Workload, run_workload


@dataclass(frozen=True)
class TargetResult:
    """What was compiled for one target and one strategy.

    Args:
        target: its name.
        strategy: a name in ``STRATEGIES``.
        steps: in the order in which they were compiled.
        largest: the largest batch that fits, or 0, and the smallest that does not, or None; None: it was not searched.
        notes: sentences about the model.
        failure: why there are no more steps; "" if all were compiled.
    """

    target: str
    strategy: str
    steps: tuple[CompiledStep, ...] = ()
    largest: tuple[int, int | None] | None = None
    notes: tuple[str, ...] = ()
    failure: str = ""

    def step_of(self, rows: int | None) -> CompiledStep | None:
        """Return the step for a batch of so many rows; None: it was not compiled."""
        return next((step for step in self.steps if step.rows == rows), None)


def compile_target(
    call: TrainingCall,
    target: Target,
    strategy: str,
    batches: Sequence[int],
    *,
    is_search: bool,
    report: Callable[[TargetResult], None] = lambda result: None,
) -> TargetResult:
    """Compile the steps of one target and one strategy.

    Args:
        call: the call of ``fit``.
        target: the devices.
        strategy: a name in ``STRATEGIES``.
        batches: global batch sizes; the last batch of an epoch is compiled, too, if it has fewer rows.
        is_search: whether to search the largest batch that fits, and what grows with the rows.
        report: called with the result so far after each step.
    """
    result = TargetResult(target.name, strategy)
    try:
        compiler = StepCompiler(call, target, strategy)
    except LockstepError as error:
        return replace(result, failure=str(error))

    def compile_step(rows: int) -> CompiledStep:
        nonlocal result
        step = result.step_of(rows) or compiler.compile(rows)
        if step not in result.steps:
            result = replace(result, steps=(*result.steps, step), notes=tuple(compiler.notes))
            report(result)
        return step

    lasts = [rows for batch in batches if (rows := last_batch(call.rows, batch)) is not None]
    for rows in dict.fromkeys([*batches, *lasts]):
        step = compile_step(rows)
        if step.failure and rows == batches[0]:  # The other batches would fail as well.
            return replace(result, failure=step.failure)
    usable = target.accelerator.usable_memory
    if is_search and usable is not None:
        compile_step(target.count)  # One row a device: what does not grow with the rows.
        found = largest_batch(list(result.steps), compile_step, usable, target.count)
        result = replace(result, largest=found)
    return result


def main(arguments: Sequence[str]) -> None:
    """Survey the call of ``fit`` in the request, compile or measure its steps, and write the result: the entry point of the child.

    Args:
        arguments: paths of the request and of the result, two files of JSON.
    """
    request, write = read_request(arguments)
    target = target_from_json(request["target"]) if "target" in request else None
    reserve_devices(target.count if target and target.accelerator.platform == "cpu" else 1)

    def on_fit(first: FirstFit) -> None:
        if request["ask"] == "survey":
            write(_surveyed(first))
            return
        call = TrainingCall.of_fit(first.model, first.args, first.kwargs)
        batches = request["batches"] or [call.batch]
        if target is None:
            write({"checks": [asdict(check) for check in _checked(call, request)]})
            return
        options = {"is_search": request["is_search"], "report": lambda result: write(asdict(result))}
        write(asdict(compile_target(call, target, request["strategy"], batches, **options)))

    try:
        with override_devices(1, is_alone=True):
            run_workload(Workload(**request["workload"]), on_fit)
    except Exception as error:  # of the script, of any type
        write({"failure": describe_failure(error)})


def _surveyed(first: FirstFit) -> dict[str, Any]:
    """Return the findings of the doctor, and the survey or why there is none."""
    checked = fit_call_of(first)
    found = check_call(checked)
    try:
        call = TrainingCall.of_fit(first.model, first.args, first.kwargs)
        found = check_call(checked, call.first)
        answer: dict[str, Any] = {"survey": asdict(survey(call))}
    except Exception as error:  # A step fails: the doctor's findings may say why.
        answer = {"failure": f"fit of {first.where} fails: {describe_failure(error)}"}
    return {**answer, "findings": [finding.line for finding in found]}


def _checked(call: TrainingCall, request: dict[str, Any]) -> list[Check]:
    title, file = Path(request["workload"]["path"]).name, request["hardware_file"]
    between = NetworkLink(**request["between"])
    return check_steps(
        call, title, known_accelerators(file and Path(file)), request["strategies"], request["batches"], between
    )


def target_from_json(values: dict[str, Any]) -> Target:
    """Convert values of JSON to a target."""
    own = values["accelerator"]
    return Target(Accelerator(**{**own, "kinds": tuple(own["kinds"])}), tuple(values["axes"]))


def result_from_json(values: dict[str, Any]) -> TargetResult:
    """Convert values of JSON to a result."""
    steps = []
    for one in values["steps"]:
        memory = Memory(**one["memory"]) if one["memory"] else None
        steps.append(CompiledStep(**{**one, "memory": memory, "collectives": tuple(map(tuple, one["collectives"]))}))
    largest = tuple(values["largest"]) if values["largest"] else None
    return TargetResult(**{**values, "steps": tuple(steps), "notes": tuple(values["notes"]), "largest": largest})


if __name__ == "__main__":
    main(sys.argv[1:])
