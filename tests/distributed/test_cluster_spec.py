"""Clusters that somebody has written down: ClusterSpec, SimpleClusterResolver, TF_CONFIG, WorkerGroup."""

import json

import pytest

import lockstep
from lockstep.cluster_resolver import ClusterSpec, SimpleClusterResolver, TFConfigClusterResolver, WorkerGroup, resolve

from .cases import tf, tf_config

FULL = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"], "evaluator": ["e:1"]}


def test_it_answers_as_tensorflows_does():
    spec = ClusterSpec(FULL)
    assert spec.as_dict() == FULL
    assert spec == FULL == ClusterSpec(spec)
    assert spec != ClusterSpec({"worker": ["b:1"]})
    assert spec.jobs == ["chief", "worker", "ps", "evaluator"]
    assert (spec.num_tasks("worker"), spec.task_indices("worker")) == (2, [0, 1])
    assert (spec.task_address("worker", 1), spec.job_tasks("worker")) == ("c:1", ["b:1", "c:1"])
    assert repr(ClusterSpec({"ps": ["d:1"]})) == "ClusterSpec({'ps': ['d:1']})"


def test_a_cluster_of_which_some_addresses_are_known():
    spec = ClusterSpec({"worker": {2: "c:1", 0: "a:1"}, "ps": {"0": "d:1"}})
    assert spec.as_dict() == {"worker": {0: "a:1", 2: "c:1"}, "ps": ["d:1"]}
    assert (spec.num_tasks("worker"), spec.task_indices("worker")) == (2, [0, 2])
    assert spec.job_tasks("worker") == ["a:1", None, "c:1"]


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({}, "expected at least one task"),
        ({"worker": []}, "expected at least one task"),
        (["a:1"], r"expected a dict of jobs .*, got \['a:1'\]"),
        ({"worker": "a:1"}, "worker: expected a list of addresses .*, got 'a:1'"),
        ({"master": ["a:1"]}, "unknown job 'master'; expected one of chief, worker, ps, evaluator"),
        ({"worker": ["a:1", "b"]}, "worker 1: expected an address such as .*, got 'b'"),
        ({"worker": ["a:1", 5]}, "worker 1: expected an address such as .*, got 5"),
        ({"worker": ["a:1", "b:70000"]}, "a port of 1 to 65535, got 'b:70000'"),
        ({"worker": ["a:1", "b:1", "a:1"]}, "worker 0 and worker 2 have one address, a:1. Fix: give each its own"),
        ({"worker": ["a:1"], "ps": ["a:1"]}, "worker 0 and ps 0 have one address, a:1"),
        ({"chief": ["a:1", "b:1"]}, "expected one chief at most, got 2: a:1, b:1"),
        ({"evaluator": ["a:1", "b:1"]}, "expected one evaluator at most"),
        ({"worker": {"first": "a:1"}}, "expected whole numbers as indices, got 'first'"),
    ],
)
def test_what_cannot_be_a_cluster(cluster, message):
    with pytest.raises(lockstep.ClusterError, match=message):
        ClusterSpec(cluster)


def test_what_a_cluster_does_not_have():
    spec = ClusterSpec(FULL)
    with pytest.raises(
        lockstep.ClusterError, match="there is no job 'master'; there are: chief, worker, ps, evaluator"
    ):
        spec.num_tasks("master")
    with pytest.raises(lockstep.ClusterError, match=r"worker has the indices \[0, 1\], not 2"):
        spec.task_address("worker", 2)


@pytest.mark.parametrize("address", ["worker-0.ns.svc:1", "10.0.0.1:65535", "[::1]:1", "[fe80::1%eth0]:2222"])
def test_addresses_in_every_spelling(address):
    assert ClusterSpec({"worker": [address]}).task_address("worker", 0) == address


# The group of a task.


def member(job, index, cluster=None):
    return SimpleClusterResolver(cluster or FULL, task_type=job, task_id=index, environ={})


def test_the_chief_comes_first():
    groups = [member(job, index).group() for job, index in (("chief", 0), ("worker", 0), ("worker", 1))]
    assert [(group.workers, group.index, group.is_chief) for group in groups] == [
        (3, 0, True),
        (3, 1, False),
        (3, 2, False),
    ]
    assert {(group.coordinator, group.addresses) for group in groups} == {("a:1", ("a:1", "b:1", "c:1"))}
    without_chief = member("worker", 0, {"worker": ["b:1", "c:1"]}).group()
    assert (without_chief.is_chief, without_chief.coordinator) == (True, "b:1")


def test_parameter_servers_are_ignored_and_the_true_number_of_workers_is_told():
    tutorial = {"worker": ["localhost:12345", "localhost:23456"], "ps": ["localhost:34567"]}
    group = tf(tf_config(1, tutorial)).group()
    assert (group.workers, group.index) == (2, 1)
    (note,) = group.notes
    assert note.startswith("TF_CONFIG: 2 workers train in step. The 1 ps in the cluster is ignored")
    assert "remove them" in note
    assert "num_replicas_in_sync, not from the number of tasks (3)." in note


def test_a_parameter_server_has_nothing_to_do_in_a_group():
    resolver = member("ps", 0)
    message = "this process is ps 0, and MultiWorkerMirroredStrategy has no work for it.*Fix: do not start it and remove 'ps'.*ParameterServerStrategy"
    with pytest.raises(lockstep.ClusterError, match=message):
        resolver.group()


@pytest.mark.parametrize("others", [{"evaluator": ["e:1"]}, {"evaluator": []}, {}], ids=["listed", "empty", "left out"])
def test_an_evaluator_is_disconnected(others):
    cluster = {"chief": ["a:1"], "worker": ["b:1"], **others}
    listed = bool(others.get("evaluator"))
    resolver = member("evaluator", 0, cluster)
    group = resolver.group()
    assert (group.workers, group.index, group.coordinator) == (1, 0, "e:1" if listed else "127.0.0.1:12421")
    assert group.notes == (
        "arguments: this process is the evaluator: it runs alone and is none of the workers that train.",
    )
    assert (resolver.task_type, resolver.task_id) == ("evaluator", 0)


@pytest.mark.parametrize(
    ("job", "index", "cluster", "message"),
    [
        (None, None, FULL, "the task is missing; .* as the cluster has 1 chief, 2 worker, 1 ps, 1 evaluator"),
        ("worker", None, FULL, "the task is missing"),
        (None, 0, FULL, "the task is missing"),
        ("boss", 0, FULL, "unknown task type 'boss'; expected one of chief, worker, ps, evaluator"),
        ("worker", 2, FULL, "this process is worker 2, but the cluster has worker 0, 1"),
        ("worker", -1, FULL, "this process is worker -1, but the cluster has worker 0, 1"),
        ("evaluator", 1, FULL, "this process is evaluator 1, but the cluster has evaluator 0"),
        ("chief", 0, {"worker": ["a:1"]}, "this process is chief 0, but .* has no chief, only worker"),
        ("evaluator", 0, {"ps": ["a:1"]}, "no process trains: expected a chief or a worker"),
        ("worker", 2, {"worker": {0: "a:1", 2: "c:1"}}, "worker 1 has no address; expected those of all"),
    ],
)
def test_what_cannot_be_a_task(job, index, cluster, message):
    with pytest.raises(lockstep.ClusterError, match=message):
        member(job, index, cluster)


def test_a_single_process_needs_no_task():
    for cluster in ({"worker": ["a:1"]}, {"chief": ["a:1"], "worker": []}):
        assert SimpleClusterResolver(cluster, environ={}).group().workers == 1
    assert resolve({"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}})}).group().workers == 1


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"workers": 0, "index": 0}, "expected at least 1 worker, got 0"),
        ({"workers": 2, "index": 2}, "2 workers have the indices 0 to 1; got 2"),
        ({"workers": 2, "index": 1, "local_workers": 3}, "number 0 of 3 on its machine, of 2 in all"),
        ({"workers": 2, "index": 1, "local_index": 1}, "number 1 of 1 on its machine"),
        ({"workers": 2, "index": 1, "addresses": ("a:1",)}, r"expected 2 addresses, a:1 first, got \['a:1'\]"),
        ({"workers": 2, "index": 1, "addresses": ("b:1", "a:1")}, "expected 2 addresses, a:1 first"),
        ({"workers": 3, "index": 1, "addresses": ("a:1", "b:1", "b:1")}, "worker 1 and worker 2 have one address, b:1"),
        ({"workers": 2, "index": 1, "addresses": ("a:1", "b")}, "worker 1: expected an address such as .*, got 'b'"),
        ({"workers": 1, "index": 0, "coordinator": "a"}, "the coordinator: expected an address such as"),
    ],
)
def test_what_cannot_be_a_group(group, message):
    with pytest.raises(lockstep.ClusterError, match=message):
        WorkerGroup(**{"coordinator": "a:1", **group})


def test_workers_are_named_with_what_is_known_of_them():
    group = WorkerGroup(3, 1, "a:1")
    assert (group.name, group.name_of(0), group.name_of(2)) == ("worker 1 of 3", "worker 0 of 3 (a:1)", "worker 2 of 3")
    assert WorkerGroup(2, 1, "a:1", ("a:1", "b:1")).name == "worker 1 of 2 (b:1)"


# TF_CONFIG.


def test_an_index_may_be_a_text_as_for_tensorflow():
    assert tf(tf_config("1")).task_id == 1


def test_a_type_and_an_index_may_be_given_instead():
    resolver = TFConfigClusterResolver("worker", 2, environ=tf_config(0, job="chief"))
    assert (resolver.task_type, resolver.task_id, resolver.group().index) == ("worker", 2, 2)


@pytest.mark.parametrize("text", ["", " ", "{}", '{"cluster":{}}', '{"cluster": {}, "task": {"type": "worker"}}'])
def test_a_config_without_a_cluster_is_none(text):
    assert resolve({"TF_CONFIG": text}) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'cluster': 1}", r"is no JSON: .* at character 1, near .*'cluster'.*double quotes"),
        ('{"cluster": {"worker": ["a:1",]}}', r"is no JSON: .* near .*a:1"),
        ("[" * 100_000, "TF_CONFIG cannot be read as JSON: .*recursion"),
        ("[1]", r"^TF_CONFIG: expected a JSON object \{…\}, got \[1\]"),
        ('{"task": {"type": "worker", "index": 0}}', r"'cluster' is missing; it has \['task'\]"),
        ('{"clusters": {"worker": ["a:1"]}}', r"'cluster' is missing; it has \['clusters'\]"),
        ('{"cluster": ["a:1"]}', "TF_CONFIG: cluster: expected a dict of jobs"),
        ('{"cluster": {"worker": ["a:1"]}, "task": 0}', r"task: expected a JSON object \{…\}, got 0"),
    ],
)
def test_a_config_that_is_malformed(text, message):
    with pytest.raises(lockstep.ClusterError, match=message):
        resolve({"TF_CONFIG": text})


@pytest.mark.parametrize("index", [1.5, True, None, "first", [0]])
def test_an_index_that_is_none(index):
    with pytest.raises(lockstep.ClusterError, match=r"task index: expected a whole number from 0, got "):
        tf(tf_config(index))


def test_a_type_that_is_none():
    with pytest.raises(lockstep.ClusterError, match='task type: expected a text such as "worker", got 5'):
        tf(tf_config(0, job=5))


def test_a_port_for_all_must_not_be_that_of_another_worker():
    jobs = {"worker": ["localhost:1", "localhost:2"]}
    assert tf({**tf_config(1, jobs), "LOCKSTEP_PORT": "3"}).group().addresses == ("localhost:3", "localhost:2")
    with pytest.raises(lockstep.ClusterError, match="worker 0 and worker 1 have one address, localhost:2"):
        tf({**tf_config(1, jobs), "LOCKSTEP_PORT": "2"})
