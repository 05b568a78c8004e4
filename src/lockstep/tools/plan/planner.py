"""Entry points of plans: ``lockstep plan`` for a script, ``lockstep.plan`` for a model; ``estimate`` finds memory and time."""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import keras

from lockstep._errors import (
    OptionError,
    file_path,
    flag,
    named_arguments,
    real_number,
    seconds,
    sequence_of,
    shown,
    whole_number,
)
from lockstep._keras.placeholders import placeholder_variables
from lockstep._keras.trainer import DEFAULT_BATCH_SIZE
from lockstep.cluster_resolver import RESOLVERS
from lockstep.collectives.cost_model import NetworkLink, link_between
from lockstep.devices.cpu_devices import usable_cores
from lockstep.devices.host_memory import host_memory, size_text
from lockstep.tools.plan.compile_process import (
    Check,
    Ratio,
    TargetResult,
    compile_target,
    keep_checks,
    ratios_of,
    result_from_json,
)
from lockstep.tools.plan.estimate import (
    STRATEGIES,
    CompiledStep,
    Estimate,
    Survey,
    TrainingCall,
    check_strategies,
    estimate,
    last_batch,
    model_axis_of,
    survey,
)
from lockstep.tools.plan.hardware import Target, known_accelerators, parse_target
from lockstep.tools.plan.render import checks_text, page_of, text_of
from lockstep.tools.scaling.api import SavedReport
from lockstep.tools.scaling.workload import Workload, check_data
from lockstep.tools.script_runner import ChildResult, check_exists, run_child

# By ``Estimate.bound``: what limits a step, and what helps.
_LIMITED = {
    "arithmetic": "arithmetic: as fast as these devices are",
    "memory": "memory traffic: mixed precision (mixed_bfloat16) moves fewer bytes",
    "communication": "communication: more rows for each device, or fewer devices, use them better",
}
_UNKNOWN_MEMORY = "the memory of such a device is unknown. Fix: describe it with --hardware-file."
_COMPILER_BYTES = 3 << 30  # that a compiler takes beside a script
Report = Callable[[TargetResult, int, int], None]


@dataclass(frozen=True)
class PlanOptions:
    """What is planned.

    Args:
        targets: the devices.
        strategies: names in ``STRATEGIES``.
        batches: global batch sizes; () for that of the script.
        prices: prices of an hour, by the name of a target.
        between: the link between two machines of GPUs.
        is_search: whether to search the largest batch that fits.
        limit: seconds for each target and strategy.
        memory: bytes of memory of this machine for each target and strategy; None: no limit.
        jobs: how many are compiled side by side; None: as many as cores and memory allow.
        hardware_file: with further accelerators; None: there is none.
    """

    targets: tuple[Target, ...]
    strategies: tuple[str, ...]
    batches: tuple[int, ...] = ()
    prices: Mapping[str, float] = field(default_factory=dict)
    between: NetworkLink = field(default_factory=lambda: link_between("100GbE", None))
    is_search: bool = True
    limit: float = 1800.0
    memory: int | None = None
    jobs: int | None = None
    hardware_file: str | None = None

    @classmethod
    def checked(
        cls,
        hardware: Sequence[str] | str,
        strategy: Sequence[str] | str = "auto",
        batch: Sequence[int] = (),
        prices: Mapping[str, float] | None = None,
        bandwidth: float | str = "100GbE",
        hardware_file: str | Path | None = None,
        limit: float = 1800.0,
        memory: float | None = None,
        jobs: int | None = None,
        is_search: bool = True,
        is_check: bool = False,
    ) -> "PlanOptions":
        """Return the options that these arguments mean; see :func:`plan`. A check needs no ``hardware``.

        Raises:
            OptionError: one is out of its range or unknown, or the compiler of a target is not installed.
        """
        names = hardware.split(",") if isinstance(hardware, str) else hardware
        if not sequence_of("hardware (--for)", names, 'names such as ("h100:8", "v5e:2x4")') and not is_check:
            raise OptionError(
                'hardware (--for): expected names such as ("h100:8", "v5e:2x4"), got none. Fix: name the hardware to plan for.'
            )
        file = None if hardware_file is None else file_path("hardware_file", hardware_file)
        known = known_accelerators(file)
        targets = tuple(dict.fromkeys(parse_target(name, known) for name in names))
        planned, priced = [target.name for target in targets], {}
        for name, price in named_arguments("prices", prices).items():
            priced_name = parse_target(name, known, "prices (--price)").name
            if priced_name not in planned:
                raise OptionError(
                    f"prices (--price): {name}: expected one of the targets {', '.join(planned)}, got {priced_name}. Fix: name one of them."
                )
            priced[priced_name] = real_number(f"prices (--price): {name}", price, above=0)
        options = cls(
            targets,
            check_strategies(strategy),
            tuple(sorted({whole_number("batch", one) for one in sequence_of("batch", batch, "whole numbers")})),
            priced,
            link_between(bandwidth, None),
            is_search,
            seconds("limit", limit),
            None if memory is None else int(real_number("memory", memory, above=0, what="GB") * 1e9),
            None if jobs is None else whole_number("jobs", jobs),
            None if file is None else str(file),
        )
        for target in targets:
            target.check_compiler()
        return options

    def pairs(self) -> list[tuple[Target, str]]:
        """Return each target with each strategy that differs there: on one device nothing is sharded."""
        return [
            (target, strategy)
            for target in self.targets
            for strategy in self.strategies
            if strategy == self.strategies[0] or (target.count > 1 and not _is_without_mesh(strategy, target.count))
        ]


@dataclass(frozen=True)
class PlanRow:
    """One setting of a plan.

    Args:
        target: name of the devices.
        devices: their number.
        strategy: a name in ``STRATEGIES``.
        batch: rows of the global batch.
        fits: whether a step fits, that of the last batch of an epoch, too; None: it could not be compiled.
        step: the compiled step of a whole batch; None if it was not compiled.
        last: that of the last batch of an epoch; None if it has as many rows.
        links: what collectives go over; "" if that is unknown.
        usable: bytes of a device that programs get; None if unknown.
        activations: bytes of a device, of the part of the temporaries that grows with the rows; None if unknown.
        certainty: how certain the memory is: "exact", or "lower bound".
        estimate: estimate of the time of a step; None if it is unknown.
        largest: the largest batch that fits, and the smallest that does not, or None; None: it was not searched.
        price: price of a million rows; None without a price of the target.
        ratio: measured time and memory over predicted, on such a device; None: none was measured.
        reason: why it does not fit, or could not be compiled; "" if it fits.
    """

    target: str
    devices: int
    strategy: str
    batch: int
    fits: bool | None
    step: CompiledStep | None
    last: CompiledStep | None
    links: str
    usable: int | None
    activations: int | None
    certainty: str
    estimate: Estimate | None
    largest: tuple[int, int | None] | None
    price: float | None
    ratio: Ratio | None
    reason: str

    @property
    def name(self) -> str:
        """Text for people: ``h100:8, replicated, batch 64``."""
        return f"{self.target}, {self.strategy}, batch {self.batch:,}"

    @property
    def rows_per_second(self) -> float | None:
        """Estimated, over all devices; None if the time is unknown."""
        return self.batch / self.estimate.seconds if self.estimate else None

    @property
    def needed(self) -> int | None:
        """Bytes of the step that needs more; None if unknown."""
        return max((one.needed for one in (self.step, self.last) if one and one.needed), default=None)

    @property
    def kinds(self) -> dict[str, int | None] | None:
        """Bytes of a device in a step with a whole batch, by kind; None if there is no such step. Activations of None are in the workspace."""
        memory = self.step.memory if self.step else None
        if memory is None:
            return None
        activations = None if self.activations is None else min(self.activations, memory.temporaries)
        gradients = min(memory.gradients, memory.temporaries - (activations or 0))
        known = {
            "weights": memory.weights,
            "optimizer": memory.optimizer,
            "gradients": gradients,
            "activations": activations,
        }
        return known | {"workspace": memory.total - sum(size or 0 for size in known.values())}


@dataclass(frozen=True)
class Plan(SavedReport):
    """The result of ``lockstep.plan`` and ``lockstep plan``; ``print`` shows it.

    Args:
        title: title of what is planned.
        survey: survey of the call of ``fit``.
        rows: one for each target, strategy and batch.
        recommendation: sentences.
        notes: sentences about the model, and what could not be known.

    Example:
        >>> from lockstep.tools.plan.planner import Plan
        >>> from lockstep.tools.plan.estimate import Survey
        >>> survey = Survey(32, None, False, "float32", 1e9)
        >>> print(Plan("a net", survey, (), ("Nothing was compiled.",), ()))
        Plan of a net
        batch 32, float32, 1 GFLOP a row
        • Nothing was compiled.
        <BLANKLINE>
    """

    title: str
    survey: Survey
    rows: tuple[PlanRow, ...]
    recommendation: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return text_of(self)

    def to_json(self) -> dict[str, Any]:
        """Convert the plan to values of JSON.

        Returns:
            The attributes, and of each row ``rows_per_second``, ``needed`` and ``kinds``.
        """
        values = asdict(self)
        for row, shown_row in zip(self.rows, values["rows"], strict=True):
            shown_row |= {"rows_per_second": row.rows_per_second, "needed": row.needed, "kinds": row.kinds}
            if row.estimate:
                shown_row["estimate"] |= {
                    "seconds": row.estimate.seconds,
                    "efficiency": row.estimate.efficiency,
                    "bound": row.estimate.bound,
                }
        return values

    def _page(self) -> str:
        return page_of(self)


def plan(
    model: keras.Model | Callable[[], keras.Model],
    data: Any,
    *,
    hardware: Sequence[str] | str,
    batch: Sequence[int] | int = DEFAULT_BATCH_SIZE,
    strategy: Sequence[str] | str = "auto",
    prices: Mapping[str, float] | None = None,
    bandwidth: float | str = "100GbE",
    hardware_file: str | Path | None = None,
    search: bool = True,
) -> Plan:
    """Say whether a model fits on hardware that is not here, how much each step communicates, and estimate its time.

    The training step is compiled for each target, in this process and one after the other; nothing is run or trained. The command
    ``lockstep plan`` does the same for a script, in processes side by side and with limits.

    Args:
        model: a compiled model, or a function that makes one: variables of a MiB or more then take no memory, so the model may be larger
            than this machine. Until ``plan`` returns, all new variables of the process are made so; they read as zeros.
        data: ``(x, y)`` or ``(x, y, sample_weight)``, arrays ``(rows, …)``, or a function that returns them; the number of rows decides on the
            last batch of an epoch.
        hardware: targets such as "h100:8" (a number of GPUs), "v5e:2x4" (the axes of a TPU slice) or "cpu:4".
        batch: rows of the global batches.
        strategy: some of "replicated", "optimizer" (``shard="optimizer"``), "variables" (``shard="variables"``) and "recompute" (the same
            with ``recompute="blocks"``), "model" (``ModelParallelStrategy``; "model:8" with a second axis of 8) and "model-recompute"
            (the same with both arguments), or "auto" for all.
        prices: prices of an hour, by target, in any currency.
        bandwidth: between machines of GPUs: GB/s, or "10GbE", "100GbE", "infiniband", "nvlink", "pcie".
        hardware_file: a file of TOML with further accelerators; see ``docs/plan.md``.
        search: whether to search the largest batch that fits, which compiles some more steps.

    Returns:
        The plan; ``print`` shows it, ``save_html`` and ``save_json`` write it.

    Raises:
        OptionError: an argument is out of its range, or the compiler of a target is not installed.

    Example:
        >>> import keras, lockstep, numpy as np
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> model.compile("sgd", "mse")
        >>> found = lockstep.plan(model, (np.zeros((64, 8)), np.zeros((64, 4))), hardware="cpu:1", strategy="replicated")
        >>> found.rows[0].fits, found.rows[0].step.memory.weights
        (True, 144)
    """
    arrays = data() if callable(data) else data
    check_data("data", arrays)
    batches = batch if isinstance(batch, Sequence) else (batch,)
    if not batches:
        raise OptionError(
            f"batch: expected rows of global batches such as 64 or (64, 128), got {shown(batch)}. Fix: pass at least one number."
        )
    options = PlanOptions.checked(
        hardware, strategy, batches, prices, bandwidth, hardware_file=hardware_file, is_search=flag("search", search)
    )
    x, y, *weights = arrays
    arguments = {"sample_weight": weights[0] if weights else None, "batch_size": options.batches[0]}
    is_function = callable(model) and not isinstance(model, keras.Model)
    with placeholder_variables() if is_function else contextlib.nullcontext():
        compiled = model() if is_function else model
        if not isinstance(compiled, keras.Model) or not compiled.compiled:
            raise OptionError(
                f"model: expected a compiled model, or a function that returns one, got {shown(compiled)}. Fix: call compile() before."
            )
        call = TrainingCall.of_fit(compiled, (x, y), arguments)
        results = [
            compile_target(call, target, name, options.batches, is_search=options.is_search)
            for target, name in options.pairs()
        ]
        return _planned(compiled.name, survey(call), results, options, ())


def plan_script(
    path: str,
    arguments: Sequence[str],
    options: PlanOptions,
    environment: Mapping[str, str],
    report: Report = lambda result, done, count: None,
) -> Plan:
    """Plan the first ``fit`` of a script; see :func:`plan`.

    Args:
        path: path of the script.
        arguments: arguments of the script.
        options: what is planned.
        environment: variables of this process; those that name a cluster are left out, as the script runs alone.
        report: called with each result, how many there are, and how many there will be.

    Raises:
        OptionError: the script does not exist, calls no ``fit``, or its ``fit`` would fail.
    """
    variables = {**_without_cluster(environment), "JAX_PLATFORMS": "cpu"}
    request = _request_of(path, arguments)
    content = _answer(
        path, run_child(_COMPILE_PROCESS, {**request, "ask": "survey"}, options.limit, variables, options.memory)
    )
    surveyed, findings = Survey(**content["survey"]), content["findings"]
    request |= {"ask": "compile", "batches": list(options.batches), "is_search": options.is_search}
    jobs = options.jobs or _most_jobs()
    results = _compile_all(request, options, jobs, variables, report)
    notes = [f"doctor: {line}" for line in findings]
    if surveyed.has_own_batches and options.batches:
        notes.append("the input has batches already; the plan is for other sizes of them")
    return _planned(Path(path).name, surveyed, results, options, notes)


def check_script(
    path: str, arguments: Sequence[str], options: PlanOptions, environment: Mapping[str, str]
) -> tuple[str, bool]:
    """Predict and measure steps of a script on the devices of this machine, and keep the ratios.

    Returns:
        A text, and whether anything was measured.

    Raises:
        OptionError: as :func:`plan_script`, or the devices are not known.
    """
    request = _request_of(path, arguments) | {
        "ask": "check",
        "strategies": options.strategies,
        "batches": list(options.batches),
        "hardware_file": options.hardware_file,
        "between": asdict(options.between),
    }
    found = run_child(_COMPILE_PROCESS, request, options.limit, _without_cluster(environment), options.memory)
    content = _answer(path, found)
    checks = [Check(**one) for one in content["checks"]]
    kept = keep_checks(checks, environment) if checks else None
    return checks_text(checks, content["failures"], kept), bool(checks)


_COMPILE_PROCESS = "lockstep.tools.plan.compile_process"


def _request_of(path: str, arguments: Sequence[str]) -> dict[str, Any]:
    check_exists(path)
    return {"workload": asdict(Workload("script", path=path, arguments=tuple(arguments)))}


def _without_cluster(environment: Mapping[str, str]) -> dict[str, str]:
    cluster = {name for kind in RESOLVERS for name in kind.variables}
    return {name: value for name, value in environment.items() if name not in cluster}


def _answer(path: str, found: ChildResult) -> dict[str, Any]:
    """Return what a child wrote, or raise an OptionError with the reason and the findings of the doctor."""
    content = found.content or {"failure": found.failure + (" Fix: raise --limit." if found.is_late else "")}
    if content.get("failure"):
        findings = [f"doctor: {line}" for line in content.get("findings", ())]
        failure = content["failure"].removeprefix(f"{path}: ")
        raise OptionError("\n".join([f"{path}: {failure}", *findings]))
    return dict(content)


def _compile_all(
    request: Mapping[str, Any], options: PlanOptions, jobs: int, environment: Mapping[str, str], report: Report
) -> list[TargetResult]:
    """Compile each target with each strategy in a process of its own, side by side."""
    pairs, is_over = options.pairs(), threading.Event()

    def compile_one(pair: tuple[Target, str]) -> TargetResult:
        target, strategy = pair
        asked = {**request, "target": asdict(target), "strategy": strategy}
        found = run_child(_COMPILE_PROCESS, asked, options.limit, environment, options.memory, is_over.is_set)
        content = found.content or {}
        result = result_from_json(content) if "steps" in content else TargetResult(target.name, strategy)
        failure = content.get("failure") or found.failure
        hint = " Fix: raise --limit, or name fewer batches." if found.is_late else ""
        return replace(result, failure=failure + hint)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            compiled = [pool.submit(compile_one, pair) for pair in pairs]
            for done, each in enumerate(as_completed(compiled), 1):
                report(each.result(), done, len(pairs))
            return [each.result() for each in compiled]
        finally:  # After Ctrl-C the children end, too.
            is_over.set()
            pool.shutdown(cancel_futures=True)


def _most_jobs() -> int:
    """Return how many processes with a compiler fit on this machine side by side."""
    free = host_memory().free
    by_memory = usable_cores() if free is None else free // _COMPILER_BYTES
    return max(1, min(usable_cores(), by_memory))


def _planned(
    title: str, surveyed: Survey, results: Sequence[TargetResult], options: PlanOptions, notes: Sequence[str]
) -> Plan:
    measured = ratios_of(surveyed.dtype)
    rows = tuple(
        _row(result, target, batch, surveyed, options, measured)
        for result, (target, _) in zip(results, options.pairs(), strict=True)
        for batch in options.batches or (surveyed.batch,)
    )
    noted: dict[str, dict[str, None]] = {}  # strategies by note, in order
    for result in results:
        for note in result.notes:
            noted.setdefault(note, {})[result.strategy] = None
    told = [f"{', '.join(strategies)}: {note}" for note, strategies in noted.items()]
    if any(row.estimate and row.ratio is None for row in rows):
        told.append("times are estimates from data sheets, unverified: no such device was measured here")
    told += [_told(key, ratio) for key, ratio in measured.items() if any(row.ratio is ratio for row in rows)]
    if any(row.certainty == "lower bound" for row in rows):
        told.append("memory of GPUs is a lower bound: workspaces of cuDNN are chosen when the program runs")
    if surveyed.flops_per_row is None:
        told.append(
            "the operations of a step are unknown, so there is no time: XLA cannot count them, or a loop ends at a condition"
        )
    if surveyed.rows is None:
        told.append("the number of rows is unknown: the last batch of an epoch is planned with one row less")
    return Plan(title, surveyed, rows, tuple(_recommend(rows)), tuple(dict.fromkeys([*notes, *told])))


def _row(
    result: TargetResult,
    target: Target,
    batch: int,
    surveyed: Survey,
    options: PlanOptions,
    measured: Mapping[str, Ratio],
) -> PlanRow:
    step, left = result.step_of(batch), last_batch(surveyed.rows, batch)
    last = result.step_of(left)
    usable = target.usable_memory
    found = [one for one in (step, last) if one is not None]
    failure = next((one.failure for one in found if one.failure), result.failure)
    known = [one.fits(usable) for one in found if not one.failure]
    is_known = len(known) == (2 if left else 1) and usable is not None
    fits = False if False in known else True if is_known else None
    time = None if step is None or fits is False else estimate(step, surveyed, target, result.strategy, options.between)
    price = options.prices.get(target.name)
    return PlanRow(
        target=target.name,
        devices=target.count,
        strategy=result.strategy,
        batch=batch,
        fits=fits,
        step=step,
        last=last,
        links=target.links,
        usable=usable,
        activations=_activations(step, result.steps, target.count),
        certainty="lower bound" if target.accelerator.platform == "cuda" else "exact",
        estimate=time,
        largest=result.largest,
        price=price / 3600 * time.seconds / batch * 1e6 if price is not None and time else None,
        ratio=measured.get(target.accelerator.key),
        reason="" if fits else _too_large(found, usable) if fits is False else failure or _UNKNOWN_MEMORY,
    )


def _is_without_mesh(strategy: str, devices: int) -> bool:
    """Whether a strategy with a mesh is there the same as one without."""
    return STRATEGIES[strategy.partition(":")[0]].has_mesh and model_axis_of(strategy, devices) == 1


def _told(accelerator: str, ratio: Ratio) -> str:
    parts = [f"{name} {value:.2f} ×" for name, value in (("time", ratio.time), ("memory", ratio.memory)) if value]
    return f"{accelerator}: measured over predicted: {', '.join(parts) or 'nothing'} (checks: {ratio.checks}, newest {ratio.date})"


def _activations(step: CompiledStep | None, steps: Sequence[CompiledStep], devices: int) -> int | None:
    """Return the part of the temporaries of a step that grows with the rows: by the line through it and the smallest even batch; None if there is
    none.
    """
    if step is None or step.memory is None:
        return None
    others = [(one.rows, one.memory.temporaries) for one in steps if one.memory and one.rows % devices == 0]
    rows, temporaries = min(others, default=(step.rows, 0))
    if rows >= step.rows:
        return None
    return max(0, int((step.memory.temporaries - temporaries) / (step.rows - rows) * step.rows))


def _too_large(found: Sequence[CompiledStep], usable: int | None) -> str:
    most = max((one.needed for one in found if one.needed), default=None)
    limit = "" if usable is None else f" of {size_text(usable)}"
    return f"needs {size_text(most)}{limit}" if most else f"more than the memory{limit}"


def _recommend(rows: Sequence[PlanRow]) -> list[str]:
    """Return what to take, with the reasons."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        known = [row for row in rows if row.fits is False]
        if not known:
            return ["Nothing could be compiled: see the reason of each setting."]
        some = "" if len(known) == len(rows) else f" of what could be compiled ({len(known)} of {len(rows)} settings)"
        return [
            f'Nothing fits{some}. Fix: a smaller batch, more devices, or shard="variables" with recompute="blocks".'
        ]
    timed = [row for row in fitting if row.rows_per_second]
    if not timed:
        return [f"These fit: {', '.join(dict.fromkeys(f'{row.target} {row.strategy}' for row in fitting))}."]
    sentences = []
    priced = [row for row in timed if row.price is not None]
    if priced:
        cheap = min(priced, key=lambda row: row.price or 0.0)
        sentences.append(f"Cheapest that fits: {cheap.name}, {cheap.price:.4g} for a million rows.")
    fast = max(timed, key=lambda row: (row.rows_per_second or 0.0, -(row.needed or 0)))
    bound = fast.estimate.bound if fast.estimate else ""
    sentences.append(
        f"Fastest that fits: {fast.name}, about {fast.rows_per_second:,.0f} rows/s, limited by {_LIMITED[bound]}."
    )
    for row in timed:
        others = [one for one in timed if (one.target, one.batch) == (row.target, row.batch)]
        if row is max(others, key=lambda one: one.rows_per_second or 0.0) and row.strategy != "replicated":
            whole = (row.target, row.batch, "replicated")
            if any(one.fits is False for one in rows if (one.target, one.batch, one.strategy) == whole):
                sentences.append(
                    f"On {row.target} with batch {row.batch:,} the model fits only sharded: take {row.strategy}."
                )
    return sentences
