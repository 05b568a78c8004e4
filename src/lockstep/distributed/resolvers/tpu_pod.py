"""Cluster resolver for the hosts of a TPU pod: one slice, or several slices (Multislice)."""

from collections.abc import Mapping

from lockstep.distributed.cluster.addresses import DEFAULT_PORT, join_address, resolve_coordinator
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.cluster.membership import Membership, WorkerGroup, check_reachable, membership_of_group
from lockstep.distributed.resolvers.base import EnvironmentResolver

_WORKER = "TPU_WORKER_ID"
_HOSTS = "TPU_WORKER_HOSTNAMES"
_PROCESSES = "TPU_PROCESS_ADDRESSES"  # The same hosts, with ports of libtpu; JAX reads it first.
_COORDINATOR, _SLICES, _SLICE = "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"


class TpuPodClusterResolver(EnvironmentResolver):
    """The hosts of one TPU slice, or of several slices (Multislice), one process each.

    Google Kubernetes Engine, LeaderWorkerSet and Ray set ``TPU_WORKER_ID`` and ``TPU_WORKER_HOSTNAMES`` or
    ``TPU_PROCESS_ADDRESSES``; for several slices also ``MEGASCALE_COORDINATOR_ADDRESS``, ``MEGASCALE_NUM_SLICES`` and
    ``MEGASCALE_SLICE_ID``. Workers are counted slice by slice, as in JAX. TPU VMs outside of Kubernetes have no such variables: call
    ``jax.distributed.initialize()`` before the strategy there, and Lockstep uses the processes of JAX.

    Args:
        environ: has these variables.

    Raises:
        ClusterError: one is missing, has a value that it cannot have, or contradicts another.

    Example:
        >>> from lockstep.cluster_resolver import TpuPodClusterResolver
        >>> TpuPodClusterResolver({"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"})
        <TpuPodClusterResolver: worker 1 of 2 (b:12421), worker 0 at a:12421, from the TPU pod>
        >>> slices = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "a:8080"}
        >>> TpuPodClusterResolver({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "c,d"} | slices)
        <TpuPodClusterResolver: worker 2 of 4, worker 0 at a:12421, from the TPU pod>
    """

    source = "the TPU pod"
    variables = (_WORKER, _HOSTS, _PROCESSES, _COORDINATOR, _SLICES, _SLICE)
    fix = "set it as GKE does, or call jax.distributed.initialize() before the strategy, which then uses the processes of JAX."

    @classmethod
    def is_present(cls, environ: Mapping[str, str]) -> bool:
        """True if the variables name several hosts or slices, or belong to such; a TPU VM with one host trains alone."""
        return _is_sliced(environ) or len(_hosts(environ)) > 1 or environ.get(_WORKER, "").strip() not in ("", "0")

    @classmethod
    def unused_variables(cls, environ: Mapping[str, str]) -> list[str]:
        """Return the number of this host if no variable names the hosts."""
        return [name for name in (_WORKER,) if name in environ and not _hosts(environ)]

    def _read(self, variables: EnvReader) -> Membership:
        if not _hosts(variables.environ):
            variables.text(_HOSTS, "the hosts of the slice")
        hosts = _hosts(variables.environ)
        here = variables.integer(_WORKER, f"the number of this one of {len(hosts)} hosts", maximum=len(hosts) - 1)
        number, slices = (0, 1)
        if _is_sliced(variables.environ):
            number, slices = variables.index_and_count(_SLICE, _SLICES, "slices")
        host = hosts[0] if slices == 1 else _host(variables.text(_COORDINATOR, "the host of worker 0"))
        coordinator = resolve_coordinator(variables.environ, lambda: (host, DEFAULT_PORT))
        addresses = None
        if slices == 1 and len(set(hosts)) == len(hosts):
            addresses = (coordinator, *(join_address(other, DEFAULT_PORT) for other in hosts[1:]))
        group = WorkerGroup(len(hosts) * slices, number * len(hosts) + here, coordinator, addresses, source=self.source)
        if slices > 1:
            check_reachable(group)
        return membership_of_group(group)


def _is_sliced(environ: Mapping[str, str]) -> bool:
    """Whether a variable speaks of slices; those of a single slice may be set, too."""
    is_named = any(environ.get(name, "").strip() for name in (_COORDINATOR, _SLICES, _SLICE))
    return is_named and environ.get(_SLICES, "").strip() != "1"


def _hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of this slice, one for each process; none if no variable names them."""
    named = environ.get(_PROCESSES, "").strip() or environ.get(_HOSTS, "").strip()
    return [_host(part) for part in named.split(",")] if named else []


def _host(address: str) -> str:
    """Return the host of ``host``, ``host:port`` or ``[IPv6]:port``."""
    bare = address.strip()
    if bare.startswith("["):
        return bare[1:].partition("]")[0]
    return bare.partition(":")[0] if bare.count(":") == 1 else bare
