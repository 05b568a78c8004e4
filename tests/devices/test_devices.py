"""Device names in every spelling that the tutorials use, and the thread pool of CPU devices."""

import contextlib
import sys

import jax
import pytest

import lockstep
from lockstep.devices import cpu_devices, xla_flags
from lockstep.devices.cpu_devices import check_shared_thread_pool
from lockstep.devices.names import parse_device_name
from lockstep.devices.xla_flags import describe_determinism


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpu:0", ("gpu", 0)),
        ("/gpu:1", ("gpu", 1)),
        ("GPU:0", ("gpu", 0)),
        ("/device:GPU:0", ("gpu", 0)),
        ("/device:gpu:3", ("gpu", 3)),
        ("device:CPU:2", ("cpu", 2)),
        ("cpu:1", ("cpu", 1)),
        (" /cpu:0 ", ("cpu", 0)),
        ("tpu:7", ("tpu", 7)),
        ("/job:localhost/replica:0/task:0/device:GPU:1", ("gpu", 1)),
    ],
)
def test_a_name_in_any_spelling(name, expected):
    assert parse_device_name(name) == expected


@pytest.mark.parametrize("name", ["", "gpu", "gpu:", "gpu:-1", "xpu:0", "gpu:0:1", "0"])
def test_no_name(name):
    with pytest.raises(lockstep.DeviceError, match=r"unknown device name .* Fix: pass a platform and a number"):
        parse_device_name(name)


def test_by_default_every_local_device_is_used():
    strategy = lockstep.MirroredStrategy()
    assert strategy.devices == tuple(f"cpu:{index}" for index in range(8))
    assert strategy.num_replicas_in_sync == 8


def test_names_and_devices_in_the_order_given():
    strategy = lockstep.MirroredStrategy(["/device:CPU:2", jax.local_devices()[0]], replicas=5)
    assert strategy.devices == ("cpu:2", "cpu:0")
    assert strategy.num_replicas_in_sync == 5
    assert repr(strategy) == "MirroredStrategy(devices=['cpu:2', 'cpu:0'], replicas=5)"


def test_a_pool_of_default_size_must_suffice_for_devices_that_wait_for_other_processes(monkeypatch):
    monkeypatch.setattr(cpu_devices, "_threads_set", None)  # by the fixtures, which have eight devices
    monkeypatch.setattr(cpu_devices, "usable_cores", lambda: 2)
    monkeypatch.setattr("jax.local_devices", lambda backend: [None])
    with pytest.raises(
        lockstep.DeviceError, match=r"1 CPU devices need a pool of 4 threads, .*; JAX has started with 2"
    ):
        check_shared_thread_pool(1, {})
    check_shared_thread_pool(1, {"PJRT_NPROC": "1"})  # As its user has set it.
    monkeypatch.setattr(cpu_devices, "usable_cores", lambda: 4)
    check_shared_thread_pool(1, {})


RESERVED = """
import jax, lockstep
from lockstep.devices.cpu_devices import reserve_devices
reserve_devices({reserved})
lockstep.config.set_logical_cpu_devices({count})
print(len(jax.devices()), lockstep.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync)
"""


@pytest.mark.parametrize(("reserved", "count", "found"), [(4, 2, 4), (1, 2, 2), (2, 5, 5)])
def test_a_program_that_runs_in_a_tool_gets_the_devices_of_both(python, reserved, count, found):
    """``lockstep plan`` and ``scale`` reserve devices before the program that they run asks for its own."""
    done = python(
        code=RESERVED.format(reserved=reserved, count=count), environ=dict.fromkeys(("XLA_FLAGS", "PJRT_NPROC"))
    )
    assert (done.returncode, done.stdout) == (0, f"{found} 2\n"), done.stderr


POOL = """
import os, lockstep
from lockstep.devices import cpu_devices
cpu_devices.usable_cores = lambda: 2
{make}
print(os.environ.get("PJRT_NPROC"), cpu_devices.pool_threads(os.environ))
"""


@pytest.mark.parametrize(
    ("make", "set_by_user", "found"),
    [
        ('for _ in range(2): lockstep.MirroredStrategy(["cpu:0", "cpu:1"])', None, "None 8"),
        ("lockstep.config.set_logical_cpu_devices(3)", None, "None 12"),
        ("lockstep.config.set_logical_cpu_devices(3)", "14", "14 14"),
        ("lockstep.config.set_deterministic(); lockstep.MirroredStrategy()", None, "None 16"),
    ],
    ids=["strategies", "logical devices", "set by the user", "deterministic"],
)
def test_child_processes_inherit_no_size_of_the_pool_but_that_of_the_user(python, make, set_by_user, found):
    """They would be refused more devices, and deterministic ones would have other bits than if they were started alone."""
    done = python(code=POOL.format(make=make), environ={"XLA_FLAGS": None, "PJRT_NPROC": set_by_user})
    assert (done.returncode, done.stdout) == (0, f"{found}\n"), done.stderr


def test_the_description_of_determinism_compares_with_the_pool_that_was_set():
    lockstep.config.set_deterministic(cpu_threads=32)  # That of the tests: they have eight devices.
    try:
        assert describe_determinism(jax.devices()[0]) == "deterministic, on a pool of 32 CPU threads"
    finally:
        lockstep.config.set_deterministic(False)


@pytest.mark.parametrize("has_accelerators", [True, False])
def test_determinism_with_a_pool_of_the_environment_does_not_start_jax(monkeypatch, has_accelerators):
    monkeypatch.setenv("PJRT_NPROC", "8")
    monkeypatch.setattr(cpu_devices, "has_started", lambda: False)
    monkeypatch.setattr(xla_flags, "has_started", lambda: False)
    monkeypatch.setattr(xla_flags, "start_with_threads", lambda *_: None)
    monkeypatch.setattr(xla_flags, "has_accelerators", lambda _: has_accelerators)
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: pytest.fail("JAX would start"))
    refused = pytest.raises(lockstep.DeviceError, match="PJRT_NPROC=8 sets a pool of 8 CPU threads, not 16")
    try:
        with contextlib.nullcontext() if has_accelerators else refused:
            lockstep.config.set_deterministic()
    finally:
        lockstep.config.set_deterministic(False)


def test_determinism_names_the_pool_with_which_jax_has_started():
    with pytest.raises(
        lockstep.DeviceError, match=r"JAX has started with a pool of 32 CPU threads, not 5\. Fix: call it"
    ):
        lockstep.config.set_deterministic(cpu_threads=5)  # The tests have 32.


TWICE = """
import lockstep
lockstep.config.set_deterministic()
lockstep.config.set_deterministic(cpu_threads=32)
"""


def test_determinism_with_two_sizes_of_the_pool_is_refused_before_jax_starts(python):
    done = python(code=TWICE, environ=dict.fromkeys(("XLA_FLAGS", "PJRT_NPROC")))
    message = "PJRT_NPROC=16 sets a pool of 16 CPU threads, not 32. Fix: unset it, or, if an earlier call"
    assert message in done.stderr
    assert done.returncode == 1


@pytest.mark.skipif(sys.platform != "linux", reason="cores of a process are those of Linux")
def test_the_default_pool_has_the_cores_that_the_process_may_use(monkeypatch):
    """XLA makes as many threads as the process may use cores, which may be fewer than the machine has."""
    monkeypatch.setattr(cpu_devices, "_threads_set", None)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    monkeypatch.setattr("jax.local_devices", lambda backend: [None])
    assert cpu_devices.pool_threads({}) == 1
