"""One cluster of three workers on three machines, as each scheduler tells it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.cluster_resolver import (
    ClusterResolver,
    JaxClusterResolver,
    KubernetesClusterResolver,
    LeaderWorkerSetClusterResolver,
    OpenMpiClusterResolver,
    RayClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    TpuPodClusterResolver,
)
from lockstep.distributed.resolvers.ray_train import RayTrain

PORT = 12421
HOSTS = ("n1", "n2", "n3")


@dataclass(frozen=True)
class Case:
    """``variables(index)`` are those of one process; without LOCKSTEP_PORT, which makes the ports equal."""

    name: str
    make: Callable[[Mapping[str, str]], ClusterResolver]
    variables: Callable[[int], dict[str, str]]
    hosts: tuple[str, str, str] = HOSTS
    knows_addresses: bool = False
    required: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(f"{host}:{PORT}" for host in self.hosts)


def torchrun(index: int, workers: int = 3, local: int = 0, here: int = 1, host: str = "n1") -> dict[str, str]:
    environ = {"RANK": index, "WORLD_SIZE": workers, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": here}
    return {name: str(number) for name, number in environ.items()} | {"MASTER_ADDR": host, "MASTER_PORT": "29500"}


def kubeflow(index: int) -> dict[str, str]:
    environ = {"PET_NNODES": "3", "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": "auto"}
    return {**environ, "PET_MASTER_ADDR": "n1", "PET_MASTER_PORT": "29500"}


def jax(index: int) -> dict[str, str]:
    return {"JAX_COORDINATOR_ADDRESS": f"n1:{PORT}", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": str(index)}


def slurm(index: int, node: int | None = None, local: int = 0, **others: str) -> dict[str, str]:
    environ = {"SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3"}
    environ |= {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_PROCID": str(index)}
    return environ | {"SLURM_NODEID": str(index if node is None else node), "SLURM_LOCALID": str(local)} | others


def open_mpi(index: int, workers: int = 3, local: int = 0, here: int = 1) -> dict[str, str]:
    environ = {"RANK": index, "SIZE": workers, "LOCAL_RANK": local, "LOCAL_SIZE": here}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in environ.items()}


def open_mpi_5(index: int) -> dict[str, str]:
    return open_mpi(index) | {"PMIX_NAMESPACE": "prterun-n1-29270@1", "PMIX_HOSTNAME": f"n{index + 1}.cluster"}


def open_mpi_4(index: int) -> dict[str, str]:
    launcher = "447676416.0;tcp://10.0.0.1,10.1.0.1:49085;tcp6://[fd00::1]:39533"
    daemon = launcher if index == 0 else f"447676416.{index};tcp://10.0.0.{index + 1}:50000"
    environ = {"OMPI_MCA_orte_hnp_uri": launcher, "OMPI_MCA_orte_local_daemon_uri": daemon}
    return open_mpi(index) | environ | {"PMIX_NAMESPACE": "447676417"}


def kubernetes(index: int) -> dict[str, str]:
    environ = {"JOB_COMPLETION_INDEX": str(index), "JOB_COMPLETIONS": "3"}
    return {**environ, "JOB_NAME": "train", "SERVICE_NAME": "pods"}


def job_set(index: int) -> dict[str, str]:
    environ = {"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "1", "JOB_INDEX": str(index)}
    return {**environ, "JOBSET_NAME": "all", "REPLICATED_JOB_NAME": "train", "REPLICATED_JOB_REPLICAS": "3"}


def leader_worker_set(index: int, workers: int = 3) -> dict[str, str]:
    environ = {"LWS_GROUP_SIZE": str(workers), "LWS_WORKER_INDEX": str(index)}
    return {**environ, "LWS_LEADER_ADDRESS": "train-0.train.default"}


def tpu(index: int, hosts: str = "n1,n2,n3") -> dict[str, str]:
    return {"TPU_WORKER_ID": str(index), "TPU_WORKER_HOSTNAMES": hosts}


def tpu_slices(index: int, slices: int = 3, here: int = 0, hosts: str = "localhost") -> dict[str, str]:
    environ = {"MEGASCALE_NUM_SLICES": str(slices), "MEGASCALE_SLICE_ID": str(index)}
    return {**tpu(here, hosts), **environ, "MEGASCALE_COORDINATOR_ADDRESS": "n1:8080"}


def ray(index: int) -> dict[str, str]:
    return {"RAY_JOB_ID": "01000000", "INDEX": str(index)}


def tf_config(index: object, jobs: object = None, job: object = "worker") -> dict[str, str]:
    cluster = {"worker": [f"{host}:{PORT}" for host in HOSTS]} if jobs is None else jobs
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


@dataclass(frozen=True)
class Context:
    """Stands for Ray's."""

    rank: int
    workers: int = 3
    local: int = 0
    here: int = 1

    def get_world_rank(self):
        return self.rank

    def get_world_size(self):
        return self.workers

    def get_local_rank(self):
        return self.local

    def get_local_world_size(self):
        return self.here


class FakeRay(RayTrain):
    def __init__(self, context, host="n1"):
        self._context = context
        self._host = host

    def context(self):
        return self._context

    def host_of_chief(self):
        return self._host


def in_ray(environ):
    return RayClusterResolver(environ, ray=FakeRay(Context(int(environ.get("INDEX", 0)))))


def simple(environ):
    cluster = {"worker": [f"{host}:{PORT}" for host in HOSTS]}
    return SimpleClusterResolver(cluster, task_type="worker", task_id=int(environ["INDEX"]), environ=environ)


def tf(environ):
    return TFConfigClusterResolver(environ=environ)


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_KUBEFLOW = ("PET_NODE_RANK", "PET_MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_JOB_ID")
_OPEN_MPI = tuple(open_mpi(0))
_JOB = ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS")
_JOB_SET = (*_JOB, "JOB_INDEX", "REPLICATED_JOB_REPLICAS")

CASES = (
    Case("Simple", simple, lambda index: {"INDEX": str(index)}, knows_addresses=True),
    Case("TF_CONFIG", tf, tf_config, knows_addresses=True, required=("TF_CONFIG",)),
    Case(
        *("torchrun", TorchrunClusterResolver, torchrun),
        required=("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
        numbers=_TORCHRUN,
    ),
    Case(
        *("Kubeflow", TorchrunClusterResolver, kubeflow),
        required=(*_KUBEFLOW, "PET_MASTER_ADDR"),
        numbers=(*_KUBEFLOW, "PET_NNODES"),
    ),
    Case(
        *("JAX", JaxClusterResolver, jax),
        required=tuple(jax(0)),
        numbers=("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    ),
    Case("Open MPI 5", OpenMpiClusterResolver, open_mpi_5, required=_OPEN_MPI, numbers=_OPEN_MPI),
    Case(
        *("Open MPI 4", OpenMpiClusterResolver, open_mpi_4, ("10.0.0.1", "10.0.0.2", "10.0.0.3")),
        required=_OPEN_MPI,
        numbers=_OPEN_MPI,
    ),
    Case("Ray Train", in_ray, ray, required=("RAY_JOB_ID",)),
    Case(
        *("Slurm", SlurmClusterResolver, slurm),
        knows_addresses=True,
        required=(*_SLURM, "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"),
        numbers=(*_SLURM, "SLURM_STEP_NUM_TASKS"),
    ),
    Case("TPU", TpuPodClusterResolver, tpu, knows_addresses=True, required=tuple(tpu(0)), numbers=("TPU_WORKER_ID",)),
    Case(
        *("TPU slices", TpuPodClusterResolver, tpu_slices),
        required=tuple(tpu_slices(0)),
        numbers=("TPU_WORKER_ID", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"),
    ),
    Case(
        *("LeaderWorkerSet", LeaderWorkerSetClusterResolver, leader_worker_set),
        ("train-0.train.default", "", ""),
        required=tuple(leader_worker_set(0)),
        numbers=("LWS_GROUP_SIZE", "LWS_WORKER_INDEX"),
    ),
    Case(
        *("Kubernetes", KubernetesClusterResolver, kubernetes, ("train-0.pods", "train-1.pods", "train-2.pods")),
        knows_addresses=True,
        required=tuple(kubernetes(0)),
        numbers=_JOB,
    ),
    Case(
        *("JobSet", KubernetesClusterResolver, job_set),
        ("all-train-0-0.all", "all-train-1-0.all", "all-train-2-0.all"),
        knows_addresses=True,
        required=(*_JOB_SET, "REPLICATED_JOB_NAME"),
        numbers=_JOB_SET,
    ),
)
