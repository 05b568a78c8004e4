"""Cost model of collectives: the messages of an all-reduce, counted in its program, and their time on given links.

The model of R. Hockney, The communication challenge for MPP, 1994: a message of m bytes takes α + mβ seconds. As in
R. Thakur, R. Rabenseifner, W. Gropp, 2005, adding takes γ seconds a byte, and a device sends one message and receives one
at a time. Here the devices of a machine share its outgoing link: k messages that leave at once take α + kmβ.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.sharding import AbstractMesh, PartitionSpec
from scipy.optimize import nnls

from lockstep._errors import OptionError, real_number, shown, whole_number
from lockstep.collectives.all_reduce_algorithms import group_size
from lockstep.collectives.base import CrossDeviceOps

_AXIS = "device"
_MAX_DEVICES = 65_536
# Nominal values, not measured: bandwidth in GB/s each way, latency in microseconds.
NETWORKS = {
    "10GbE": (1.25, 50.0),
    "100GbE": (12.5, 30.0),
    "infiniband": (50.0, 5.0),
    "nvlink": (200.0, 5.0),
    "pcie": (25.0, 10.0),
}

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MessageRound:
    """Messages that are sent at the same time: each of ``pairs`` is a sender and a receiver of ``nbytes``."""

    pairs: Pairs
    nbytes: float


@dataclass(frozen=True)
class MessageTrace:
    """The rounds of an all-reduce, one after the other.

    Args:
        devices: number of devices.
        rounds: the messages of each round.
    """

    devices: int
    rounds: tuple[MessageRound, ...]

    @property
    def sent(self) -> list[float]:
        """Bytes that each device sends, by device."""
        return self._count(0)

    @property
    def received(self) -> list[float]:
        """Bytes that each device receives, by device."""
        return self._count(1)

    @property
    def in_turn(self) -> float:
        """Bytes that are sent one after the other: the sum over the rounds of one message."""
        return sum(each.nbytes for each in self.rounds)

    def _count(self, end: int) -> list[float]:
        total = [0.0] * self.devices
        for each in self.rounds:
            for pair in each.pairs:
                total[pair[end]] += each.nbytes
        return total


def trace_messages(ops: CrossDeviceOps, values: Sequence[jax.ShapeDtypeStruct | jax.Array], count: int) -> MessageTrace:
    """Return the rounds of messages of one all-reduce of ``count`` devices, which need not exist; shapes and dtypes of their ``values`` suffice.

    A ``ppermute`` is one round. For the platform's collectives, which may use other algorithms, the usual ones are
    counted: ``psum``, ``psum_scatter`` and ``all_gather`` round a ring, ``all_to_all`` in pairs, one partner a round.

    Returns:
        The rounds, in the order of the program.

    Raises:
        OptionError: the program communicates inside a ``while`` loop or a conditional, whose rounds are not known
            beforehand, or by a collective that is not listed here, or in groups.
    """
    count = whole_number("devices", count, maximum=_MAX_DEVICES)
    local, whole = jax.local_devices(), PartitionSpec()
    devices = [local[min(number, len(local) - 1)] for number in range(count)]  # Most operations only count them.
    run = jax.shard_map(
        lambda own: ops.all_reduce(own, _AXIS, devices),
        mesh=AbstractMesh((count,), (_AXIS,)),
        in_specs=whole,
        out_specs=whole,
        check_vma=False,
    )
    return MessageTrace(count, tuple(_rounds(jax.make_jaxpr(run)(list(values)).jaxpr, count)))


def _rounds(program: Jaxpr, count: int) -> Iterator[MessageRound]:
    for equation in program.eqns:
        name = equation.primitive.name
        if _AXIS in _axes(equation) and name != "axis_index":
            yield from _rounds_of_collective(equation, count)
        inner = [each for part in jaxprs_in_params(equation.params) for each in _rounds(part, count)]
        if inner and name in ("while", "cond"):
            raise OptionError(
                f"traffic: the operation communicates inside {name!r}, so its rounds are not known beforehand. Fix: use a "
                "loop of a fixed length (jax.lax.fori_loop with numbers, or a Python loop), and jax.numpy.where."
            )
        yield from inner * (equation.params["length"] if name == "scan" else 1)


def _rounds_of_collective(equation: JaxprEqn, count: int) -> list[MessageRound]:
    if equation.params.get("axis_index_groups") is not None:
        raise OptionError("traffic: collectives with axis_index_groups are not counted. Fix: use jax.lax.ppermute.")
    arrays = [operand.aval for operand in equation.invars]
    nbytes = sum(one.size * one.dtype.itemsize for one in arrays)  # type: ignore[attr-defined]  # they are arrays
    ring, slices = _as_pairs(_shift(1, count)), nbytes / count
    match equation.primitive.name:
        case "ppermute":
            return [MessageRound(tuple((int(a), int(b)) for a, b in equation.params["perm"] if a != b), nbytes)]
        case "all_gather":
            return [MessageRound(ring, nbytes)] * (count - 1)
        case "reduce_scatter":
            return [MessageRound(ring, slices)] * (count - 1)
        case "psum" | "psum_invariant":
            return [MessageRound(ring, slices)] * (2 * (count - 1))
        case "all_to_all":
            return [MessageRound(_as_pairs(_shift(step, count)), slices) for step in range(1, count)]
        case other:
            raise OptionError(
                f"traffic: what {other!r} sends is not known here. Fix: use another collective to count it."
            )


def _as_pairs(messages: np.ndarray) -> Pairs:
    return tuple((int(sender), int(receiver)) for sender, receiver in messages)


def _axes(equation: JaxprEqn) -> tuple[object, ...]:
    named = equation.params.get("axis_name", equation.params.get("axes", ()))
    return tuple(named) if isinstance(named, (tuple, list)) else (named,)


def crossing(pairs: np.ndarray, devices_per_machine: int) -> int:
    """Return the most messages of ``pairs``, ``(messages, 2)``, that leave or reach one machine at the same time."""
    sender, receiver = (pairs // devices_per_machine).T
    away = sender != receiver
    if not away.any():
        return 0
    return int(max(np.bincount(sender[away]).max(), np.bincount(receiver[away]).max()))


@dataclass(frozen=True)
class NetworkLink:
    """Latency of a link, α, in seconds a message, and the inverse of its bandwidth, β."""

    latency: float
    seconds_per_byte: float


def link_between(bandwidth: float | str, latency: float | None) -> NetworkLink:
    """Return the link between two machines.

    Args:
        bandwidth: in GB/s, or a name in ``NETWORKS``.
        latency: in microseconds; None: that of the name, or 30.

    Raises:
        OptionError: a number is out of its range, or the name is unknown.
    """
    usual = 30.0
    if isinstance(bandwidth, str):
        names = {name.lower(): values for name, values in NETWORKS.items()}
        if bandwidth.lower() not in names:
            raise OptionError(
                f"bandwidth: expected GB/s or one of {', '.join(NETWORKS)}, got {shown(bandwidth)}. Fix: pass a number or one of these names."
            )
        bandwidth, usual = names[bandwidth.lower()]
    rate = real_number("bandwidth", bandwidth, above=0, what="GB/s")
    wait = real_number("latency", usual if latency is None else latency, what="a number of µs")
    return NetworkLink(wait * 1e-6, 1 / (rate * 1e9))


@dataclass(frozen=True)
class Network:
    """Devices in machines, numbered machine by machine.

    Args:
        within: the link between two devices of a machine.
        between: the link out of a machine, shared by its devices.
        devices_per_machine: at least 1.
        seconds_per_added_byte: γ, for adding one array to another.
    """

    within: NetworkLink
    between: NetworkLink
    devices_per_machine: int
    seconds_per_added_byte: float = 0.0

    def __post_init__(self) -> None:
        whole_number("Network: devices_per_machine", self.devices_per_machine)

    def seconds(self, pairs: np.ndarray, nbytes: float) -> float:
        """Return the time of one round: the slowest of the messages ``pairs``, ``(messages, 2)``, of ``nbytes`` each."""
        shared = crossing(pairs, self.devices_per_machine)
        near = self.within.latency + nbytes * self.within.seconds_per_byte
        far = self.between.latency + shared * nbytes * self.between.seconds_per_byte
        return max(near, far) if shared else near


@dataclass(frozen=True)
class Stage:
    """Equal rounds.

    Args:
        rounds: number of rounds.
        sent: length of a message, as a share of the bytes of the all-reduce.
        added: bytes that a device adds in each round, as such a share.
        pairs: sender and receiver of each message of a round, ``(messages, 2)``.
    """

    rounds: int
    sent: float
    added: float
    pairs: np.ndarray


@dataclass(frozen=True)
class AllReduceMeasurement:
    """Measured time of an all-reduce of ``nbytes`` on each of the devices, all in one machine; the algorithm is a name in ``FORMULAS``."""

    algorithm: str
    nbytes: float
    devices: int
    seconds: float


def predict_seconds(
    algorithm: str, nbytes: float, devices: int, network: Network, groups: np.ndarray | None = None
) -> float:
    """Return the seconds that an all-reduce takes by the model.

    Args:
        algorithm: a name in ``FORMULAS``.
        nbytes: bytes that each device holds.
        devices: number of devices.
        network: costs of messages.
        groups: numbers of devices, ``(groups, devices)``: each group does an all-reduce at the same time; None: the first devices do one.

    Raises:
        OptionError: there is no formula of that name.

    Example:
        >>> from lockstep.collectives.cost_model import NetworkLink, Network, predict_seconds
        >>> network = Network(NetworkLink(5e-6, 1 / 200e9), NetworkLink(20e-6, 1 / 25e9), devices_per_machine=8)
        >>> predict_seconds("ring", 1e8, 64, network) < predict_seconds("reduce_to_one", 1e8, 64, network)
        True
    """
    groups = np.arange(devices)[None] if groups is None else groups
    return sum(
        stage.rounds
        * (
            network.seconds(groups[:, stage.pairs].reshape(-1, 2), stage.sent * nbytes)
            + stage.added * nbytes * network.seconds_per_added_byte
        )
        for stage in _stages(algorithm, devices)
    )


def fit_network(measurements: Sequence[AllReduceMeasurement]) -> tuple[Network, float]:
    """Fit latency, bandwidth and cost of adding within a machine to measured times, at least three, of several sizes.

    Least squares of the relative errors, without negative coefficients.

    Returns:
        A network of one machine, and the median of the relative errors of its predictions.
    """
    counts = np.array([_counts(one) for one in measurements])
    seconds = np.array([one.seconds for one in measurements])
    alpha, beta, gamma = map(float, nonnegative_least_squares(counts / seconds[:, None], np.ones(len(counts))))
    errors = np.abs(counts @ [alpha, beta, gamma] / seconds - 1)
    link = NetworkLink(alpha, beta)
    most = max(one.devices for one in measurements)
    return Network(link, link, most, gamma), float(np.median(errors))


def _counts(one: AllReduceMeasurement) -> tuple[float, float, float]:
    stages = _stages(one.algorithm, one.devices)
    rounds = sum(stage.rounds for stage in stages)
    sent = sum(stage.rounds * stage.sent for stage in stages)
    added = sum(stage.rounds * stage.added for stage in stages)
    return rounds, sent * one.nbytes, added * one.nbytes


def nonnegative_least_squares(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the coefficients, none negative, with which ``rows`` give ``values`` best by least squares.

    Columns are scaled to one magnitude first, as the solver's tolerance is absolute: rounds and bytes differ by many orders.

    Args:
        rows: ``(measurements, coefficients)``.
        values: ``(measurements,)``.

    Returns:
        ``(coefficients,)``; zero for a column of zeros.
    """
    scales = np.abs(rows).max(axis=0)
    scales[scales == 0] = 1.0
    found: np.ndarray = nnls(rows / scales, values)[0]
    return found / scales


def _stages(algorithm: str, devices: int) -> list[Stage]:
    if algorithm not in FORMULAS:
        raise OptionError(
            f"cost: no formula for {algorithm!r}; there are: {', '.join(FORMULAS)}. Fix: pass one of these names."
        )
    devices = whole_number("devices", devices)
    return FORMULAS[algorithm](devices) if devices > 1 else []


def _ring(n: int) -> list[Stage]:
    pairs = _shift(1, n)
    return [Stage(n - 1, 1 / n, 1 / n, pairs), Stage(n - 1, 1 / n, 0, pairs)]


def _halving_doubling(n: int) -> list[Stage]:
    power = 1 << (n.bit_length() - 1)
    own, extra = np.arange(power), np.arange(power, n)
    stages = []
    for distance in (1 << bit for bit in range(power.bit_length() - 1)):
        pairs = np.stack([own, own ^ distance], axis=1)
        stages += [Stage(1, 1 / (2 * distance), added, pairs) for added in (1 / (2 * distance), 0)]
    if len(extra):
        pairs = np.stack([extra, extra - power], axis=1)
        stages += [Stage(1, 1, 1, pairs), Stage(1, 1, 0, pairs)]
    return stages


def _reduce_to_one(n: int) -> list[Stage]:
    stages = [Stage(1, 1, 1, np.array([[source, 0]])) for source in range(1, n)]
    for have in (1 << bit for bit in range((n - 1).bit_length())):
        sender = np.arange(min(have, n - have))
        stages.append(Stage(1, 1, 0, np.stack([sender, sender + have], axis=1)))
    return stages


def _hierarchical_copy(n: int) -> list[Stage]:
    leaders = np.arange(0, n, group_size(n))
    stages = []
    for step in range(1, group_size(n)):
        members = leaders[leaders + step < n] + step
        stages += [Stage(1, 1, added, np.stack([members, members - step], axis=1)) for added in (1, 0)]
    for leader in leaders[1:]:
        stages += [Stage(1, 1, added, np.array([[leader, 0]])) for added in (1, 0)]
    return stages


def _slices(n: int, width: float = 1) -> list[Stage]:
    scatter = [Stage(1, width / n, 1 / n, _shift(step, n)) for step in range(1, n)]
    return [*scatter, Stage(n - 1, width / n, 0, _shift(1, n))]


def _shift(step: int, n: int) -> np.ndarray:
    own = np.arange(n)
    return np.stack([own, (own + step) % n], axis=1)


# The platform's collective is counted as a ring, which is what NCCL takes for long vectors.
FORMULAS: dict[str, Callable[[int], list[Stage]]] = {
    "auto": _ring,
    "half_precision": partial(_slices, width=0.5),  # Of float32 numbers.
    "halving_doubling": _halving_doubling,
    "hierarchical_copy": _hierarchical_copy,
    "nccl": _ring,
    "reduce_to_one": _reduce_to_one,
    "ring": _ring,
    "tree": _slices,
}
