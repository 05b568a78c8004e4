"""Hardware of a plan: the data sheets, and the names of targets."""

from types import SimpleNamespace

import jax
import pytest

from lockstep import OptionError
from lockstep.collectives.cost_model import NetworkLink
from lockstep.tools.plan import hardware
from lockstep.tools.plan.hardware import find_accelerator, known_accelerators, parse_target

SLOW = NetworkLink(1e-3, 1e-6)
OWN = """
[ours]
name = "GPUs of our machine"
platform = "cuda"
kinds = ["NVIDIA RTX"]
memory = 24_000_000_000
memory_bandwidth = 1e12
link = 32e9
peak = { float32 = 80e12 }
source = "its manual"

[h100]
name = "H100 with less memory"
platform = "cuda"
source = "ours"
"""

OTHER = "[x]\nname = 'x'\nplatform = 'tpu'\nsource = ''\n"


@pytest.mark.parametrize("one", [one for one in known_accelerators().values() if one.platform != "cpu"], ids=str)
def test_data_sheets_are_complete_and_name_their_public_source(one):
    assert one.source.startswith("https://")
    assert one.kinds
    assert one.interconnect
    assert min(one.memory, one.memory_bandwidth, one.link, one.latency, *one.peak.values()) > 0
    assert 0.7 * one.memory < one.usable_memory < 1.01 * one.memory
    assert set(one.peak) <= {"bfloat16", "float16", "float32"}
    assert one.peak["float32"] <= max(one.peak.values())
    assert (one.axes in (2, 3)) == (one.platform == "tpu")
    assert one.platform != "cuda" or {"capability", "core_count"} <= set(one.compiler)


def test_data_sheets_cover_the_named_accelerators():
    assert {"v4", "v5e", "v5p", "v6e", "a100", "h100", "h200", "b200", "l4", "t4"} <= set(known_accelerators())


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("h100:8", "h100:8", 8),
        ("H100", "h100:1", 1),
        ("h100:64", "h100:64", 64),
        ("v5e:2x4", "v5e:2x4", 8),
        ("v5e:1", "v5e:1x1", 1),
        ("v5p:2x2x4", "v5p:2x2x4", 16),
        ("v4", "v4:1x1x1", 1),
        ("cpu:4", "cpu:4", 4),
    ],
)
def test_parse_target_reads_a_number_of_devices_or_the_axes_of_a_slice(text, name, count):
    target = parse_target(text)
    assert (target.name, target.count) == (name, count)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a name such as h100:8"),
        ("h100:", "expected a name such as h100:8"),
        ("h100:-1", "expected a name such as h100:8"),
        (8, "expected a name such as h100:8"),
        ("h900:8", "there is no 'h900'; there are: v4, v5e"),
        ("h100:0", "expected 1 to 4,096 devices, got 0"),
        ("h100:99999", "expected 1 to 4,096 devices, got 99,999"),
        ("h100:2x4", "expected a number of devices. Fix: name a number of GPUs"),
        ("h100:12", "machines have 8 GPUs. Fix: take a multiple"),
        ("v5e:8", "a TPU slice has two or three axes. Fix: name the axes"),
    ],
)
def test_parse_target_refuses_other_names(text, message):
    with pytest.raises(OptionError, match=r"^hardware \(--for\): ") as raised:
        parse_target(text)
    assert message in str(raised.value)


def test_a_file_of_the_user_adds_accelerators_and_replaces_known_ones(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    found = known_accelerators(path)
    assert parse_target("ours:4", found).accelerator.name == "GPUs of our machine"
    assert (found["h100"].source, found["h100"].memory, found["a100"].memory) == ("ours", None, 85_100_068_864)
    assert parse_target("h100:8", found).network(SLOW) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x", "Fix: describe each accelerator"),
        ("x = 1", "Fix: describe each accelerator"),
        ("[x]\nname = 'x'\nplatform = 'npu'\nsource = ''", "x: platform: expected one of cpu, cuda, tpu, got 'npu'"),
        ("[x]\nname = 'x'\nplatform = 'tpu'\nsource = ''\nmemory = -1", "x: memory: expected a positive number, got -1"),
        ("[x]\nname = 'x'\nplatform = 'tpu'\nsource = ''\nspeed = 1", "x: unknown entry speed"),
        ("[x]\nname = 'x'\nplatform = 'cuda'\nsource = ''\nkinds = 'A'", "x: kinds: expected a list of texts, got 'A'"),
        ("[x]\nplatform = 'tpu'", "Fix: describe each accelerator"),
        (OTHER + "peak = 1e12", "x: peak: expected a table, got 1000000000000.0"),
        (OTHER + "peak = {float32 = 'fast'}", "x: peak.float32: expected a positive number, got 'fast'"),
        (OTHER + "memory = inf", "x: memory: expected a positive number, got inf"),
        (OTHER + "compiler = 'xla'", "x: compiler: expected a table, got 'xla'"),
        (OTHER + "axes = 'two'", "x: axes: expected 1, 2 or 3, got 'two'"),
        (OTHER + "axes = 4", "x: axes: expected 1, 2 or 3, got 4"),
        (OTHER + "axes = true", "x: axes: expected 1, 2 or 3, got True"),
        (OTHER + "interconnect = 1", "x: interconnect: expected a text, got 1"),
        ("[x]\nname = 1\nplatform = 'cpu'\nsource = ''", "x: name: expected a text, got 1"),
    ],
)  # fmt: skip
def test_a_file_of_another_form_is_refused_with_its_name(tmp_path, text, message):
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=r"own\.toml") as raised:
        known_accelerators(path)
    assert message in str(raised.value)


def test_usable_memory_of_a_gpu_is_the_share_that_jax_takes(monkeypatch):
    h100 = known_accelerators()["h100"]
    assert h100.usable_memory == h100.memory * 3 // 4
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert h100.usable_memory == h100.memory // 2
    for text in ("half", "inf", "-1", "0"):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", text)
        with pytest.raises(OptionError, match=rf"^XLA_PYTHON_CLIENT_MEM_FRACTION: expected a share .*, got '{text}'"):
            _ = h100.usable_memory


def test_links_between_machines_are_slower_only_for_gpus():
    for name, within, text in (
        ("h100:8", 8, "NVLink 4"),
        ("h100:64", 8, "NVLink 4, network"),
        ("v5e:16x16", 256, "ICI"),
    ):
        target = parse_target(name)
        network = target.network(SLOW)
        assert (network.devices_per_machine, network.between, target.links) == (within, SLOW, text)


def test_a_missing_compiler_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: None)
    for name, extra in (("h100:8", "plan-cuda"), ("v5e:2x4", "plan-tpu")):
        with pytest.raises(OptionError, match=f"pip install '.\\[{extra}\\]'"):
            parse_target(name).devices()


def test_devices_of_cpu_targets_are_those_of_this_process():
    assert parse_target("cpu:3").devices() == jax.local_devices()[:3]
    assert find_accelerator(jax.local_devices()[0], known_accelerators()).key == "cpu"


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("TPU v5", "v5p"),
        ("TPU v5 lite", "v5e"),
    ],
)
def test_only_a_device_of_the_same_kind_is_a_known_accelerator(kind, key):
    found = find_accelerator(SimpleNamespace(device_kind=kind), known_accelerators())
    assert (found and found.key) == key
