"""One examination of a program: all checks that cost something, what was looked at, and what could not be."""

from collections.abc import Mapping
from dataclasses import replace

from lockstep._errors import ModelError
from lockstep.data.fit_entry import InputFactory
from lockstep.distributed.control.failures import summary_of
from lockstep.doctor.checks import ABOUT_BATCHES, ABOUT_THE_CALL, ABOUT_THE_PROCESS, findings_of
from lockstep.doctor.finding import Finding, Report
from lockstep.doctor.fit_call import FitCall
from lockstep.doctor.fit_checks import of_batch
from lockstep.doctor.memory_check import about_memory, bytes_at_least, bytes_of_data
from lockstep.doctor.probe import ProbedBatches, about_input, measure, read_some, waiting_share
from lockstep.execution.train_functions import StepFunctions

__all__ = ["examine"]

_NUMBERS = 200_000_000  # of an array that are looked at: some seconds
_OPTIONS = ("batch_size", "shuffle", "class_weight", "steps_per_epoch")


def examine(program: FitCall, functions: StepFunctions, inputs: InputFactory, environ: Mapping[str, str]) -> Report:
    """Look at a program, and run some of its steps on a copy of its state.

    Args:
        program: with a compiled model.
        functions: of that model.
        inputs: make what its fit would read.
        environ: variables of the process.

    Raises:
        ModelError: the model is not compiled.
    """
    model = program.model
    if not model.compiled:
        raise ModelError(f"doctor: model {model.name!r} is not compiled; compile it first.")
    program = replace(program, numbers=_NUMBERS)
    data = program.x, program.y, program.sample_weight
    seen = read_some(inputs.open_preview(model, data, **{name: program.arguments.get(name) for name in _OPTIONS}))
    looked = program if program.rows is not None or not seen.batches else of_batch(program, seen.batches[0])
    found = findings_of(program, ABOUT_THE_CALL) + findings_of(looked, ABOUT_BATCHES)
    try:
        of_steps, lines, left_out = _steps(program, functions, seen)
    except Exception as error:
        if not found:
            raise
        of_steps, lines, left_out = (
            [],
            [],
            [f"training steps: the first one fails: {summary_of(error).splitlines()[0]}"],
        )
    found += of_steps + [finding for check in ABOUT_THE_PROCESS for finding in check(program, environ)]
    return Report(tuple(found), (*_looked_at(program, seen), *lines), tuple(left_out))


def _looked_at(program: FitCall, seen: ProbedBatches) -> list[str]:
    setting, model = program.setting, program.model
    where = f"replicas: {setting.replicas}, devices: {len(setting.devices)}, processes: {setting.processes}"
    rows = "its arrays" if program.rows is not None else f"{len(seen.batches)} batches of {seen.name}"
    return [
        f"model {model.name!r}, its loss and optimizer; {where}",
        f"{rows}, {bytes_of_data((program.x, program.y)) / 2**20:.1f} MiB in memory",
        "versions, settings of the process",
    ]


def _steps(
    program: FitCall, functions: StepFunctions, seen: ProbedBatches
) -> tuple[list[Finding], list[str], list[str]]:
    """Findings, what was looked at, and what was not."""
    if not seen.batches or not program.model.built:
        reason = (
            "the input has no batch" if not seen.batches else "the model has no weights yet: begin it with keras.Input"
        )
        return list(about_memory(program)), [], [f"steps, their memory and their wait for data: {reason}"]
    steps = measure(functions, seen)
    size = (seen.in_all or 0, bytes_of_data(seen.batches[0]))
    found = about_input(seen, steps, program.at_fit) + list(about_memory(program, steps.bytes, size))
    lines = []
    if seen.seconds is not None:
        lines.append(
            f"training steps on a copy of the state: {1000 * steps.seconds:.2f} ms each, {1000 * seen.seconds:.2f} ms "
            f"to read a batch; {100 * waiting_share(seen, steps):.0f} % of the time would be spent waiting for data"
        )
    memory = steps.bytes or bytes_at_least(program.model)
    what = "a step" if steps.bytes else "weights, gradients and optimizer (JAX does not say what a step needs)"
    lines.append(f"memory of {what}: {memory / 2**20:.1f} MiB on each device")
    return found, lines, []
