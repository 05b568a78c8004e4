"""What is particular to one scheduler: who shares a machine, where worker 0 is, and what contradicts itself."""

import pytest

import lockstep
from lockstep.cluster_resolver import (
    JaxClusterResolver,
    KubernetesClusterResolver,
    LeaderWorkerSetClusterResolver,
    OpenMpiClusterResolver,
    RayClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TorchrunClusterResolver,
    TpuPodClusterResolver,
    resolve,
)
from lockstep.distributed.cluster.addresses import JOB_PORTS, port_of_job
from lockstep.distributed.resolvers.ray_train import RayTrain

from .cases import (
    Context,
    FakeRay,
    job_set,
    kubeflow,
    kubernetes,
    leader_worker_set,
    open_mpi,
    open_mpi_4,
    open_mpi_5,
    ray,
    slurm,
    tf,
    tf_config,
    torchrun,
    tpu,
    tpu_slices,
)

ON_TWO = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
PLACES = [(0, 0), (0, 1), (1, 0)]  # of three workers on two machines: the machine, and the place on it


def on_two_machines():
    worker = {"worker": ["n1:1", "N1:2", "n2:1"]}
    yield "TF_CONFIG", lambda index, machine, local: tf(tf_config(index, worker))
    yield "Simple", lambda index, *_: SimpleClusterResolver(worker, task_type="worker", task_id=index, environ={})
    yield (
        "torchrun",
        lambda index, machine, local: TorchrunClusterResolver(torchrun(index, 3, local, 2 - machine)),
    )
    yield "Slurm", lambda index, machine, local: SlurmClusterResolver(slurm(index, machine, local, **ON_TWO))
    yield (
        "Open MPI",
        lambda index, machine, local: OpenMpiClusterResolver(
            open_mpi_5(0) | open_mpi(index, 3, local, 2 - machine) | {"PMIX_HOSTNAME": f"n{machine + 1}"}
        ),
    )
    yield (
        "Ray Train",
        lambda index, machine, local: RayClusterResolver(ray(0), ray=FakeRay(Context(index, 3, local, 2 - machine))),
    )


@pytest.mark.parametrize(
    ("name", "make"), list(on_two_machines()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_workers_of_one_machine_know_their_number_there(name, make):
    groups = [make(index, machine, local).group() for index, (machine, local) in enumerate(PLACES)]
    assert [(group.local_index, group.local_workers) for group in groups] == [(0, 2), (1, 2), (0, 1)]
    assert [group.index for group in groups] == [0, 1, 2]
    assert len({group.coordinator for group in groups}) == 1


# The coordinator's port.


def test_the_port_is_never_that_of_pytorchs_store():
    for taken in range(JOB_PORTS.start - 100, JOB_PORTS.stop + 100):
        group = TorchrunClusterResolver({**torchrun(1), "MASTER_PORT": str(taken)}).group()
        host, port = group.coordinator.split(":")
        assert host == "n1"
        assert int(port) != taken
        assert int(port) in JOB_PORTS


def test_jobs_and_steps_that_run_at_once_have_ports_of_their_own():
    def ports(job, step):
        environ = slurm(1, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step))
        return {address.split(":")[1] for address in SlurmClusterResolver(environ).group().addresses}

    assert all(ports(41, 0).isdisjoint(ports(job, step)) for job in range(42, 200) for step in range(3))
    assert ports(41, 0).isdisjoint(ports(41, 1))
    assert SlurmClusterResolver({k: v for k, v in slurm(1).items() if k != "SLURM_STEP_ID"}).group().addresses


def test_ports_of_jobs_stay_in_their_range():
    assert {port_of_job(number) for number in range(5000)} <= set(JOB_PORTS)
    assert {port_of_job(f"prterun-n1-{number}@1") for number in range(5000)} <= set(JOB_PORTS)


# torchrun and Kubeflow.


def test_one_name_of_pytorch_alone_is_not_torchrun():
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        assert resolve({name: "3", "MASTER_PORT": "29500"}) is None
    with pytest.raises(lockstep.ClusterError, match="WORLD_SIZE, the number of processes, is not set"):
        resolve({"RANK": "3", "MASTER_ADDR": "n1"})


def test_one_number_of_jax_is_not_overlooked():
    for name, missing in (("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"), ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")):
        with pytest.raises(lockstep.ClusterError, match=f"{missing}, .* is not set"):
            resolve({name: "3"})
    assert resolve({"JAX_COORDINATOR_ADDRESS": "n1:1"}) is None


def test_a_process_that_trains_alone_needs_no_address():
    alone = ({"RANK": "0", "WORLD_SIZE": "1"}, {"PET_NNODES": "1", "PET_NODE_RANK": "0"})
    for environ in (*alone, {"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "1"}):
        assert resolve(environ).group().coordinator == "127.0.0.1:12421"


def test_kubeflow_without_torchrun_is_one_process_a_machine():
    group = TorchrunClusterResolver({**kubeflow(1), "PET_NPROC_PER_NODE": "4"}).group()
    assert (group.workers, group.local_workers) == (3, 1)
    (note,) = group.notes
    assert "PET_NPROC_PER_NODE is 4, but nothing has started more than this process here" in note
    assert TorchrunClusterResolver({**kubeflow(1), "PET_NPROC_PER_NODE": "1"}).group().notes == ()
    under_torchrun = {**kubeflow(1), **torchrun(5, 12, 1, 4)}
    assert TorchrunClusterResolver(under_torchrun).group().workers == 12


def test_a_range_of_machines_is_for_torchrun_to_decide():
    with pytest.raises(lockstep.ClusterError, match="PET_NNODES is '1:3', a range that torchrun decides on"):
        TorchrunClusterResolver({**kubeflow(1), "PET_NNODES": "1:3"})


# Worker 0 must be reachable.


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "LOCALHOST"])
@pytest.mark.parametrize(
    "make",
    [
        lambda host: TorchrunClusterResolver(torchrun(1, host=host)),
        lambda host: TorchrunClusterResolver({**kubeflow(1), "PET_MASTER_ADDR": host}),
        lambda host: tf(tf_config(1, {"worker": [f"{host}:1", "n2:1"]})),
        lambda host: SlurmClusterResolver(slurm(1, LOCKSTEP_COORDINATOR=f"{host}:5000")),
        lambda host: OpenMpiClusterResolver({**open_mpi_5(1), "LOCKSTEP_COORDINATOR": f"{host}:5000"}),
        lambda host: RayClusterResolver(ray(1), ray=FakeRay(Context(1), host)),
        lambda host: KubernetesClusterResolver({**kubernetes(1), "LOCKSTEP_COORDINATOR": f"{host}:5000"}),
        lambda host: LeaderWorkerSetClusterResolver({**leader_worker_set(1), "LWS_LEADER_ADDRESS": host}),
        lambda host: TpuPodClusterResolver({**tpu(1), "LOCKSTEP_COORDINATOR": f"{host}:5000"}),
        lambda host: TpuPodClusterResolver({**tpu_slices(1), "MEGASCALE_COORDINATOR_ADDRESS": host}),
    ],
    ids=[
        *("torchrun", "Kubeflow", "TF_CONFIG", "Slurm", "Open MPI", "Ray Train", "Kubernetes"),
        *("LeaderWorkerSet", "TPU", "TPU slices"),
    ],
)
def test_a_loopback_address_of_worker_0_is_refused_on_several_machines(make, host):
    message = rf"worker 0 of [23] \({host}:\d+\) cannot be reached by workers on other machines.* LOCKSTEP_COORDINATOR="
    with pytest.raises(lockstep.ClusterError, match=message):
        make(host)


def test_a_loopback_address_is_right_on_one_machine():
    for resolver in (
        TorchrunClusterResolver(torchrun(1, 3, 1, 3, "localhost")),
        OpenMpiClusterResolver(open_mpi(1, 3, 1, 3)),
        JaxClusterResolver({"JAX_COORDINATOR_ADDRESS": "[::1]:1", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "1"}),
        tf(tf_config(1, {"worker": ["localhost:1", "localhost:2", "127.0.0.1:3"]})),
    ):
        assert resolver.group().workers == 3


# Slurm.


def test_addresses_follow_the_distribution_of_tasks():
    cluster = {"SLURM_STEP_NODELIST": "a,b", "SLURM_STEP_TASKS_PER_NODE": "2,1"}

    def hosts(node, local, **others):
        group = SlurmClusterResolver(slurm(1, node, local, **cluster, **others)).group()
        return group.addresses and [address.split(":")[0] for address in group.addresses]

    for way in ("block", "block:cyclic", "*:block", "block,NoPack"):
        assert hosts(0, 1) == hosts(0, 1, SLURM_DISTRIBUTION=way) == ["a", "a", "b"]
    assert (
        hosts(1, 0, SLURM_DISTRIBUTION="cyclic")
        == hosts(1, 0, SLURM_DISTRIBUTION="cyclic:block,Pack")
        == ["a", "b", "a"]
    )
    assert hosts(0, 1, SLURM_DISTRIBUTION="plane=2") is None
    assert hosts(1, 0) is None  # The site distributes otherwise by default.


def test_task_0_must_be_on_the_first_node():
    with pytest.raises(lockstep.ClusterError, match=r"task 0 runs on n2, but .* LOCKSTEP_COORDINATOR=n2:PORT"):
        SlurmClusterResolver(slurm(0, 1, SLURM_DISTRIBUTION="arbitrary"))
    fixed = slurm(0, 1, SLURM_DISTRIBUTION="arbitrary", LOCKSTEP_COORDINATOR="n2:5000")
    assert SlurmClusterResolver(fixed).group().coordinator == "n2:5000"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SLURM_STEP_TASKS_PER_NODE", "1(x2)", "is 3, but SLURM_STEP_TASKS_PER_NODE has 2 tasks on 2 nodes"),
        ("SLURM_STEP_TASKS_PER_NODE", "2,1", "SLURM_STEP_NODELIST has 3 nodes: expected the same numbers"),
        ("SLURM_STEP_TASKS_PER_NODE", "1x3", r"number of tasks on each node: expected numbers such as '2\(x3\),1'"),
        ("SLURM_STEP_NODELIST", "n[1-3", r"the nodes of the step: expected a node list .*, got 'n\[1-3'"),
        ("SLURM_STEP_NODELIST", "", "^Slurm: SLURM_STEP_NODELIST, the nodes of the step, is ''"),
        ("SLURM_NODEID", "3", "SLURM_NODEID, .* from 0 to 2, got '3'"),
        ("SLURM_LOCALID", "1", "SLURM_LOCALID, .* from 0 to 0, got '1'"),
    ],
)
def test_variables_of_slurm_that_contradict_each_other(name, value, message):
    with pytest.raises(lockstep.ClusterError, match=message):
        SlurmClusterResolver(slurm(1, **{name: value}))


# TPU pods.


def test_hosts_of_slices_are_counted_slice_by_slice_as_in_jax():
    groups = [TpuPodClusterResolver(tpu_slices(number, 2, here, "c,d")).group() for number in (0, 1) for here in (0, 1)]
    assert [(group.workers, group.index) for group in groups] == [(4, 0), (4, 1), (4, 2), (4, 3)]
    assert {(group.coordinator, group.addresses) for group in groups} == {("n1:12421", None)}


def test_ports_of_libtpu_are_no_part_of_a_host():
    environ = {"TPU_WORKER_ID": "1", "TPU_PROCESS_ADDRESSES": "n1:8471, [fd00::7]:8471,n3"}
    assert TpuPodClusterResolver(environ).group().addresses == ("n1:12421", "[fd00::7]:12421", "n3:12421")
    one_machine = {"TPU_WORKER_ID": "1", "TPU_PROCESS_ADDRESSES": "localhost:8476,localhost:8477"}
    group = TpuPodClusterResolver(one_machine).group()
    assert (group.workers, group.coordinator, group.addresses) == (2, "localhost:12421", None)


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        ({"TPU_WORKER_ID": "1"}, "TPU_WORKER_HOSTNAMES, the hosts of the slice"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID, the number of this one of 2 hosts"),
        ({**tpu(0, "a"), "MEGASCALE_SLICE_ID": "0"}, "MEGASCALE_NUM_SLICES, the number of slices"),
        ({**tpu(0, "a"), "MEGASCALE_COORDINATOR_ADDRESS": "a"}, "MEGASCALE_NUM_SLICES, the number of slices"),
        ({**tpu(0, "a"), "MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_SLICE_ID, the number of this one of 2 slices"),
    ],
)
def test_incomplete_variables_of_a_tpu_pod_are_named(environ, missing):
    with pytest.raises(lockstep.ClusterError, match=rf"^the TPU pod: {missing}.* is not set\. Fix: set it as GKE does"):
        resolve(environ)


# Open MPI.


def test_processes_of_one_machine_need_no_address():
    group = OpenMpiClusterResolver({**open_mpi(2, 3, 2, 3), "PMIX_NAMESPACE": "447676417"}).group()
    assert group.coordinator == f"127.0.0.1:{port_of_job('447676417')}"
    assert OpenMpiClusterResolver(open_mpi(2, 3, 2, 3)).group().coordinator == "127.0.0.1:12421"


def test_nobody_says_where_mpirun_is():
    with pytest.raises(
        lockstep.ClusterError, match=r"neither OMPI_MCA_orte_hnp_uri nor PMIX_NAMESPACE .*mpirun -x LOCKSTEP"
    ):
        OpenMpiClusterResolver(open_mpi(1))


@pytest.mark.parametrize(
    "elsewhere",
    [
        {**open_mpi_5(0), "PMIX_HOSTNAME": "n9"},
        {**open_mpi_4(0), "OMPI_MCA_orte_local_daemon_uri": "447676416.1;tcp://10.0.0.9:1", "PMIX_HOSTNAME": "n9"},
    ],
    ids=["5", "4"],
)
def test_mpirun_is_not_where_worker_0_is(elsewhere):
    with pytest.raises(
        lockstep.ClusterError, match=r"for worker 0 on (n1|10\.0\.0\.1), where mpirun runs, .* runs on n9\."
    ):
        OpenMpiClusterResolver(elsewhere)


def test_an_address_of_mpirun_of_version_6():
    environ = {
        **open_mpi_4(1),
        "OMPI_MCA_orte_hnp_uri": "447676416.0;tcp6://[fd00::1,fd00::2]:39533",
        "LOCKSTEP_PORT": "9",
    }
    assert OpenMpiClusterResolver(environ).group().coordinator == "[fd00::1]:9"


# Kubernetes.


def test_pods_of_several_jobs_of_a_job_set():
    environ = {**job_set(1), "JOB_COMPLETIONS": "2", "JOB_COMPLETION_INDEX": "1", "SERVICE_NAME": "net"}
    group = KubernetesClusterResolver(environ).group()
    assert (group.workers, group.index) == (6, 3)
    assert group.addresses[:4] == tuple(f"all-train-{job}-{pod}.net:12421" for job in (0, 1) for pod in (0, 1))


# Ray.


class Module:
    """Stands for ``ray``, ``ray.train``, ``ray.util`` and ``ray.train.collective``."""

    def __init__(self, context=None, error=None):
        self.context, self.error, self.util = context, error, self

    def get_context(self):
        if self.error:
            raise self.error
        return self.context

    def get_node_ip_address(self):
        return "10.0.0.2"

    def broadcast_from_rank_zero(self, own):
        assert own == "10.0.0.2"
        return "10.0.0.1"


@pytest.mark.parametrize(
    "modules",
    [
        {},
        {"ray.train": Module(error=RuntimeError("outside of a training function"))},
        {"ray.train": Module(error=DeprecationWarning("in Ray Tune"))},
        {"ray.train": Module(Context(0, 0))},
    ],
)
def test_a_process_of_ray_that_is_no_worker_of_ray_train(modules):
    assert not RayClusterResolver.is_present(ray(0), RayTrain(modules))
    with pytest.raises(
        lockstep.ClusterError, match=r"this is no worker of Ray Train\. Fix: make the strategy in the function"
    ):
        RayClusterResolver(ray(0), ray=RayTrain(modules))


def test_worker_0_tells_the_others_of_ray_train_where_it_is():
    modules = {"ray": Module(), "ray.train": Module(Context(1))}
    asked = RayTrain(modules, {"ray.train.collective": Module()}.__getitem__)
    assert RayClusterResolver.is_present(ray(1), asked)
    assert not RayClusterResolver.is_present({}, asked)
    assert RayClusterResolver(ray(1), ray=asked).group().coordinator == f"10.0.0.1:{port_of_job('01000000')}"


def test_a_ray_that_cannot_tell_where_worker_0_is():
    asked = RayTrain({"ray": Module(), "ray.train": Module(Context(1))})
    with pytest.raises(
        lockstep.ClusterError, match=r"cannot tell the others its address.* set LOCKSTEP_COORDINATOR=HOST:PORT"
    ):
        RayClusterResolver(ray(1), ray=asked)
    fixed = {**ray(1), "LOCKSTEP_COORDINATOR": "n1:5000"}
    assert RayClusterResolver(fixed, ray=asked).group().coordinator == "n1:5000"
    assert RayClusterResolver(ray(0), ray=FakeRay(Context(0, 1))).group().coordinator == "127.0.0.1:12421"


def test_a_job_set_whose_name_has_spaces_around_it_has_one_name_for_pods_and_service():
    plain, spaced = (
        KubernetesClusterResolver({**job_set(1), "JOBSET_NAME": name}).group().addresses for name in ("all", " all ")
    )
    assert spaced == plain
