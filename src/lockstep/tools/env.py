"""The environment: a line about this machine for reports and benchmarks, the output of ``lockstep env``, and variables that are set for a while."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lockstep._errors import ClusterError
from lockstep._version import __version__
from lockstep.cluster_resolver import resolve
from lockstep.devices.cpu_devices import usable_cores
from lockstep.devices.host_memory import first_line, host_memory, size_text
from lockstep.distributed.cluster.env_reader import visible_gpus
from lockstep.distributed.resolvers import notes_if_alone
from lockstep.launch.worker_environment import choose_allocator, glibc_version, library_folders

_PROCESSORS = Path("/proc/cpuinfo")


@contextmanager
def environment_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while this context is open."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def describe_machine() -> str:
    """Describe processor, cores, versions and date in one line, for example ``AMD EPYC, 2 cores; Python 3.11.7, jax 0.10.2, keras 3.15.1, keras-lockstep 0.1.0; …``."""
    names = re.findall(r"model name\s*: (.+)", _PROCESSORS.read_text()) if _PROCESSORS.exists() else []
    processor = names[0].strip() if names else platform.processor()
    versions = f"Python {platform.python_version()}, jax {version('jax')}, keras {version('keras')}, keras-lockstep {__version__}"
    return f"{processor}, {os.cpu_count()} cores; {versions}; {time.strftime('%Y-%m-%d')}."


_PACKAGES = ("keras-lockstep", "keras", "jax", "jaxlib", "numpy", "tensorflow", "torch", "grain")
_RELEVANT = re.compile(
    "(LOCKSTEP|KERAS|JAX|XLA|PJRT|CUDA|NCCL|SLURM|OMPI|PMIX|PET|RAY|JOB_COMPLETION|KUBERNETES_SERVICE|OMP|MALLOC|TCMALLOC|GLIBC)_.*"
    "|NPROC|TF_CONFIG|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|LD_PRELOAD|LD_LIBRARY_PATH|PYTHONPATH|(NO|HTTPS?)_PROXY",
    re.IGNORECASE,
)
# The URL of a proxy may contain a password.
_SECRET = re.compile("SECRET|TOKEN|JWT|AUTH|COOKIE|PASSWORD|PASSWD|KEY|CREDENTIAL|PROXY", re.IGNORECASE)
_DEVICES = "import jax, json, sys; sys.stdout.write(json.dumps([[str(one), one.device_kind] for one in jax.devices()]))"


def describe_environment(environment: Mapping[str, str], limit: float = 60.0) -> str:
    """Describe machine, packages, devices and environment, without secrets; JAX has ``limit`` seconds to list its devices."""
    allocator = choose_allocator(
        "auto", environment, library_folders(environment), glibc_version(), bool(visible_gpus(environment))
    )
    rows = {
        "machine": describe_machine(),
        "system": f"{platform.platform()}; C library {' '.join(platform.libc_ver()) or 'unknown'}",
        "cores": _cores(),
        "memory": _memory(),
        "python": f"{sys.version.split()[0]} at {sys.executable}",
        "packages": ", ".join(_versions()),
        "devices": _devices(environment, limit),
        "allocator": f"{allocator.name} under lockstep run",
        "cluster": _cluster(environment),
    }
    lines = [f"{name + ':':11}{value}" for name, value in rows.items()]
    return "\n".join([*lines, "environment:", *_variables(environment)])


def _variables(environment: Mapping[str, str]) -> Iterable[str]:
    shown = {name: value for name, value in sorted(environment.items()) if _RELEVANT.fullmatch(name)}
    if not shown:
        yield "  no relevant variable is set"
    for name, value in shown.items():
        yield f"  {name}={'(set, not shown)' if _SECRET.search(name) else value}"


def _cluster(environment: Mapping[str, str]) -> str:
    """Describe the cluster that a strategy created here would join."""
    try:
        resolver = resolve(environment)
    except ClusterError as error:
        return str(error)
    if resolver is None:
        return " ".join(["none: a program started here trains as a single process", *notes_if_alone(environment)])
    return repr(resolver)


def _versions() -> Iterable[str]:
    for package in _PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue


def _cores() -> str:
    quota = first_line(Path("/sys/fs/cgroup/cpu.max"))
    limited = ""
    if quota and not quota.startswith("max"):
        limit, period = map(int, quota.split())
        limited = f", cgroup quota {limit / period:g}"
    return f"{os.cpu_count()}, {usable_cores()} of them for this process{limited}"


def _memory() -> str:
    memory = host_memory()
    limited = "" if memory.limit is None else f", cgroup limit {size_text(memory.limit)}"
    return f"{size_text(memory.total)}{limited}"


def _devices(environment: Mapping[str, str], limit: float) -> str:
    """List the devices of JAX in a child process, as a driver may hang or crash."""
    command = [sys.executable, "-c", _DEVICES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=dict(environment))
    except subprocess.TimeoutExpired:
        return f"JAX listed no devices within {limit:g} s: a driver hangs, or another process holds the accelerator"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"JAX does not start: {last}"
    return ", ".join(f"{name} ({kind})" for name, kind in json.loads(done.stdout.splitlines()[-1]))
