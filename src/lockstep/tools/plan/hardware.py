"""Hardware of a plan: data sheets of accelerators, and devices that XLA compiles for although they are not here."""

import importlib.util
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from lockstep._atomic_files import read_file
from lockstep._errors import OptionError, install_extra, shown
from lockstep.collectives.cost_model import Network, NetworkLink
from lockstep.devices.host_memory import host_memory
from lockstep.devices.names import resolve_devices
from lockstep.tools.env import environment_set

GPUS_OF_A_MACHINE = 8
MAX_DEVICES = 4096
MAX_BYTES = 1 << 20  # of a file of the user
PLATFORMS = ("cpu", "cuda", "tpu")
# By default JAX takes this share of a GPU's memory when it starts.
MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
DEFAULT_SHARE = 0.75
_UNKNOWN_SIZE = 1 << 40  # bytes of a GPU without an entry: XLA then saves none
# libtpu must not look for a TPU, and other processes may use it at the same time.
_LIBTPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
_COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin")}
_TARGET = re.compile(r"(?P<key>[a-z0-9_.-]+)(:(?P<axes>\d+(x\d+)*))?", re.IGNORECASE)


@dataclass(frozen=True)
class Accelerator:
    """The data sheet of a device.

    Args:
        key: its name in a target, such as "h100".
        name: for people.
        platform: "tpu", "cuda" or "cpu".
        source: where the figures are from.
        kinds: what JAX calls such a device (``device_kind``).
        memory: bytes; None if unknown, as those below.
        usable: bytes that programs get; None: all, or on GPUs the share that JAX takes.
        memory_bandwidth: bytes a second.
        interconnect: name of the links within a machine or a slice.
        link: bytes a second that a device sends to its neighbour there, in a ring.
        latency: seconds of a message there.
        peak: floating-point operations a second, by dtype.
        axes: axes of a slice of TPUs.
        compiler: what XLA asks a device for.

    Example:
        >>> from lockstep.tools.plan.hardware import known_accelerators
        >>> known_accelerators()["h100"].peak["bfloat16"]
        989000000000000.0
    """

    key: str
    name: str
    platform: str
    source: str
    kinds: tuple[str, ...] = ()
    memory: int | None = None
    usable: int | None = None
    memory_bandwidth: float | None = None
    interconnect: str = ""
    link: float | None = None
    latency: float = 0.0
    peak: Mapping[str, float] = field(default_factory=dict, hash=False)
    axes: int = 1
    compiler: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def usable_memory(self) -> int | None:
        """Bytes that programs get: on GPUs JAX takes a part of the memory, which ``XLA_PYTHON_CLIENT_MEM_FRACTION`` sets.

        Raises:
            OptionError: that variable is no positive number.
        """
        if self.usable is not None or self.memory is None or self.platform != "cuda":
            return self.usable or self.memory
        text = os.environ.get(MEMORY_SHARE, str(DEFAULT_SHARE))
        try:
            found = int(self.memory * float(text))
        except (ValueError, OverflowError):
            found = 0
        if found <= 0:
            raise OptionError(
                f"{MEMORY_SHARE}: expected a share of a GPU's memory such as 0.9, got {shown(text)}. Fix: set it to such a number, or unset it."
            )
        return found


@dataclass(frozen=True)
class Target:
    """Devices to plan for.

    Args:
        accelerator: accelerator of all devices.
        axes: axes of a TPU slice, such as (2, 4); otherwise the number of devices.

    Example:
        >>> from lockstep.tools.plan.hardware import parse_target
        >>> target = parse_target("v5e:2x4")
        >>> target.name, target.count
        ('v5e:2x4', 8)
    """

    accelerator: Accelerator
    axes: tuple[int, ...]

    @property
    def name(self) -> str:
        """The target as in ``--for``."""
        return f"{self.accelerator.key}:{'x'.join(map(str, self.axes))}"

    @property
    def count(self) -> int:
        """Number of devices."""
        return math.prod(self.axes)

    @property
    def usable_memory(self) -> int | None:
        """Bytes that programs get on each device; None if unknown. Without a figure, CPU devices share the memory of this machine."""
        known = self.accelerator.usable_memory
        if known is not None or self.accelerator.platform != "cpu":
            return known
        host = host_memory()
        return min(host.total, host.limit or host.total) // self.count

    def devices(self) -> list[jax.Device]:
        """Return the devices, which are only described, but for CPUs.

        Raises:
            OptionError: there is no compiler for them here, or the compiler knows no such devices.
        """
        platform = self.accelerator.platform
        if platform == "cpu":
            return list(resolve_devices([f"cpu:{number}" for number in range(self.count)]))
        self.check_compiler()
        try:
            with environment_set(_LIBTPU):
                return list(topologies.get_topology_desc(platform=platform, **self._topology()).devices)
        except Exception as error:  # of the compiler, of any type
            text = str(error).partition("\n")[0]
            raise OptionError(f"{self.name}: XLA knows no such devices: {text}. Fix: {_EXAMPLES[platform]}") from error

    def check_compiler(self) -> None:
        """Check that the compiler is installed.

        Raises:
            OptionError: it is not.
        """
        platform = self.accelerator.platform
        if platform != "cpu" and not any(importlib.util.find_spec(name) for name in _COMPILERS[platform]):
            raise OptionError(
                f"{self.name}: there is no compiler for {self.accelerator.name} here. Fix: {install_extra(f'plan-{platform}')}."
            )

    def network(self, between: NetworkLink) -> Network | None:
        """Return the links of the devices; None if they are unknown.

        Args:
            between: out of a machine of GPUs; the links of a TPU slice are the same everywhere.
        """
        if self.accelerator.link is None:
            return None
        within = NetworkLink(self.accelerator.latency, 1 / self.accelerator.link)
        machine = GPUS_OF_A_MACHINE if self.accelerator.platform == "cuda" else self.count
        return Network(within, between, machine)

    @property
    def links(self) -> str:
        """What collectives go over; "" if that is unknown."""
        crosses = self.accelerator.platform == "cuda" and self.count > GPUS_OF_A_MACHINE
        return f"{self.accelerator.interconnect}, network" if crosses else self.accelerator.interconnect

    def _topology(self) -> dict[str, Any]:
        if self.accelerator.platform == "tpu":
            one = {"chips_per_host_bounds": (1, 1, 1)} if self.count == 1 else {}
            return {"topology_name": self.name, **self.accelerator.compiler, **one}
        machines = max(1, self.count // GPUS_OF_A_MACHINE)
        return {
            "topology_name": self.accelerator.key,
            "topology": f"1x{machines}x{self.count // machines}",
            "target_config": _target_config(self.accelerator),
        }


_EXAMPLES = {
    "tpu": "name the axes of a slice, such as v5e:2x4 or v5p:2x2x1.",
    "cuda": "name a number of GPUs, such as h100:8.",
}


def known_accelerators(path: Path | None = None) -> dict[str, Accelerator]:
    """Return the accelerators by key.

    Args:
        path: a file of the user in the form of ``hardware.toml``, whose entries replace those of the same key.

    Raises:
        OptionError: the file cannot be read, or has an unknown form.
    """
    own = resources.files("lockstep.tools.plan").joinpath("hardware.toml").read_text(encoding="utf-8")
    found = _parse(own, "hardware.toml")
    if path is not None:
        try:
            text = read_file(path, MAX_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(
                f"hardware_file: {str(path)!r} cannot be read: {error}. Fix: give a file of TOML."
            ) from error
        found |= _parse(text, str(path))
    return found


def _parse(text: str, file: str) -> dict[str, Accelerator]:
    try:
        tables = tomllib.loads(text)
        return {key: _accelerator(key, dict(table)) for key, table in tables.items()}
    except (tomllib.TOMLDecodeError, TypeError, ValueError) as error:
        raise OptionError(
            f"{file}: {error}. Fix: describe each accelerator as in docs/plan.md, with name, platform and source."
        ) from error


_NUMBERS = ("memory", "usable", "memory_bandwidth", "link", "latency")
_KINDS_OF_ENTRIES: tuple[tuple[str, str, type], ...] = (
    ("name", "text", str),
    ("source", "text", str),
    ("interconnect", "text", str),
    ("peak", "table", dict),
    ("compiler", "table", dict),
)


def _accelerator(key: str, table: dict[str, Any]) -> Accelerator:
    unknown = sorted(set(table) - {one.name for one in fields(Accelerator)})
    if unknown:
        raise ValueError(f"{key}: unknown entry {unknown[0]}")
    if table.get("platform") not in PLATFORMS:
        raise ValueError(f"{key}: platform: expected one of {', '.join(PLATFORMS)}, got {shown(table.get('platform'))}")
    for name, expected, kind in _KINDS_OF_ENTRIES:
        if not isinstance(table.get(name, kind()), kind):
            raise ValueError(f"{key}: {name}: expected a {expected}, got {shown(table[name])}")
    numbers = {name: table[name] for name in _NUMBERS if name in table}
    numbers |= {f"peak.{dtype}": value for dtype, value in table.get("peak", {}).items()}
    for name, value in numbers.items():
        if not (type(value) in (int, float) and 0 < value < math.inf):
            raise ValueError(f"{key}: {name}: expected a positive number, got {shown(value)}")
    if type(table.get("axes", 1)) is not int or table.get("axes", 1) not in (1, 2, 3):
        raise ValueError(f"{key}: axes: expected 1, 2 or 3, got {shown(table['axes'])}")
    kinds = table.get("kinds", [])
    if not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise ValueError(f"{key}: kinds: expected a list of texts, got {shown(kinds)}")
    return Accelerator(key, **{**table, "kinds": tuple(kinds)})


def parse_target(
    text: str, accelerators: Mapping[str, Accelerator] | None = None, argument: str = "hardware (--for)"
) -> Target:
    """Return the target that a text such as ``h100:8`` or ``v5e:2x4`` names.

    Args:
        text: an accelerator, and after a colon the number of devices or the axes of a slice.
        accelerators: by key; None: those that are known.
        argument: that has the text, for messages.

    Raises:
        OptionError: the text has another form, the accelerator is unknown, or there are too many devices.
    """
    known = known_accelerators() if accelerators is None else accelerators
    match = _TARGET.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise OptionError(
            f"{argument}: expected a name such as h100:8 or v5e:2x4, got {shown(text)}. Fix: write accelerator:devices."
        )
    accelerator = known.get(match["key"].lower()) or known.get(match["key"])
    if accelerator is None:
        raise OptionError(
            f"{argument}: there is no {match['key']!r}; there are: {', '.join(known)}. Fix: name one of these, or describe it in hardware_file."
        )
    axes = tuple(map(int, (match["axes"] or "1").split("x")))
    count = math.prod(axes)
    if not 1 <= count <= MAX_DEVICES:
        raise OptionError(
            f"{argument}: {text}: expected 1 to {MAX_DEVICES:,} devices, got {count:,}. Fix: give a number in this range."
        )
    if accelerator.platform == "tpu":
        if len(axes) == 1 and count > 1:
            raise OptionError(f"{argument}: {text}: a TPU slice has two or three axes. Fix: {_EXAMPLES['tpu']}")
        axes = axes if count > 1 else (1,) * accelerator.axes
    elif len(axes) > 1:
        raise OptionError(f"{argument}: {text}: expected a number of devices. Fix: {_EXAMPLES['cuda']}")
    elif accelerator.platform == "cuda" and count > GPUS_OF_A_MACHINE and count % GPUS_OF_A_MACHINE:
        raise OptionError(f"{argument}: {text}: machines have {GPUS_OF_A_MACHINE} GPUs. Fix: take a multiple of it.")
    return Target(accelerator, axes)


def find_accelerator(device: jax.Device, accelerators: Mapping[str, Accelerator]) -> Accelerator | None:
    """Return the accelerator that a device of this machine is; None if it is not known."""
    return next((one for one in accelerators.values() if device.device_kind in one.kinds), None)


def _target_config(accelerator: Accelerator) -> str:
    """Return what XLA must know of a GPU, as the text of a ``GpuTargetConfigProto``."""
    given = dict(accelerator.compiler)
    try:
        major, _, minor = str(given.pop("capability")).partition(".")
    except KeyError as error:
        raise OptionError(
            f"{accelerator.key}: XLA cannot compile for a GPU without [{accelerator.key}.compiler]. Fix: describe it as in docs/plan.md."
        ) from error
    extension = "ACCELERATED_FEATURES" if given.pop("accelerated", False) else "NONE"
    sizes = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49_152,
        "block_dim_limit_x": 2_147_483_647,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
        "registers_per_core_limit": 65_536,
        "registers_per_block_limit": 65_536,
        "memory_bandwidth": int(accelerator.memory_bandwidth or 0),
        "device_memory_size": int(accelerator.memory or _UNKNOWN_SIZE),
        **given,
    }
    listed = "\n".join(f"  {name}: {value}" for name, value in sizes.items())
    capability = f"cuda_compute_capability {{ major: {major} minor: {minor or 0} feature_extension: {extension} }}"
    return (
        f"gpu_device_info {{\n{listed}\n  {capability}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 patch: 0 }\n"
        "runtime_version { major: 12 minor: 9 patch: 0 }\n"
        f'device_description_str: "{accelerator.name}"\n'
    )
