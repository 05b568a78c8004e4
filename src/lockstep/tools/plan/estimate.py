"""Time of a step on devices that are not here: the roofline model, and the cost model of collectives.

The roofline of S. Williams, A. Waterman, D. Patterson, 2009: a device takes at least as long as its arithmetic takes at its peak, and
at least as long as its memory takes at its bandwidth. Collectives are added, as if they overlapped with nothing.
"""

from dataclasses import dataclass

from lockstep.collectives.cost_model import Network, NetworkLink, predict
from lockstep.tools.plan.compiled_step import CompiledStep, Survey, model_axis_of
from lockstep.tools.plan.hardware import Target

# A forward pass is about a third of a step's operations, and recomputed blocks do it twice.
RECOMPUTED = 4 / 3


@dataclass(frozen=True)
class Estimate:
    """Operations of a step, and seconds.

    Args:
        operations: floating-point operations of the device that has most rows.
        arithmetic: at the peak of a device.
        traffic: of the memory of a device.
        communication: of all collectives.
    """

    operations: float
    arithmetic: float
    traffic: float
    communication: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max(self.arithmetic, self.traffic) + self.communication

    @property
    def efficiency(self) -> float:
        """Share of the time in which a device does not wait for others."""
        return max(self.arithmetic, self.traffic) / self.seconds

    @property
    def bound(self) -> str:
        """What takes longest: "arithmetic", "memory" or "communication"."""
        parts = {"arithmetic": self.arithmetic, "memory": self.traffic, "communication": self.communication}
        return max(parts, key=lambda name: parts[name])


def estimate(
    step: CompiledStep, surveyed: Survey, target: Target, strategy: str, between: NetworkLink
) -> Estimate | None:
    """Estimate the time of a compiled step.

    Args:
        step: with its memory.
        surveyed: operations of a row, and dtype.
        target: the devices.
        strategy: a name in ``STRATEGIES``, or such as "model:8".
        between: the link between two machines of GPUs.

    Returns:
        The estimate; None if a figure of the hardware or of the model is unknown.
    """
    peak = target.accelerator.peak.get(surveyed.dtype)
    bandwidth, network = target.accelerator.memory_bandwidth, target.network(between)
    if peak is None or bandwidth is None or network is None or surveyed.flops_per_row is None or step.memory is None:
        return None
    share = model_axis_of(strategy, target.count)  # devices that compute the same rows
    rows = -(-step.rows // (target.count // share))  # of the device that has most
    operations = rows * surveyed.flops_per_row / share * (RECOMPUTED if "recompute" in strategy else 1.0)
    communication = sum(
        _seconds(name, number, size, devices or target.count, network)
        for name, number, size, devices in step.collectives
    )
    return Estimate(operations, operations / peak, step.traffic / bandwidth, communication)


def _seconds(name: str, number: int, size: int, devices: int, network: Network) -> float:
    """Return the seconds of collectives of one kind, as rings.

    Args:
        name: such as "all-reduce".
        number: of collectives.
        size: bytes of their results on a device.
        devices: number of devices.
        network: their links.
    """
    if devices == 1:
        return 0.0
    if name == "all-reduce":
        return number * predict("ring", size / number, devices, network)
    if name in ("all-gather", "reduce-scatter", "all-to-all"):  # Half of the rounds of an all-reduce.
        whole = size * devices if name == "reduce-scatter" else size
        return number * predict("ring", whole / number, devices, network) / 2
    link = network.within if devices <= network.devices_per_machine else network.between
    return number * link.latency + size * link.seconds_per_byte
