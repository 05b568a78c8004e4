"""Workers that were started wrongly, or differ in what they train: one sentence, on every worker, that names the one."""

import socket

import pytest

import lockstep
from lockstep.distributed.cluster.membership import WorkerGroup
from lockstep.distributed.control.handshake import Peer, open_listener
from lockstep.distributed.jax_init import find_jax_address
from tests.distributed.threaded_job import ThreadedJob

pytestmark = pytest.mark.xdist_group(__name__)

HOST = socket.gethostname()
LONG, SHORT = 40, 3  # limits in seconds: what ends sooner than the long one was not ended by it


def ends(processes, code=13):
    """What each worker said last, after all have ended with ``code``."""
    assert [process.end() for process in processes] == [code] * len(processes), "\n".join(p.said for p in processes)
    return [process.said.splitlines()[-1] for process in processes]


def test_another_number_of_workers(job):
    run = job(2)
    more = {"worker": [*run.cluster["worker"], "localhost:12421"]}
    processes = [
        run.start("worker", 0, "starts", timeout=LONG),
        run.start("worker", 1, "starts", cluster=more, timeout=LONG),
    ]
    for said in ends(processes):
        assert f"worker 1 of 3 ({HOST}, process {processes[1].pid}) was started with 3 workers, the chief (" in said
        assert "with 2 workers. Fix: start all with the same number." in said


@pytest.mark.slow
def test_one_index_twice(job):
    run = job(3)
    processes = [run.start("worker", index, "starts", timeout=LONG) for index in (0, 1, 1)]
    for said in ends(processes):
        assert "Two processes say that they are worker 1 of 3: " in said
        for process in processes[1:]:
            assert f"process {process.pid}" in said


def test_another_script(job, tmp_path):
    run = job(2)
    script = tmp_path / "other.py"
    script.write_text("from tests.distributed.jobs.program import make_strategy\nmake_strategy()\n")
    processes = [run.start("worker", 0, "starts", timeout=LONG), run.start("worker", 1, script, timeout=LONG)]
    for said in ends(processes):
        assert f"worker 1 of 2 ({HOST}, process {processes[1].pid}) differs from the chief (" in said
        assert "in 'script': it has \"other.py, sha256 " in said
        assert 'the chief "starts.py, sha256 ' in said


def test_a_port_that_is_in_use(job):
    run = job(2)
    host, port = run.coordinator.split(":")
    with socket.create_server((host, int(port))):
        chief, other = run.start_all("starts", timeout=SHORT)
        assert chief.end() == 13
        assert other.end() == 75
    assert f"The chief cannot listen on port {port} of {host}: something that is no Lockstep job uses it." in chief.said
    assert (
        f"worker 1 of 2 ({run.cluster['worker'][1]}): worker 0 of 2, the chief at {run.coordinator}, was not met"
        in other.said
    )
    assert "what answers there is no process of a Lockstep job" in other.said


def test_a_port_of_jax_that_is_in_use(job):
    run = job(2)
    with socket.create_server((run.coordinator.split(":")[0], 0)) as taken:
        port = taken.getsockname()[1]
        processes = run.start_all("starts", timeout=LONG, environ={"LOCKSTEP_JAX_PORT": str(port)})
        for said in ends(processes):
            assert f"worker 0 of 2 ({HOST}, process {processes[0].pid}): JAX's service (LOCKSTEP_JAX_PORT): " in said
            assert f"cannot listen on port {port} of " in said


class Unreached:
    """As worker 1 of 2 sees its job when the chief's machine lets nobody in."""

    group = WorkerGroup(2, 1, "127.0.0.1:12421")
    peers = (Peer(0, 2, "node0", 70), Peer(1, 2, "node1", 71))

    def __init__(self, address):
        self.address = address

    def broadcast(self, topic, value):
        return [self.address, None]

    def gather(self, topic, value):
        return [None, value]


def test_a_port_of_jax_that_a_worker_does_not_reach():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(lockstep.ClusterError) as raised:
        find_jax_address(Unreached(address), {}, print)
    assert str(raised.value).startswith("worker 1 of 2 (node1, process 71) does not reach port ")
    assert f"at {address}: Connection refused. Fix: open a port for it" in str(raised.value)


@pytest.mark.slow
def test_more_workers_reach_the_port_of_jax_than_its_backlog_holds(monkeypatch):
    def open_with_a_short_backlog(*arguments):
        listener = open_listener(*arguments)
        listener.listen(1)
        return listener

    monkeypatch.setattr("lockstep.distributed.jax_init.open_listener", open_with_a_short_backlog)
    with ThreadedJob(5) as job:
        addresses = job.everyone(lambda client: find_jax_address(client, {}, print))
    assert addresses == [addresses[0]] * 5
    with socket.create_server(("127.0.0.1", int(addresses[0].split(":")[1]))):
        pass  # Nothing listens there any more.


@pytest.mark.parametrize("early", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_jax_that_has_started_on_one_worker(job, early):
    run = job(2)
    processes = [run.start("worker", index, "starts", jax_first=index == early, timeout=LONG) for index in range(2)]
    for said in ends(processes):
        assert f"worker {early} of 2 ({HOST}, process {processes[early].pid}): JAX has started already" in said
        assert "make the MultiWorkerMirroredStrategy before those." in said


DIFFERENT = {
    "replicas": "'the strategy': WHO in 'replicas': it has TWICE, ",
    "packs": "'the strategy': WHO in 'cross_device_ops': it has \"RingAllReduce(num_packs=1, bytes_per_pack=160)\", ",
    "seed": "'the seed, keras.utils.set_random_seed()': WHO in 'seed': it has 2, ",
    "drawn": "'the state of random numbers': WHO in 'numpy.random': it has ",
    "layer": "'fit()': WHO in 'model.layers.dense.units': it has 4, ",
    "activation": "'fit()': WHO in 'model.layers.dense.activation': it has \"relu\", ",
    "rate": "'fit()': WHO in 'model.compile.optimizer.config.learning_rate': it has 1.1",
    "loss": "'fit()': WHO in 'model.compile.loss': it has \"mae\", ",
    "weights": "'fit()': WHO in 'model.variables.sequential/dense_1/bias': it has \"float32 [1], checksum ",
    "epochs": "'fit()': WHO in 'arguments.epochs': it has 2, ",
    "batch_size": "'fit()': WHO in 'arguments.batch_size': it has 7, ",
    "steps": "'fit()': WHO in 'arguments.steps_per_epoch': it has 2, ",
    "call": "'the call': WHO: it has \"evaluate\", ",
    "evaluate": "'evaluate()': WHO in 'model.variables.sequential/dense_1/bias': it has ",
    "predict": "'predict()': WHO in 'model.variables.sequential/dense_1/bias': it has ",
    "train_on_batch": "'call 1 of train_on_batch()': WHO: it has ",
    "test_on_batch": "'call 1 of test_on_batch()': WHO: it has ",
    "predict_on_batch": "'call 1 of predict_on_batch()': WHO: it has ",
    "self_check": "'self_check()': WHO in 'batch': it has ",
    "doctor": "'doctor()': WHO in 'batch_size': it has 9, ",
}


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_whatever_is_different_on_one_worker_is_named_and_all_can_continue(job, workers):
    run = job(workers)
    told = run.run("alike", timeout=LONG)
    assert all(one == told[0] for one in told)
    assert told[0].pop("nothing") is None
    assert told[0].keys() == DIFFERENT.keys()
    odd = f"worker {workers - 1} of {workers} ({HOST}, process {run.processes[f'worker{workers - 1}'].pid}) differs"
    for name, sentence in DIFFERENT.items():
        sentence = sentence.replace("WHO", odd).replace("TWICE", str(2 * workers))
        assert told[0][name].startswith(f"The workers do not agree on {sentence}"), told[0][name]
