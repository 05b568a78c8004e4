"""The full check of a call of ``fit``: all checks, with some measured training steps; makes the doctor's report."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from lockstep._errors import ModelError
from lockstep.data.fit_entry import InputFactory
from lockstep.distributed.control.failures import summary_of
from lockstep.doctor.environment_checks import (
    bytes_of_data,
    check_allocator,
    check_cores,
    check_memory,
    check_thread_pool_size,
    check_versions,
    minimum_bytes,
)
from lockstep.doctor.finding import Finding, Report
from lockstep.doctor.fit_call import FitCall
from lockstep.doctor.fit_checks import BATCH_CHECKS, CALL_CHECKS, run_checks, with_batch
from lockstep.doctor.pipeline_checks import ProbedBatches, check_input_speed, measure_steps, read_batches, waiting_share
from lockstep.execution.train_functions import StepFunctions

__all__ = ["examine"]

# Not at each fit, as strategies refuse the worst settings when they are made. These checks also read the environment.
PROCESS_CHECKS: tuple[Callable[[FitCall, Mapping[str, str]], Iterable[Finding]], ...] = (
    check_versions,  # First, as other findings may follow from it.
    check_thread_pool_size,  # The process would hang.
    check_allocator,
    check_cores,
)
_MAX_VALUES = 200_000_000  # of an array that are checked: some seconds
_OPTIONS = ("batch_size", "shuffle", "class_weight", "steps_per_epoch")


def examine(call: FitCall, functions: StepFunctions, inputs: InputFactory, environ: Mapping[str, str]) -> Report:
    """Check a call of ``fit``, and run some training steps on a copy of the model's state.

    Args:
        call: with a compiled model.
        functions: step functions of the model.
        inputs: makes the input of ``fit``.
        environ: environment variables of the process.

    Raises:
        ModelError: the model is not compiled.
    """
    model = call.model
    if not model.compiled:
        raise ModelError(f"doctor: model {model.name!r} is not compiled. Fix: compile it first.")
    call = replace(call, max_values=_MAX_VALUES)
    data = call.x, call.y, call.sample_weight
    batches = read_batches(inputs.open_preview(model, data, **{name: call.arguments.get(name) for name in _OPTIONS}))
    checked = call if call.rows is not None or not batches.batches else with_batch(call, batches.batches[0])
    found = run_checks(call, CALL_CHECKS) + run_checks(checked, BATCH_CHECKS)
    try:
        of_steps, lines, left_out = _check_steps(call, functions, batches)
    except Exception as error:
        if not found:
            raise
        of_steps, lines, left_out = (
            [],
            [],
            [f"training steps: the first one fails: {summary_of(error).splitlines()[0]}"],
        )
    found += of_steps + [finding for check in PROCESS_CHECKS for finding in check(call, environ)]
    return Report(tuple(found), (*_describe_checked(call, batches), *lines), tuple(left_out))


def _describe_checked(call: FitCall, batches: ProbedBatches) -> list[str]:
    settings, model = call.settings, call.model
    where = f"replicas: {settings.replicas}, devices: {len(settings.devices)}, processes: {settings.processes}"
    rows = "its arrays" if call.rows is not None else f"{len(batches.batches)} batches of {batches.name}"
    return [
        f"model {model.name!r}, its loss and optimizer; {where}",
        f"{rows}, {bytes_of_data((call.x, call.y)) / 2**20:.1f} MiB in memory",
        "versions, settings of the process",
    ]


def _check_steps(
    call: FitCall, functions: StepFunctions, batches: ProbedBatches
) -> tuple[list[Finding], list[str], list[str]]:
    """Return findings of training steps, what was checked, and what was left out."""
    if not batches.batches or not call.model.built:
        reason = (
            "the input has no batch"
            if not batches.batches
            else "the model has no weights yet: begin it with keras.Input"
        )
        return list(check_memory(call)), [], [f"steps, their memory and their wait for data: {reason}"]
    steps = measure_steps(functions, batches)
    size = (batches.batches_per_pass or 0, bytes_of_data(batches.batches[0]))
    found = check_input_speed(batches, steps, call.at_fit) + list(check_memory(call, steps.bytes, size))
    lines = []
    if batches.seconds is not None:
        lines.append(
            f"training steps on a copy of the state: {1000 * steps.seconds:.2f} ms each, {1000 * batches.seconds:.2f} ms "
            f"to read a batch; {100 * waiting_share(batches, steps):.0f} % of the time would be spent waiting for data"
        )
    memory = steps.bytes or minimum_bytes(call.model)
    what = "a step" if steps.bytes else "weights, gradients and optimizer (JAX does not say what a step needs)"
    lines.append(f"memory of {what}: {memory / 2**20:.1f} MiB on each device")
    return found, lines, []
