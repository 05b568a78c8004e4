"""What every resolver must do, whatever its scheduler; then in which order they are looked for."""

import json
import re
import subprocess
import sys
from types import MappingProxyType

import pytest
from jax import local_devices as jax_devices

import lockstep
from lockstep.cluster_resolver import (
    RESOLVERS,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    WorkerGroup,
    resolve,
)
from lockstep.distributed.resolvers import notes_if_alone

from .cases import (
    CASES,
    PORT,
    jax,
    kubernetes,
    leader_worker_set,
    open_mpi,
    open_mpi_5,
    slurm,
    tf_config,
    torchrun,
    tpu,
    tpu_slices,
)

FROM_ENVIRONMENT = [case for case in CASES if case.required]


def of_cases(cases=CASES):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def with_names(field):
    pairs = [(case, name) for case in CASES for name in getattr(case, field)]
    return pytest.mark.parametrize(("case", "name"), pairs, ids=lambda value: getattr(value, "name", value))


def environ_of(case, index=1, **others):
    return MappingProxyType({**case.variables(index), "LOCKSTEP_PORT": str(PORT), **others})


def of_spec(cluster, **others):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}, **others})}


@of_cases()
@pytest.mark.parametrize("index", range(3))
def test_the_same_cluster_gives_the_same_group(case, index):
    resolver = case.make(environ_of(case, index))
    group = resolver.group()
    expected = case.addresses if case.knows_addresses else None
    assert group == WorkerGroup(3, index, f"{case.hosts[0]}:{PORT}", expected, source=group.source)
    assert group.is_chief == (index == 0)
    assert (resolver.task_type, resolver.task_id) == ("worker", index)
    assert resolver.cluster_spec().task_address("worker", 0) == group.coordinator
    assert resolver.cluster_spec().num_tasks("worker") == (3 if case.knows_addresses else 1)


@of_cases()
def test_it_says_what_it_saw(case):
    resolver = case.make(environ_of(case))
    here = f"worker 1 of 3 ({case.addresses[1]})," if case.knows_addresses else "worker 1 of 3,"
    assert f" {here} worker 0 at {case.addresses[0]}, from {resolver.group().source}>" in repr(resolver)


@of_cases()
def test_nothing_but_the_mapping_is_read(case, monkeypatch):
    expected = case.make(environ_of(case, 2)).group()
    for name in case.variables(0):
        monkeypatch.setenv(name, "nonsense")
    monkeypatch.setenv("LOCKSTEP_COORDINATOR", "nonsense")
    assert case.make(environ_of(case, 2)).group() == expected


@of_cases(FROM_ENVIRONMENT)
def test_it_is_present_with_its_variables_and_not_without(case):
    if case.name != "Ray Train":
        assert type(case.make(environ_of(case))).is_present(case.variables(1))
        assert isinstance(resolve(environ_of(case)), type(case.make(environ_of(case))))
    assert not any(resolver.is_present({"PATH": "/bin", "LOCKSTEP_PORT": "1"}) for resolver in RESOLVERS)


@with_names("required")
@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_missing_variable_is_named(case, name, value):
    environ = {**environ_of(case), name: value}
    if value is None:
        del environ[name]
    state = "is not set" if value is None else f"is {value!r}"
    with pytest.raises(lockstep.ClusterError, match=rf"{name}, [\w' ().]+, {state}\. [A-Z].*\S\.?$"):
        case.make(environ)


@with_names("numbers")
@pytest.mark.parametrize("value", ["x", "-1", "1.5", "0x1", "²", "٣", "1 2"])
def test_what_is_no_number_is_shown_with_what_was_expected(case, name, value):
    with pytest.raises(
        lockstep.ClusterError, match=f"{name}, .*: expected a whole number .*, got {re.escape(repr(value))}"
    ):
        case.make({**environ_of(case), name: value})


@with_names("numbers")
def test_a_number_of_more_digits_than_python_reads_is_refused(case, name):
    with pytest.raises(lockstep.ClusterError, match=rf"{name}, .*: expected a whole number .*, got '9+…\. Fix: "):
        case.make({**environ_of(case), name: "9" * 5000})


@pytest.mark.parametrize("number", ["task", "key", "port"])
def test_a_number_of_more_digits_than_python_reads_is_refused_in_tf_config(number):
    long = "9" * 5000
    cluster = {"worker": {"0": f"a:{long}" if number == "port" else "a:1", long if number == "key" else "1": "b:1"}}
    task = {"type": "worker", "index": long if number == "task" else 0}
    with pytest.raises(lockstep.ClusterError, match="expected "):
        resolve(of_spec(cluster, task=task))


@of_cases()
@pytest.mark.parametrize("index", [3, 4])
def test_an_index_must_be_below_the_number_of_workers(case, index):
    with pytest.raises(lockstep.ClusterError, match=rf"0, 1, 2|0 to 2.*{index}"):
        case.make(environ_of(case, index))


@of_cases()
def test_the_user_may_fix_where_worker_0_is(case):
    group = case.make(environ_of(case, LOCKSTEP_COORDINATOR="[fd00::7]:5000")).group()
    assert group.coordinator == "[fd00::7]:5000"
    assert (group.workers, group.index) == (3, 1)
    assert (group.addresses is not None) == case.knows_addresses
    assert group.addresses is None or group.addresses[0] == "[fd00::7]:5000"


@of_cases()
@pytest.mark.parametrize("address", ["", "n1", "n1:", "n1:0", "n1:65536", ":5000", "fd00::7:5000", "tcp://n1:5000"])
def test_what_is_fixed_must_be_an_address(case, address):
    with pytest.raises(lockstep.ClusterError, match=f"LOCKSTEP_COORDINATOR: expected an address .*, got {address!r}"):
        case.make(environ_of(case, LOCKSTEP_COORDINATOR=address))


@of_cases()
@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_what_is_fixed_must_be_a_port(case, port):
    with pytest.raises(lockstep.ClusterError, match=f"LOCKSTEP_PORT, .* from 1 to 65535, got '{port}'"):
        case.make(environ_of(case, LOCKSTEP_PORT=port))


@of_cases()
def test_a_service_of_kubernetes_named_lockstep_sets_no_port(case):
    with_service = environ_of(case, LOCKSTEP_PORT="tcp://10.0.0.5:6006")
    without = {name: value for name, value in with_service.items() if name != "LOCKSTEP_PORT"}
    assert case.make(with_service).group() == case.make(without).group()


def test_every_resolver_has_a_case():
    assert {type(case.make(environ_of(case))) for case in FROM_ENVIRONMENT} == set(RESOLVERS)


def test_the_order_is_from_the_innermost_to_the_outermost():
    innermost_last = (
        kubernetes(0) | leader_worker_set(0) | tpu(0) | slurm(0) | open_mpi_5(0) | jax(0) | torchrun(0) | tf_config(0)
    )
    found = []
    for resolver in RESOLVERS:
        if resolver.source != "Ray Train":
            found.append(resolve(innermost_last).group().source)
            innermost_last = {k: v for k, v in innermost_last.items() if k not in resolver.variables}
    outermost = ["Open MPI", "Slurm", "the TPU pod", "LeaderWorkerSet", "Kubernetes"]
    assert found == ["TF_CONFIG", "torchrun", "JAX's variables", *outermost]
    assert resolve(innermost_last) is None


def test_what_is_not_used_and_says_something_else_is_told():
    resolver = resolve(torchrun(5, workers=8, local=1, here=4) | slurm(1))
    (note,) = resolver.group().notes
    assert resolver.group().workers == 8
    assert note.startswith("Slurm says that this process is worker 1 of 3. That is not used, as torchrun, ")
    assert "says worker 5 of 8; pass a resolver" in note


@pytest.mark.parametrize("case", [torchrun, jax])
def test_variables_that_a_batch_script_sets_for_all_processes_leave_their_numbers_to_srun(case):
    exported = {name: value for name, value in case(0).items() if name not in ("RANK", "LOCAL_RANK", "JAX_PROCESS_ID")}
    resolver = resolve(exported | slurm(1))
    assert isinstance(resolver, SlurmClusterResolver)
    assert (resolver.group().workers, resolver.group().index) == (3, 1)
    with pytest.raises(lockstep.ClusterError, match=r"RANK|JAX_PROCESS_ID"):
        resolve(exported)


@pytest.mark.parametrize(("nodes", "notes"), [("3", 0), ("1", 1)])
def test_a_scheduler_that_has_started_a_launcher_on_each_node_contradicts_nothing(nodes, notes):
    """A launcher in each task that knows of one node only trains as often as there are tasks."""
    workers = torchrun(5, workers=12, local=1, here=4) | {"LOCKSTEP_GENERATION": "0", "GROUP_WORLD_SIZE": nodes}
    assert len(resolve(workers | slurm(1)).group().notes) == notes


def test_what_is_not_used_need_not_say_where_worker_0_is():
    (note,) = resolve(torchrun(5, workers=8, local=1, here=4) | open_mpi(1)).group().notes
    assert note.startswith("Open MPI says that this process is worker 1 of 3.")


def test_what_says_the_same_or_nothing_is_not_told():
    assert resolve(torchrun(1) | slurm(1)).group().notes == ()
    assert resolve(torchrun(5, workers=8, here=4) | {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "2"}).group().notes == ()
    incomplete = slurm(1)
    del incomplete["SLURM_PROCID"]
    assert resolve(torchrun(5, workers=8, here=4) | incomplete).group().notes == ()


# What suggests nothing by itself: names that other programs use, and what each process of one machine has, too.
SILENT = {
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "PET_MASTER_PORT", "PET_NPROC_PER_NODE"),
    *("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri", "PMIX_NAMESPACE", "PMIX_HOSTNAME"),
    *("JOB_NAME", "SERVICE_NAME", "JOB_INDEX"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"),
}


def subsets(variables):
    items = list(variables.items())
    return (dict(item for bit, item in enumerate(items) if number >> bit & 1) for number in range(1, 1 << len(items)))


@of_cases([case for case in FROM_ENVIRONMENT if case.name != "Ray Train"])
@pytest.mark.parametrize("index", [0, 1])
def test_no_part_of_the_variables_of_a_job_trains_alone_in_silence(case, index):
    silent = []
    for environ in subsets(case.variables(index)):
        try:
            resolver = resolve(environ)
        except lockstep.ClusterError:
            continue
        notes = resolver.group().notes if resolver else notes_if_alone(environ)
        if not (resolver and resolver.group().workers > 1) and not notes:
            silent.append(set(environ))
    one = {name for name, value in case.variables(index).items() if value == "1"} - {"RANK", "JAX_PROCESS_ID"}
    first = {"SLURM_PROCID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS"} if index == 0 else {"SLURM_NODEID"}
    slice_of_one_host = set(tpu(0)) if case.name == "TPU slices" else set()
    assert [names for names in silent if not names <= SILENT | one | first | slice_of_one_host] == []


def test_a_note_names_what_is_set_and_does_not_suffice():
    (note,) = notes_if_alone({"TPU_WORKER_ID": "0", "RANK": "3", "MASTER_PORT": "1"})
    assert note.startswith("trains alone, though variables of jobs of several processes are set: RANK of torchrun; ")
    assert "TPU_WORKER_ID of the TPU pod. They do not say which processes train together. Fix, " in note


@pytest.mark.parametrize(("size", "is_told"), [("4", True), ("1", False)])
def test_a_process_of_a_launcher_without_a_resolver_is_told(size, is_told):
    notes = notes_if_alone({"PMI_SIZE": size, "PMI_RANK": "0"})
    assert len(notes) == is_told
    assert all("PMI_SIZE of MPICH or Intel MPI" in note and "set JAX_COORDINATOR_ADDRESS" in note for note in notes)


def test_one_process_of_a_launcher_notes_what_an_outer_scheduler_left_incomplete():
    incomplete = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    (note,) = resolve({"RANK": "0", "WORLD_SIZE": "1"} | incomplete).group().notes
    assert note.startswith("LeaderWorkerSet: LWS_LEADER_ADDRESS, the host of worker 0, is not set.")
    assert note.endswith("That is not used, as torchrun says that one process trains.")
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCKSTEP_GENERATION": "0"}
    assert resolve(launched | incomplete).group().notes == ()


@pytest.mark.parametrize(
    "environ",
    [
        tpu(0, "localhost"),
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        {"TPU_PROCESS_ADDRESSES": "local"},
        {**tpu(0, "localhost"), "TPU_PROCESS_ADDRESSES": "localhost:8471"},
        tpu_slices(0, slices=1),
        {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "t1v-n-1-w-0", "MEGASCALE_NUM_SLICES": "1"},
        {"MEGASCALE_NUM_SLICES": ""},
    ],
    ids=["GKE", "hosts", "Kaggle", "processes", "one slice", "one slice without its number", "an empty number"],
)
def test_a_tpu_vm_of_one_host_trains_alone_without_a_word(environ):
    assert resolve(environ) is None
    assert notes_if_alone(environ) == ()


def test_a_leader_without_tpus_is_no_worker():
    """LeaderWorkerSet counts all pods, its TPU_WORKER_HOSTNAMES only those with TPUs."""
    pod = leader_worker_set(2, workers=3) | tpu(1, "train-0-1.train,train-0-2.train")
    group = resolve(pod).group()
    assert (group.workers, group.index, group.coordinator) == (2, 1, "train-0-1.train:12421")
    (note,) = group.notes
    assert note.startswith("LeaderWorkerSet says that this process is worker 2 of 3. That is not used, as the TPU pod")


def test_a_single_host_view_of_a_tpu_pod_does_not_hide_its_group():
    """GKE may give each pod of a LeaderWorkerSet a view of its own host only."""
    assert resolve(leader_worker_set(1) | tpu(0, "localhost")).group().workers == 3


def test_mpirun_under_slurm_inherits_the_task_of_its_daemon():
    """Open MPI starts one daemon a node with srun, so that all processes of a node have one SLURM_PROCID."""
    tasks = [
        slurm(node) | open_mpi_5(0) | open_mpi(2 * node + local, 6, local, 2) for node in (0, 1, 2) for local in (0, 1)
    ]
    groups = [resolve({**task, "PMIX_HOSTNAME": f"n{index // 2 + 1}"}).group() for index, task in enumerate(tasks)]
    assert [(group.index, group.workers, group.local_index) for group in groups] == [(i, 6, i % 2) for i in range(6)]
    assert {group.coordinator for group in groups} == {groups[0].coordinator}


@pytest.mark.parametrize(
    ("job", "given"),
    [
        ({"SLURM_JOB_ID": "41", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-4]"}, "4 tasks"),
        ({"SLURM_JOB_ID": "41", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}, "2 nodes"),
        (
            {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0"},
            "4 tasks and 2 nodes",
        ),
        (slurm(0, SLURM_STEP_ID="4294967290", SLURM_NTASKS="4", SLURM_JOB_NUM_NODES="1"), "4 tasks"),
    ],
    ids=["salloc of tasks", "salloc of nodes", "batch script", "interactive step"],
)
def test_an_allocation_for_many_without_srun_is_one_worker(job, given):
    group = resolve(job).group()
    assert (group.workers, group.index, group.coordinator) == (1, 0, "127.0.0.1:12421")
    (note,) = group.notes
    assert note.startswith(f"Slurm: the job has {given}, but this process is none of its tasks")
    assert "Fix: start the script with srun" in note


def test_a_job_of_one_task_is_one_worker_without_a_word():
    task = {"SLURM_STEP_NODELIST": "n7", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "1"}
    for job in (
        {"SLURM_JOB_ID": "41"},
        {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "1"},
        slurm(0, SLURM_NTASKS="1", **task),
    ):
        assert resolve(job).group().workers == 1
        assert resolve(job).group().notes == ()


def test_neither_keras_nor_jax_is_needed():
    code = (
        "import sys, lockstep; lockstep.cluster_resolver.resolve({}); print({'jax', 'keras', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")


SPEC = {"worker": ["a:1", "b:2"], "ps": ["c:3"]}


@pytest.mark.parametrize(
    ("resolver", "master"),
    [
        (SimpleClusterResolver(SPEC, "", "worker", 1, environ={}), ""),
        (SimpleClusterResolver(SPEC, "me:9", "worker", 1, rpc_layer="grpc", environ={}), "grpc://me:9"),
        (TFConfigClusterResolver(environ=of_spec(SPEC)), "b:2"),
        (TFConfigClusterResolver(environ=of_spec(SPEC, rpc_layer="grpc")), "grpc://b:2"),
        (TFConfigClusterResolver(rpc_layer="http", environ=of_spec(SPEC, rpc_layer="grpc")), "http://b:2"),
    ],
)
def test_the_master_is_as_in_tensorflow(resolver, master):
    assert resolver.master() == master
    assert TFConfigClusterResolver("worker", 0, environ=of_spec({"worker": ["a:1"]})).master() == ""
    protocol = f"{resolver.rpc_layer}://" if resolver.rpc_layer else ""
    assert resolver.master("worker", 1) == f"{protocol}b:2"
    assert resolver.master("worker", 1, "tcp") == "tcp://b:2"
    with pytest.raises(lockstep.ClusterError, match="worker"):
        resolver.master("worker", 7)


@pytest.mark.parametrize("name", ["rpc_layer", "session_master", "environment"])
@pytest.mark.parametrize("value", [5, ["grpc"], False])
def test_a_field_of_tf_config_that_must_be_a_text_is_refused_otherwise(name, value):
    with pytest.raises(
        lockstep.ClusterError, match=rf"^TF_CONFIG: {name}: expected a text, got .* Fix: write it in double quotes"
    ):
        TFConfigClusterResolver(environ=of_spec(SPEC, **{name: value}))
    assert TFConfigClusterResolver(environ=of_spec(SPEC, **{name: None})).task_id == 1


def test_surroundings_and_accelerators_are_told_or_found():
    given = SimpleClusterResolver(SPEC, "", "worker", 0, "cloud", {"GPU": 4}, environ={})
    assert (given.environment, given.num_accelerators("worker", 1)) == ("cloud", {"GPU": 4})
    assert TFConfigClusterResolver(environ=of_spec(SPEC, environment="cloud")).environment == "cloud"
    found = TFConfigClusterResolver(environ=of_spec(SPEC))
    others = sum(device.platform != "cpu" for device in jax_devices())
    assert (found.environment, sum(found.num_accelerators().values())) == ("", others)


def test_a_resolver_without_a_membership_is_refused():
    class Unfinished(lockstep.cluster_resolver.ClusterResolver):
        pass

    class Silent(lockstep.cluster_resolver.ClusterResolver):
        def __init__(self):
            pass

    with pytest.raises(lockstep.OptionError, match=r"Unfinished: membership: expected a Membership\. Fix: derive from"):
        Unfinished()
    with pytest.raises(lockstep.OptionError, match="cluster_resolver: Silent: membership: expected a Membership"):
        lockstep.MultiWorkerMirroredStrategy(Silent())
