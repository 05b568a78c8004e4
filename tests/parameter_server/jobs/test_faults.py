"""What becomes of a ``fit`` on servers when a process dies, stands still, comes late or fails."""

import re
import signal
import socket

import numpy as np
import pytest

from tests.parameter_server.jobs.outcomes import arrays, bits, server_job, train

pytestmark = pytest.mark.waits

PROMPT = {"timeout_seconds": 3.0}


def only(task, index, **options):
    """Options for one process."""
    return lambda *which: options if which == (task, index) else {}


def test_a_worker_that_comes_late_participates_and_has_all_that_the_others_have(job):
    made = job(workers=2, servers=1)
    made.start_all(but=["worker1"], cases=["long", "counted"], strategy={}, awaits=2)
    made.processes["chief0"].until("epoch")
    made.start("worker", 1, cases=["long", "counted"], strategy={})
    made.end()
    assert bits(arrays(made, "worker", 1)) == bits(arrays(made, "chief", 0))


def start_while_one_stands_still(made, **options):
    """Worker 1 stands still in its third batch, before worker 0 comes, which else might do all the rest before that."""
    made.start_all(but=["worker0"], each=only("worker", 1, stop=[3, signal.SIGSTOP]), **options)
    made.processes["worker1"].until("stops")
    made.start("worker", 0, **options)


def test_a_batch_of_a_worker_that_stands_still_is_done_by_another(job):
    from tests.parameter_server.jobs.programs.train import Y

    made = job(workers=2, servers=1)
    start_while_one_stands_still(made, cases=["counted"], strategy=PROMPT)
    made.end(but=["worker1"])
    found = arrays(made, "chief", 0)
    np.testing.assert_allclose(found["counted/history/row_sum"], 3 * [Y.sum()], rtol=1e-5)
    assert int(found["counted/optimizer/0"]) == 3 * 6


def test_with_a_bound_a_worker_that_stands_still_ends_the_job_by_name(job):
    made = job(workers=2, servers=1)
    start_while_one_stands_still(made, cases=["counted"], strategy=PROMPT | {"max_staleness": 1})
    assert {made.processes[name].end() for name in ("chief0", "worker0", "ps0")} == {124}
    assert "it waits for worker 1 of 2" in made.processes["chief0"].said


def test_a_server_that_dies_ends_the_job_by_name_and_the_next_start_resumes_to_the_same_bits(job, tmp_path):
    options = {"cases": ["mixed"], "strategy": {}}
    expected = bits(train(job(workers=1, servers=2), **options))
    made = job(workers=1, servers=2)
    made.start_all(each=only("ps", 1, stop=[8, signal.SIGKILL]), backup=str(tmp_path / "kept"), **options)
    codes = {name: process.end() for name, process in made.processes.items()}
    assert codes == {"chief0": 75, "worker0": 75, "ps0": 75, "ps1": -9}
    assert "was lost, and with it the variables that it holds" in made.processes["chief0"].said
    assert "ps 1 of 2" in made.processes["chief0"].said
    again = job(workers=1, servers=2)
    found = train(again, backup=str(tmp_path / "kept"), **options)
    assert "resumes from" in again.processes["chief0"].said
    assert bits(found) == expected


def test_a_server_that_stands_still_is_named_by_workers_and_by_the_chief(job):
    made = job(workers=2, servers=2)
    made.start_all(each=only("ps", 1, stop=[8, signal.SIGSTOP]), cases=["long"], strategy=PROMPT)
    assert {made.processes[name].end() for name in ("chief0", "worker0", "worker1")} == {75}
    for name in ("chief0", "worker0", "worker1"):
        assert re.search(r"ps 1 at \S+ was lost", made.processes[name].said), name


def test_what_a_callback_raises_ends_all_with_the_reason(job):
    made = job(workers=2, servers=1)
    made.start_all(cases=["plain"], strategy={}, raises=True)
    codes = {process.end() for process in made.processes.values()}
    assert codes == {13}
    for name in ("worker0", "ps0"):
        assert "the chief's fit has ended: ZeroDivisionError: a callback" in made.processes[name].said


def test_all_hear_of_a_model_that_parts_of_a_batch_cannot_train(job):
    made = job(workers=2, servers=1)
    made.start_all(cases=["sum"], strategy={"max_staleness": 0})
    assert {process.end() for process in made.processes.values()} == {13}
    assert "the loss of a batch is" in made.processes["chief0"].said
    assert "Fix: use MultiWorkerMirroredStrategy" in made.processes["chief0"].said


def test_a_server_whose_port_is_in_use_ends_all_with_the_reason(job):
    made = job(workers=1, servers=1)
    host, _, port = made.cluster["ps"][0].partition(":")
    with socket.socket() as other:
        other.bind((host, int(port)))
        made.start_all(but=["ps0"], cases=["plain"], strategy={})
        made.processes["worker0"].until("has_joined")  # One that starts after the end of the job hears of no reason.
        made.start("ps", 0, cases=["plain"], strategy={})
        codes = {process.end() for process in made.processes.values()}
    assert codes == {13}
    for name in ("chief0", "worker0"):
        assert re.search(r"ps 0 of 1 .* failed: .*cannot listen on port", made.processes[name].said), name


def test_a_server_that_ends_before_fit_ends_the_chief_with_the_reason(job):
    made = job(workers=1, servers=1)
    made.start_all(but=["worker0"], each=only("ps", 0, seed=2), cases=["plain"], strategy={})
    assert {process.end() for process in made.processes.values()} == {13}
    assert re.search(r"ps 0 of 1 .* failed: .*set_random_seed\(2\) was called", made.processes["chief0"].said)


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({"seed": 2}, "worker0", "set_random_seed(2) was called here, and at the chief 1"),
        ({"environ": {"LOCKSTEP_SECRET": "another" * 8}}, "worker0", "different secrets"),
        ({"environ": {"LOCKSTEP_GENERATION": "3"}}, "worker0", "its generation is 3"),
    ],
)
def test_a_process_that_was_started_differently_is_refused_by_name(job, options, name, reason):
    made = job(workers=1, servers=1)
    made.start_all(but=["worker0"], cases=["plain"], strategy=PROMPT)
    process = made.start("worker", 0, cases=["plain"], strategy=PROMPT, **options)
    assert process.end() == 13
    assert reason in process.said


def test_a_chief_whom_no_worker_comes_to_ends_with_a_reason(job):
    made = job(workers=1, servers=1)
    made.start_all(but=["worker0"], cases=["plain"], strategy=PROMPT)
    assert made.processes["chief0"].end() == 124
    assert "No task was finished for 3 s" in made.processes["chief0"].said
    assert "no worker has requested one. Fix: check whether the workers are started" in made.processes["chief0"].said


def test_a_worker_whom_no_chief_awaits_ends_with_a_reason(job):
    process = job(workers=1, servers=1).start("worker", 0, cases=["plain"], strategy=PROMPT)
    assert process.end() == 75
    assert "could not be reached within 3 s" in process.said


@pytest.fixture(scope="module")
def evaluated(forks, tmp_path_factory):
    """A job with an evaluator that has come to its end, and its options."""
    folder = tmp_path_factory.mktemp("evaluated")
    made = server_job(forks, folder, workers=2, servers=1, evaluator=True)
    options = {"cases": ["mixed"], "strategy": {}, "backup": str(folder / "kept")}
    made.start_all(**options)
    try:
        made.end()
    finally:
        made.clean()
    return made, options


@pytest.mark.xdist_group("evaluated")
def test_the_evaluator_evaluates_while_others_train(evaluated):
    made, _ = evaluated
    assert "its validation data are evaluated by the evaluator" in made.processes["chief0"].said
    assert "mixed/history/val_loss" not in arrays(made, "chief", 0)
    assert "after epoch 2" in made.processes["evaluator0"].said  # Whatever it had to leave out, it looks at the end.
    assert bits(arrays(made, "evaluator", 0)) == bits(arrays(made, "chief", 0))


def test_a_job_that_is_asked_to_stop_leaves_a_checkpoint_and_goes_on_from_it(job, tmp_path):
    options = {"cases": ["long"], "strategy": {}, "backup": str(tmp_path / "kept")}
    made = job(workers=2, servers=1)
    made.start_all(**options)
    made.processes["chief0"].until("epoch")
    for process in made.processes.values():
        process.send(signal.SIGTERM)
    assert {process.end() for process in made.processes.values()} == {75}
    assert "SIGTERM: stopped after step" in made.processes["chief0"].said
    found = train(job(workers=2, servers=1), **options)
    assert int(found["long/optimizer/0"]) == 3 * 46


def test_a_worker_that_alone_is_asked_to_stop_ends_and_the_others_do_its_batches(job, tmp_path):
    options = {"cases": ["long"], "strategy": {}, "backup": str(tmp_path / "kept")}
    made = job(workers=2, servers=1)
    signalled = only("worker", 1, stop=[3, signal.SIGTERM], stop_seconds=0)
    made.start_all(but=["worker0"], each=signalled, **options)
    assert made.processes["worker1"].end() == 75
    assert "SIGTERM: the other processes continue" in made.processes["worker1"].said
    made.start("worker", 0, **options)
    made.end(but=["worker1"])
    assert int(arrays(made, "chief", 0)["long/optimizer/0"]) == 3 * 46


@pytest.mark.xdist_group("evaluated")
def test_a_training_that_is_finished_ends_at_once_on_all_processes_when_it_starts_again(evaluated, job):
    made, options = evaluated
    expected = arrays(made, "chief", 0)
    again = job(workers=2, servers=1, evaluator=True)
    assert bits(train(again, **options)) == bits(expected)
    assert "nothing is left to train" in again.processes["chief0"].said
    for task, index in (("worker", 0), ("worker", 1), ("ps", 0), ("evaluator", 0)):
        assert bits(arrays(again, task, index), "weights", "history") == bits(expected, "weights", "history")


@pytest.mark.xdist_group("evaluated")
def test_a_worker_that_starts_after_a_finished_training_has_ended_gets_its_result(evaluated, job):
    made, options = evaluated
    again = job(workers=2, servers=1, evaluator=True)
    again.start_all(but=["worker1"], **options)
    again.processes["chief0"].until("done")
    again.start("worker", 1, **options)
    again.end()
    assert bits(arrays(again, "worker", 1), "weights") == bits(arrays(made, "chief", 0), "weights")
