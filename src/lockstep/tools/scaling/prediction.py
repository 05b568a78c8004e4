"""Predict the step time on more devices: a cost model of the step, fitted to the measured settings.

A step is compute, all-reduce, input and host, one after the other. Each of compute, input and host takes a + u r + v R + w M seconds,
where r is the rows of a device, R those of its machine, and M the number of devices of the machine. Accelerators share nothing when they
compute: v = w = 0; logical CPU devices share the cores. Input and host belong to one process per machine: u = 0. The all-reduce is that
of :mod:`lockstep.collectives.cost_model`. All coefficients are fitted by least squares of the errors relative to the step; none is
negative. The error is computed on the fitted settings, so it is a lower bound of the error elsewhere.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep._errors import whole_number
from lockstep._logging import counted
from lockstep.collectives.cost_model import (
    AllReduceMeasurement,
    Network,
    NetworkLink,
    fit_network,
    link_between,
    nonnegative_least_squares,
    predict_seconds,
)
from lockstep.tools.scaling.results import ScalingRow, ScalingTable, Shares, choose

COUNTS = tuple(2**power for power in range(11))  # 1 … 1,024 devices
Coefficients = tuple[float, float, float, float]


@dataclass(frozen=True)
class StepModel:
    """Cost model of a step.

    Args:
        compute: seconds per step, per row of the device, per row of its machine, per device of its machine.
        input: as ``compute``.
        host: as ``compute``.
        algorithm: algorithm of the all-reduce.
        gradient_bytes: size of the all-reduced arrays.
        link: measured link between the devices of this machine; None if only one device was measured.
    """

    compute: Coefficients
    input: Coefficients
    host: Coefficients
    algorithm: str
    gradient_bytes: int
    link: Network | None


@dataclass(frozen=True)
class Predicted:
    """A predicted step.

    Args:
        devices: number of devices.
        batch: rows of the global batch.
        seconds: seconds of a step.
        shares: seconds by cause.
        speed_up: in rows per second, over the first of its series.
    """

    devices: int
    batch: int
    seconds: float
    shares: Shares
    speed_up: float


def model_of(rows: Sequence[ScalingRow]) -> StepModel | None:
    """Fit the cost model to the rows measured under the strategy; None if there are none."""
    rows = [row for row in rows if row.setting.devices]
    if not rows:
        return None
    weights = 1 / np.array([row.step for row in rows])
    own = np.array([row.per_device for row in rows])
    machine = np.array([float(row.setting.batch) for row in rows])
    is_shared = rows[0].measured.platform == "cpu"
    ones, devices = np.ones(len(rows)), np.array([float(row.setting.devices) for row in rows])
    computing = [ones, own, machine * is_shared, devices * is_shared]
    process = [ones, 0 * own, machine, devices]
    last = rows[-1].measured
    return StepModel(
        compute=_fitted(computing, [row.shares.compute for row in rows], weights),
        input=_fitted(process, [row.shares.input for row in rows], weights),
        host=_fitted(process, [row.shares.host for row in rows], weights),
        algorithm=last.algorithm,
        gradient_bytes=last.gradient_bytes,
        link=_link_of(rows),
    )


def _fitted(columns: Sequence[np.ndarray], values: Sequence[float], weights: np.ndarray) -> Coefficients:
    table = np.stack(columns, axis=1)
    a, u, v, w = map(float, nonnegative_least_squares(table * weights[:, None], np.array(values) * weights))
    return a, u, v, w


def _link_of(rows: Sequence[ScalingRow]) -> Network | None:
    links = [link for row in rows for link in row.measured.links]
    links += [
        AllReduceMeasurement(
            row.measured.algorithm, row.measured.gradient_bytes, row.setting.devices, row.measured.all_reduce
        )
        for row in rows
        if row.setting.devices > 1
    ]
    found = [one for one in links if one.seconds > 0]
    return fit_network(found)[0] if len(found) >= 3 else None


def predict_step(model: StepModel, devices: int, batch: int, network: Network) -> Shares:
    """Predict the seconds of a step by cause.

    Args:
        model: cost model of the step.
        devices: number of devices.
        batch: rows of the global batch; the device with the most rows determines the time.
        network: between the devices, and the number of devices per machine.
    """
    own = -(-batch // devices)
    count = min(devices, network.devices_per_machine)
    amounts = 1, own, own * count, count
    return Shares(
        compute=_sum(model.compute, amounts),
        communication=predict_seconds(model.algorithm, model.gradient_bytes, devices, network),
        input=_sum(model.input, amounts),
        host=_sum(model.host, amounts),
    )


def _sum(coefficients: Coefficients, amounts: tuple[int, int, int, int]) -> float:
    return sum(coefficient * amount for coefficient, amount in zip(coefficients, amounts, strict=True))


def errors_of(model: StepModel, rows: Sequence[ScalingRow]) -> list[tuple[ScalingRow, float, float]]:
    """Return each row measured under the strategy with its predicted seconds per step and the relative error."""
    checks = []
    for row in rows:
        if row.setting.devices:
            link = model.link or Network(NetworkLink(0, 0), NetworkLink(0, 0), row.setting.devices)
            here = Network(link.within, link.within, row.setting.devices, link.seconds_per_added_byte)
            seconds = predict_step(model, row.setting.devices, row.setting.batch, here).total
            checks.append((row, seconds, seconds / row.step - 1))
    return checks


def network_for(model: StepModel, platform: str, between: NetworkLink, devices_per_machine: int | None) -> Network:
    """Return the network to predict for.

    Args:
        model: has the link within a machine if it was measured; otherwise the link between machines is used there too.
        platform: platform of the devices; by default a machine has eight accelerators, or one CPU.
        between: link between machines.
        devices_per_machine: None for the default.
    """
    count = (1 if platform == "cpu" else 8) if devices_per_machine is None else devices_per_machine
    within, added = (model.link.within, model.link.seconds_per_added_byte) if model.link else (between, 0.0)
    return Network(within, between, count, added)


def series_of(model: StepModel, batch: int, network: Network, *, is_weak: bool) -> list[Predicted]:
    """Predict steps on 1, 2, 4 … 1,024 devices.

    Args:
        model: cost model of the step.
        batch: rows of the global batch; in weak scaling rows per device.
        network: between the devices.
        is_weak: whether each device keeps its number of rows. Otherwise all share the batch, and the series ends at one row per device.
    """
    found: list[Predicted] = []
    for devices in COUNTS:
        rows = batch * devices if is_weak else batch
        if rows < devices:
            break
        shares = predict_step(model, devices, rows, network)
        first = found[0].batch / found[0].seconds if found else rows / shares.total
        found.append(Predicted(devices, rows, shares.total, shares, rows / shares.total / first))
    return found


_MIN_CHECKS = 3  # settings; with fewer the formula has as many constants as data and fits them exactly


@dataclass(frozen=True)
class PredictionOptions:
    """Options of a prediction.

    Args:
        bandwidth: between machines in GB/s, or a name such as "100GbE".
        latency: between machines in µs; None: that of the named network, or 30.
        devices_per_machine: None: 8 accelerators, or 1 CPU.
    """

    bandwidth: float | str = "100GbE"
    latency: float | None = None
    devices_per_machine: int | None = None

    def __post_init__(self) -> None:
        link_between(self.bandwidth, self.latency)
        if self.devices_per_machine is not None:
            whole_number("devices_per_machine", self.devices_per_machine)


@dataclass(frozen=True)
class Prediction:
    """A prediction for more devices.

    Args:
        model: the costs of a step.
        network: between the devices.
        strong: predicted steps at a fixed global batch.
        weak: predicted steps at a fixed batch per device.
        checks: measured settings with their predicted seconds per step and the relative error.
        described: the assumptions, in words.
    """

    model: StepModel
    network: Network
    strong: tuple[Predicted, ...]
    weak: tuple[Predicted, ...]
    checks: tuple[tuple[ScalingRow, float, float], ...]
    described: str

    @property
    def error(self) -> str:
        """A sentence about the error of the formula on the measured settings."""
        errors = sorted(abs(error) for _, _, error in self.checks)
        if len(errors) < _MIN_CHECKS:
            settings = "the one measured setting" if len(errors) == 1 else f"the {len(errors)} measured settings"
            return f"The formula was fitted to {settings}, too few to estimate its error"
        return (
            f"On the {len(errors)} measured settings the error of the formula is {statistics.median(errors):.0%} in the median, "
            f"at most {errors[-1]:.0%}"
        )


def prediction_for(table: ScalingTable, options: PredictionOptions) -> Prediction | None:
    """Return the prediction for more devices; None if nothing was measured under a strategy."""
    model, chosen = model_of(table.rows), choose(table)
    if model is None or chosen is None:
        return None
    platform = chosen.measured.platform
    between = link_between(options.bandwidth, options.latency)
    network = network_for(model, platform, between, options.devices_per_machine)
    batch, share = chosen.setting.batch, -(-chosen.setting.batch // chosen.setting.devices)
    link = "the link measured here" if model.link else "the same"
    described = (
        f"{counted(network.devices_per_machine, 'device')} a machine; between machines "
        f"{1e-9 / between.seconds_per_byte:g} GB/s and {1e6 * between.latency:g} µs, within one {link}; "
        f"{model.gradient_bytes:,} bytes of gradients by {model.algorithm}; strong: {batch:,} rows in all, weak: {share:,} on each device"
    )
    return Prediction(
        model,
        network,
        tuple(series_of(model, batch, network, is_weak=False)),
        tuple(series_of(model, share, network, is_weak=True)),
        tuple(errors_of(model, table.rows)),
        described,
    )
