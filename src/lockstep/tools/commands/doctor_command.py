"""``lockstep doctor``: a script is run up to its first ``fit``, and all that this would do is looked at."""

import contextlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import jax
import keras
import numpy as np
from jax.sharding import Mesh

from lockstep._keras import trainer
from lockstep._keras.fit_interception import observe_compile
from lockstep.cluster_resolver import RESOLVERS, resolve
from lockstep.collectives import AutoAllReduce
from lockstep.data.device_placement import DEVICE_AXIS, Placement
from lockstep.data.fit_entry import FitObserver, InputFactory, InputOptions, ProcessGroup
from lockstep.doctor.connectivity import check_network, peers_of
from lockstep.doctor.finding import Finding, Report
from lockstep.doctor.fit_call import FitCall, RuntimeSettings, calling_location
from lockstep.doctor.full_check import examine
from lockstep.doctor.settings import doctor_enabled, set_doctor
from lockstep.execution.executors import SpmdExecutor
from lockstep.execution.train_functions import StepFunctions
from lockstep.strategies.diagnostics import Diagnostics, examine_fit
from lockstep.tools.run_until_fit import FirstFit, run_until_fit

__all__ = ["ClusterFindings", "examine_script", "look_at_cluster", "to_standard_error"]


@dataclass(frozen=True)
class ClusterFindings:
    """What was found of the cluster that the environment names.

    Args:
        findings: of it.
        looked_at: in words; "" where there is no cluster.
        variables: of the environment that name it.
    """

    findings: tuple[Finding, ...] = ()
    looked_at: str = ""
    variables: tuple[str, ...] = ()


def look_at_cluster(environ: Mapping[str, str]) -> ClusterFindings:
    """See whether the processes of the cluster can be reached from here, if there is one.

    Args:
        environ: may name it.

    Raises:
        ClusterError: its variables contradict each other.
    """
    resolver = resolve(environ)
    if resolver is None:
        return ClusterFindings()
    peers = peers_of(resolver.membership)
    variables = tuple(name for kind in RESOLVERS for name in kind.variables if name in environ)
    said = (
        f"the cluster of {resolver.membership.source}: {', '.join(f'{peer.name} at {peer.address}' for peer in peers)}"
    )
    return ClusterFindings(tuple(check_network(peers)), f"{said}; the script ran as one process of its own", variables)


def examine_script(path: str, arguments: Sequence[str], network: ClusterFindings | None = None) -> Report:
    """Run a script up to its first fit, look at that, and end it there.

    Args:
        path: of the script.
        arguments: of it.
        network: what was found of the cluster.

    Raises:
        OptionError: there is no such file, or it has no fit.
    """
    places: WeakKeyDictionary[keras.Model, str] = WeakKeyDictionary()
    reports = []

    def note(model: keras.Model) -> None:
        places[model] = calling_location()

    def look(first: FirstFit) -> None:
        given = dict(inspect.signature(keras.Model.fit).bind(first.model, *first.args, **first.kwargs).arguments)
        x, y, weight = (given.pop(name, None) for name in ("x", "y", "sample_weight"))
        program = FitCall(first.model, x, y, weight, given, fit_at=first.where)
        reports.append(_examined(replace(program, compiled_at=places.get(first.model, ""))))

    before = doctor_enabled()
    set_doctor(False)  # Or the script's strategy would say the same of other calls.
    try:
        with observe_compile(note):
            run_until_fit(path, arguments, look)
    finally:
        set_doctor(before)
    return _with_network(reports[0], network or ClusterFindings())


def _with_network(report: Report, network: ClusterFindings) -> Report:
    looked = (*report.looked_at, network.looked_at) if network.looked_at else report.looked_at
    return replace(report, findings=network.findings + report.findings, looked_at=looked)


def _examined(program: FitCall) -> Report:
    owner = trainer.strategy_of(program.model)
    return examine_fit(owner, program) if isinstance(owner, Diagnostics) else _on_one_device(program)


def _on_one_device(program: FitCall) -> Report:
    """As Keras alone would train the model."""
    device = jax.local_devices()[0]
    placement = Placement(Mesh(np.asarray([device]), (DEVICE_AXIS,)), 1)

    def around(model: keras.Model, arguments: dict[str, Any]) -> AbstractContextManager[None]:
        return nullcontext()

    executor = SpmdExecutor(placement, AutoAllReduce())
    functions = StepFunctions(program.model, placement, executor, lambda _: None)
    inputs = InputFactory(placement, InputOptions(), ProcessGroup(), around, FitObserver())
    setting = RuntimeSettings(devices=(device,), has_strategy=False)
    report = examine(replace(program, settings=setting), functions, inputs, os.environ)
    return replace(report, looked_at=("no strategy: as on one device", *report.looked_at))


@contextlib.contextmanager
def to_standard_error(is_wanted: bool) -> Iterator[None]:
    """Have what is printed meanwhile, also by programs that are started, go to standard error where that is wanted."""
    if not is_wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
