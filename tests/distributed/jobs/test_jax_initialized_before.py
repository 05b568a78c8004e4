"""A JAX that the script has initialized itself is used: its processes train, with all checks, limits and checkpoints."""

import json
import signal
import socket
import time

import pytest

from tests.distributed.jobs.outcomes import assert_same_bits, train
from tests.laws.compare import RELATIVE, assert_close
from tests.support.processes import AS_FOR_USERS, Job, own_host

pytestmark = pytest.mark.xdist_group(__name__)

HOST = socket.gethostname()
LONG = 40  # A limit that is far away: what ends before was not noticed by it.
SHORT = 3
SOON = 20  # What a busy machine may need for what is noticed at once.
NO_TF_CONFIG = {"TF_CONFIG": ""}


def initialized(**config):
    """Arguments of ``start_all`` for a job whose processes initialize JAX at an address of their own."""
    return {"jax": f"{own_host()}:8476", "timeout": LONG, "environ": NO_TF_CONFIG, **config}


def ends(processes):
    """Wait for the end of all; gives what each said."""
    codes = [process.end() for process in processes]
    return codes, [process.said for process in processes]


@pytest.fixture(scope="module")
def trained(forks, tmp_path_factory):
    """What two processes leave of a net, with determinism and without."""
    made = Job(forks, tmp_path_factory.mktemp("trained"), 2, environ=AS_FOR_USERS)
    try:
        return train(made, [["mlp", True], ["mlp", False]], 1, **initialized())
    finally:
        made.clean()


def test_processes_of_jax_train_with_the_numbers_and_bits_of_one_process(trained, alone):
    found, other = trained
    assert_same_bits(other, found)
    (plain,) = alone("mlp").values()
    for name, value in plain.items():
        assert_close(found["mlp"][name], value, RELATIVE, name)


def test_bits_of_a_deterministic_run_are_those_of_one_process(trained, alone):
    found, _ = trained
    expected = alone("mlp", devices=1)
    assert_same_bits({name: found[name] for name in expected}, expected)


@pytest.mark.parametrize("has_started", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_script_that_initializes_jax_trains_on_all_processes(job, has_started):
    run = job(2, environ={"PJRT_NPROC": "8"})
    told = run.run("starts", jax_first=has_started, **initialized())
    assert told == [{"trained": 2}] * 2
    chief, other = (process.said for process in run.processes.values())
    assert "worker 0 of 2 (jax.distributed)." in chief
    assert other == ""


def test_processes_may_have_different_numbers_of_devices(job):
    told = job(2).run("starts", each=lambda _, index: {"devices": 2 - index}, **initialized())
    assert told == [{"trained": 3}] * 2


def test_two_strategies_of_one_process_and_its_files(job, tmp_path):
    chief, other = job(2).run("chief", folder=str(tmp_path), **initialized())
    assert (chief.pop("chief"), other.pop("chief")) == (True, False)
    assert chief == other
    assert chief["replicas"] == [2, 4]


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_killed_worker_is_named_within_its_limit(job, lost):
    run = job(2)
    processes = run.start_all("faults", **initialized())
    for process in processes:
        process.until("training")
    began = time.monotonic()
    processes[lost].send(signal.SIGKILL)
    survivor = processes[1 - lost]
    assert survivor.end() == 75, survivor.said
    assert survivor.ended_at - began < SOON
    assert f"worker {lost} of 2 ({HOST}, process {processes[lost].pid}) died" in survivor.said


def test_a_suspended_worker_is_named_within_its_limit(job):
    run = job(2)
    processes = run.start_all("faults", **initialized(timeout=SHORT))
    for process in processes:
        process.until("training")
    began = time.monotonic()
    processes[1].send(signal.SIGSTOP)
    assert processes[0].end() == 75, processes[0].said
    assert processes[0].ended_at - began < SHORT + SOON
    assert f"process {processes[1].pid}) does not answer: no heartbeat for " in processes[0].said


def test_an_exception_is_told_to_the_other_processes(job):
    processes = job(2).start_all("faults", faulty=1, does="raise in a callback", **initialized())
    codes, said = ends(processes)
    assert codes == [13, 13]
    assert "failed: ValueError: the labels of batch 5 are missing" in said[0]


def test_a_disagreement_is_named(job):
    processes = job(2).start_all(
        "starts", each=lambda _, index: {"strategy": {"replicas": 2 + 2 * index}}, **initialized()
    )
    codes, said = ends(processes)
    assert codes == [13, 13]
    for each in said:
        assert "'the strategy': worker 1 of 2" in each
        assert "in 'replicas': it has 4, " in each


def test_a_process_of_jax_that_makes_no_strategy_is_waited_for_within_the_limit(job):
    run = job(2)
    config = initialized(timeout=SHORT)
    waiting = run.start("worker", 0, "starts", **config)
    run.start("worker", 1, "initializes", **config)
    assert waiting.end() == 75
    assert "process 1 of 2 of JAX did not all make their MultiWorkerMirroredStrategy within 3 s" in waiting.said


def tf_config(workers, index):
    cluster = {"worker": [f"127.0.0.1:{12421 + number}" for number in range(workers)]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})}


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_tf_config_with_another_number_of_workers_is_an_error_on_all_processes(job, workers):
    own = [NO_TF_CONFIG, tf_config(workers, 0)]
    config = initialized()
    del config["environ"]
    processes = job(2).start_all("starts", each=lambda _, index: {"environ": own[index]}, **config)
    codes, said = ends(processes)
    assert codes == [13, 13]
    for each in said:
        assert f"process 1 of 2 of JAX: TF_CONFIG says that this process is worker 0 of {workers}, but JAX is " in each
        assert (
            "initialized already, with this process as 1 of 2. Fix: give jax.distributed.initialize() the same" in each
        )


def test_one_process_of_jax_and_several_of_tf_config_are_an_error(job):
    config = initialized(jax_processes=1, environ=tf_config(2, 0))
    process = job(1).start("worker", 0, "starts", **config)
    assert process.end() == 13
    assert (
        "TF_CONFIG says that this process is worker 0 of 2, but JAX is initialized already, with this" in process.said
    )


def test_variables_of_a_scheduler_that_are_incomplete_or_of_one_process_do_not_matter(job):
    allocation = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"}
    run = job(2)
    told = run.run(
        "starts",
        each=lambda _, index: {"environ": NO_TF_CONFIG | [allocation, {"LWS_GROUP_SIZE": "4"}][index]},
        **{name: value for name, value in initialized().items() if name != "environ"},
    )
    assert told == [{"trained": 2}] * 2
    chief = run.processes["worker0"].said
    assert "Slurm says that this process is worker 0 of 1. That is not used, as JAX is initialized already" in chief
    assert "trains alone" not in chief


SECRET = {"LOCKSTEP_SECRET": "s" * 32}


def test_a_secret_that_only_some_processes_have_is_named(job):
    own = [NO_TF_CONFIG | SECRET, NO_TF_CONFIG]
    config = initialized()
    del config["environ"]
    codes, said = ends(job(2).start_all("starts", each=lambda _, index: {"environ": own[index]}, **config))
    assert codes == [13, 13]
    for each in said:
        assert "no secret is set for process 1 of 2 of JAX, and others have one. Fix: set LOCKSTEP_SECRET or" in each


def test_a_secret_and_an_address_of_the_environment_are_used(job):
    run = job(2)
    address = f"{own_host()}:12421"
    told = run.run("starts", **initialized(environ=NO_TF_CONFIG | SECRET | {"LOCKSTEP_COORDINATOR": address}))
    assert told == [{"trained": 2}] * 2


def test_a_stopped_job_is_resumed_by_processes_of_jax_with_the_same_bits(forks, job, tmp_path):
    folder = str(tmp_path / "run")
    whole = Job(forks, tmp_path, 1)
    try:
        uninterrupted = whole.run("preempted", folder=None)[0]["digest"]
    finally:
        whole.clean()
    told = {"worker": 1, "method": "on_train_batch_end", "number": 3, "signal": "SIGTERM"}
    codes, said = ends(job(2).start_all("preempted", folder=folder, **told, **initialized()))
    assert codes == [75, 75]
    assert "worker 1 of 2: SIGTERM: stopped after step " in said[0]
    assert job(2).run("preempted", folder=folder, **initialized())[0]["digest"] == uninterrupted


@pytest.mark.parametrize("early", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_a_worker_that_finishes_early_is_named_and_ends_with_the_others(job, early):
    """JAX's own shutdown would wait for a lost process for minutes and abort."""
    processes = job(2).start_all(
        "faults", steps=8, faulty=early, does="come to the end early", evaluates=True, **initialized()
    )
    codes, said = ends(processes)
    assert codes == [13, 13]
    sentence = f"worker {early} of 2 ({HOST}, process {processes[early].pid}) finished before gather 'the call'"
    for each in said:
        assert sentence in each
    assert f"worker {1 - early} of 2 ({HOST}, process {processes[1 - early].pid}) failed: " in said[early]


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_worker_may_come_to_its_end_later_than_the_others(job, late):
    processes = job(2).start_all(
        "faults", steps=8, faulty=late, does="come to the end late", **initialized(timeout=SHORT)
    )
    codes, said = ends(processes)
    assert codes == [0, 0]
    assert "died" not in said[1 - late]


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_a_worker_that_is_killed_while_the_others_are_at_their_end_is_named(job, lost):
    config = initialized(steps=8, faulty=lost, does="come to the end late")
    processes = job(2).start_all("faults", **config)
    processes[1 - lost].until("done")
    processes[lost].send(signal.SIGKILL)
    assert processes[1 - lost].end() == 75
    assert f"worker {lost} of 2 ({HOST}, process {processes[lost].pid}) died" in processes[1 - lost].said


def test_the_script_shuts_down_its_jax_itself(job):
    told = job(2).run("initializes", trains=True, **initialized())
    assert told == [{"is_initialized": True, "own": 3.0, "shut_down": True}] * 2
