"""Who is chief, worker and ps, where variables are kept on servers."""

import json
import re

import pytest

import lockstep
from lockstep.cluster_resolver import SimpleClusterResolver, resolve
from lockstep.parameter_server.process_role import ProcessRole, find_role

from .cases import CASES, tf, tf_config, torchrun

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1", "e:1"], "evaluator": ["f:1"]}
NAMES = {
    ("chief", 0): "chief (a:1)",
    ("worker", 1): "worker 1 of 2 (c:1)",
    ("ps", 0): "ps 0 of 2 (d:1)",
    ("ps", 1): "ps 1 of 2 (e:1)",
    ("evaluator", 0): "evaluator (f:1)",
}


def simple(job, index, cluster):
    return SimpleClusterResolver(cluster, task_type=job, task_id=index, environ={})


@pytest.mark.parametrize(("job", "index"), NAMES)
def test_each_process_finds_itself_and_the_others(job, index):
    part = find_role(simple(job, index, CLUSTER))
    assert part == ProcessRole(job, index, "a:1", ("b:1", "c:1"), ("d:1", "e:1"), "f:1", "arguments")
    assert part.name == NAMES[job, index]
    assert {(job, index): part.name_of(job, index) for job, index in NAMES} == NAMES
    found = find_role(resolve(tf_config(index, CLUSTER, job)))
    assert (found.source, found.name) == ("TF_CONFIG", part.name)


def test_an_evaluator_need_not_be_listed():
    part = find_role(simple("evaluator", 0, {job: tasks for job, tasks in CLUSTER.items() if job != "evaluator"}))
    assert (part.name, part.evaluator) == ("evaluator", None)


def test_a_resolver_of_a_server_says_what_it_is_whatever_else_is_set():
    resolver = resolve(tf_config(1, CLUSTER, "ps") | torchrun(1))
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert repr(resolver) == "<TFConfigClusterResolver: ps 1 (e:1), from TF_CONFIG>"
    assert repr(resolver.noting("something")) == repr(resolver)
    with pytest.raises(lockstep.ClusterError, match="TF_CONFIG: this process is ps 1, and MultiWorkerMirroredStrategy"):
        resolver.group()


def test_a_server_that_is_not_in_the_cluster_is_refused():
    with pytest.raises(lockstep.ClusterError, match="this process is ps 2, but the cluster has ps 0, 1"):
        tf(tf_config(2, CLUSTER, "ps"))


@pytest.mark.parametrize(
    ("job", "left_out", "found"),
    [
        ("worker", ("chief",), "no chief, 2 worker, 2 ps"),
        ("chief", ("worker",), "1 chief, no worker, 2 ps"),
        ("worker", ("ps",), "1 chief, 2 worker, no ps"),
        ("evaluator", ("chief", "ps"), "no chief, 2 worker, no ps"),
    ],
)
@pytest.mark.parametrize("others", [{}, {"chief": [], "worker": [], "ps": []}], ids=["left out", "empty"])
def test_a_cluster_without_chief_worker_or_server_says_what_it_has(job, left_out, found, others):
    cluster = {**others, **{name: tasks for name, tasks in CLUSTER.items() if name not in left_out}}
    with pytest.raises(lockstep.ClusterError) as error:
        find_role(simple(job, 0, cluster))
    assert "arguments: lockstep.ParameterServerStrategy needs a chief, a worker or more, and a ps or more" in str(
        error.value
    )
    assert f"the cluster has {found}. Fix: set TF_CONFIG" in str(error.value)
    assert_the_example_works(str(error.value))


def test_all_addresses_must_be_known():
    cluster = {**CLUSTER, "ps": {0: "d:1", 2: "e:1"}}
    with pytest.raises(lockstep.ClusterError, match="arguments: ps 1 has no address; expected those of all, got Clu"):
        find_role(simple("ps", 2, cluster))


SCHEDULERS = [case for case in CASES if case.name not in ("TF_CONFIG", "Simple")]


@pytest.mark.parametrize("case", SCHEDULERS, ids=lambda case: case.name)
def test_a_scheduler_that_knows_no_jobs_is_refused_by_name(case):
    resolver = case.make(case.variables(1))
    with pytest.raises(lockstep.ClusterError) as error:
        find_role(resolver)
    assert str(error.value).startswith(
        f"{resolver.group().source} counts processes and knows no jobs, so that nothing "
    )
    assert_the_example_works(str(error.value))


def test_without_a_cluster_it_is_said_how_to_name_one():
    with pytest.raises(lockstep.ClusterError, match="nothing says which process is chief, worker or ps") as error:
        find_role(None)
    assert_the_example_works(str(error.value))


def assert_the_example_works(message):
    (config,) = re.findall(r"such as (\{.*\}); on one machine, 'lockstep run --workers 2 --servers 1 ", message)
    assert find_role(tf({"TF_CONFIG": config})).name == "worker 0 of 2 (b:2222)"
    assert json.loads(config)["task"] == {"type": "worker", "index": 0}
