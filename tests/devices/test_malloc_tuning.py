"""Memory that is given back is used again: what a large temporary costs is seen from the page faults of a fresh process."""

import os
import platform
import subprocess
import sys

import pytest

from lockstep.devices.host_memory import keep_memory

MEGABYTES, TIMES = 48, 20  # glibc keeps what is below 32 MB by itself, as long as it is alone
PROGRAM = """
import resource
{setup}
size = {megabytes} << 20
b"x" * size
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({times}):
    b"x" * size
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
SETUPS = {
    "nothing": "",
    "keep_memory": "from lockstep.devices.host_memory import keep_memory; assert keep_memory()",
    "a strategy": "import lockstep; lockstep.MirroredStrategy(['cpu:0'])",
}

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


def faults(setup, **environment):
    """Page faults of arrays that are made and given up again."""
    own = {name: value for name, value in os.environ.items() if "MALLOC" not in name and "TUNABLES" not in name}
    code = PROGRAM.format(setup=SETUPS[setup], megabytes=MEGABYTES, times=TIMES)
    done = subprocess.run(
        [sys.executable, "-c", code], env=own | environment, capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


@pytest.mark.slow
def test_memory_is_kept():
    pages = TIMES * MEGABYTES * 2**20 // os.sysconf("SC_PAGE_SIZE")
    assert faults("nothing") > pages / 2
    assert faults("keep_memory") < pages / 10


@pytest.mark.slow
def test_a_strategy_on_cpus_keeps_it_unless_told_otherwise():
    assert faults("a strategy") < faults("a strategy", LOCKSTEP_KEEP_MEMORY="0") / 5


@pytest.mark.parametrize(
    "environment",
    [
        {"LOCKSTEP_KEEP_MEMORY": "0"},
        {"LD_PRELOAD": "/usr/lib/libtcmalloc.so.4"},
        {"MALLOC_ARENA_MAX": "4"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"},
    ],
)
def test_what_the_user_has_set_stays(environment):
    assert not keep_memory(environment)
