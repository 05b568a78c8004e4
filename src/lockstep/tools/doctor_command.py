"""``lockstep doctor``: run a script up to its first ``fit``, and examine that call without training."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from weakref import WeakKeyDictionary

import jax
import keras

from lockstep._errors import LockstepError
from lockstep._keras import trainer
from lockstep._keras.patches import OBSERVE_COMPILE
from lockstep.cluster_resolver import RESOLVERS, resolve
from lockstep.collectives import AutoAllReduce
from lockstep.data.fit_wrapper import FitWrapper
from lockstep.data.input_options import InputOptions
from lockstep.data.process_group import ProcessGroup
from lockstep.devices.placement import placement_on
from lockstep.distributed.cluster.env_reader import NetworkOptions
from lockstep.doctor.base import FitCall, Report, RuntimeSettings, calling_location, doctor_enabled, set_doctor
from lockstep.doctor.check_lists import examine
from lockstep.doctor.environment_checks import check_network, peers_of
from lockstep.execution.executors import SpmdExecutor
from lockstep.execution.step_functions import StepFunctions
from lockstep.strategies.self_check import Diagnostics, examine_fit
from lockstep.tools.script_runner import FirstFit, run_until_fit


def look_at_cluster(environ: Mapping[str, str]) -> tuple[Report, tuple[str, ...]]:
    """Check that the processes of the cluster, if there is one, are reachable; also return the variables that name it.

    Raises:
        ClusterError: the variables contradict each other.
    """
    resolver = resolve(environ)
    if resolver is None:
        return Report(()), ()
    peers = peers_of(resolver.membership)
    variables = tuple(name for kind in RESOLVERS for name in kind.variables if name in environ)
    looked_at = (
        f"the cluster of {resolver.membership.source}: {', '.join(f'{peer.name} at {peer.address}' for peer in peers)}"
    )
    findings = tuple(check_network(peers, NetworkOptions.of(environ)))
    return Report(findings, (f"{looked_at}; the script ran as a single process",)), variables


Tell = Callable[[Callable[[], Report]], int]  # prints what the function returns or raises, and returns the exit code


def tell_report(run: Callable[[], Report], command: str, failure: str, show: Callable[[Report], None]) -> int:
    """Show the report that ``run`` returns, or why there is none: an error of Lockstep, or ``failure``; return the exit code."""
    try:
        report = run()
    except Exception as error:
        if not isinstance(error, LockstepError):
            traceback.print_exc()
        sys.stderr.write(f"{command}: {error if isinstance(error, LockstepError) else failure}\n")
        return 2
    show(report)
    return 1 if report.findings else 0


def examine_script(
    path: str, arguments: Sequence[str], tell: Tell, network: Report | None = None, is_quiet: bool = False
) -> Report:
    """Run a script up to its first fit, examine that call, and end the script.

    Args:
        path: path of the script.
        arguments: arguments of the script.
        tell: called if the script catches its end and calls fit again; the process then ends.
        network: report about the cluster, which is added.
        is_quiet: whether the standard output of the script goes to standard error.

    Raises:
        OptionError: the file does not exist, or the script calls no fit.
    """
    compiled_at: WeakKeyDictionary[keras.Model, str] = WeakKeyDictionary()
    reports = []

    def on_compile(model: keras.Model) -> None:
        compiled_at[model] = calling_location()

    def on_fit(first: FirstFit) -> None:
        reports.append(_examine_call(fit_call_of(first, compiled_at.get(first.model, ""))))

    def result(error: Exception | None = None) -> Report:
        if error is not None:
            raise error
        return _joined(reports[0], network or Report(()))

    with contextlib.ExitStack() as changes:

        def finish(error: Exception | None) -> int:
            changes.close()
            return tell(lambda: result(error))

        _prepare(changes, on_compile, is_quiet)
        run_until_fit(path, arguments, on_fit, finish)
    return result()


def _prepare(changes: contextlib.ExitStack, on_compile: Callable[[keras.Model], None], is_quiet: bool) -> None:
    """Change the process for the script, until ``changes`` are closed."""
    changes.callback(set_doctor, doctor_enabled())
    set_doctor(False)  # Otherwise the strategy of the script would also examine its calls.
    changes.enter_context(trainer.observe_calls(OBSERVE_COMPILE, on_compile))
    if is_quiet:
        changes.enter_context(to_standard_error())


def _joined(report: Report, network: Report) -> Report:
    return replace(report, findings=network.findings + report.findings, looked_at=report.looked_at + network.looked_at)


def fit_call_of(first: FirstFit, compiled_at: str = "") -> FitCall:
    """Return a script's call of ``fit``, which will not run, as the checks take it; ``compiled_at`` is a file and line, or ""."""
    given = dict(first.arguments)
    x, y, weight = (given.pop(name, None) for name in ("x", "y", "sample_weight"))
    return FitCall(first.model, x, y, weight, given, fit_at=first.where, compiled_at=compiled_at, may_build=True)


def _examine_call(program: FitCall) -> Report:
    owner = trainer.strategy_of(program.model)
    return examine_fit(owner, program) if isinstance(owner, Diagnostics) else _on_one_device(program)


def _on_one_device(program: FitCall) -> Report:
    """Examine a call of fit without a strategy, as Keras alone would train the model."""
    device = jax.local_devices()[0]
    placement = placement_on([device], 1)
    executor = SpmdExecutor(placement, AutoAllReduce())
    functions = StepFunctions(program.model, placement, executor, lambda _: None)
    fit_wrapper = FitWrapper(placement, InputOptions(), ProcessGroup(), lambda *_: nullcontext(), lambda *_: None)
    setting = RuntimeSettings(devices=(device,), has_strategy=False)
    report = examine(replace(program, settings=setting), functions, fit_wrapper, os.environ)
    return replace(report, looked_at=("no strategy: as on one device", *report.looked_at))


@contextlib.contextmanager
def to_standard_error() -> Iterator[None]:
    """Redirect standard output to standard error, also for child processes."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
