"""Loops of one's own in one process: what is refused, what travels, what is kept."""

import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import lockstep
from lockstep import ClusterError
from lockstep._errors import PEER_LOST, USER_ERROR
from lockstep.distributed.control.handshake import Peer, RetryableConnectError
from lockstep.execution.replica import StateMerge
from lockstep.parameter_server import rpc
from lockstep.parameter_server.function_scheduler_base import (
    decode_result,
    encode_result,
    optimizer_numbers_of,
    set_values,
    values_of,
)
from lockstep.parameter_server.function_schedulers import WorkerScheduler
from lockstep.parameter_server.rpc import ClientSession
from lockstep.parameter_server.state_sync import FollowedState, SeedOffsets
from lockstep.parameter_server.task_client import Task
from lockstep.parameter_server.task_dispatcher import SyncPointLog, TaskDispatcher, TaskQueue
from lockstep.parameter_server.variable_store import CompletedIds
from tests.parameter_server.threaded_servers import DEADLINE
from tests.support.processes import own_host


def net():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def chief(monkeypatch):
    """Makes the strategy of a chief whose workers never come; it waits for them for a moment."""
    made = []

    def make(**options):
        host = own_host()
        cluster = {job: [f"{host}:{port}"] for job, port in [("chief", 12431), ("worker", 12432), ("ps", 12433)]}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
        made.append(lockstep.ParameterServerStrategy(**{"timeout_seconds": 0.3, **options}))
        monkeypatch.delenv("TF_CONFIG")
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()


def test_only_a_strategy_with_servers_has_a_coordinator():
    with pytest.raises(lockstep.OptionError, match="expected a ParameterServerStrategy, got MirroredStrategy"):
        lockstep.ClusterCoordinator(lockstep.MirroredStrategy(["cpu:0"]))


def test_a_cache_is_refused_as_each_worker_reads_its_own_part():
    with pytest.raises(lockstep.OptionError, match=r"a cache cannot be made\. Fix: leave it out"):
        lockstep.ParameterServerStrategy(input_options=lockstep.InputOptions(cache="memory"))


def test_a_loop_with_servers_has_no_checkpoint_of_each_process(chief, tmp_path):
    with pytest.raises(
        lockstep.OptionError, match=r"the newest variables are on servers.*Fix: fit with .*BackupAndRestore"
    ):
        chief().checkpoint(tmp_path / "loop")
    assert not (tmp_path / "loop").exists()


def test_a_strategy_has_one_coordinator_under_both_names(chief):
    strategy = chief()
    coordinator = lockstep.ClusterCoordinator(strategy)
    assert lockstep.experimental.ClusterCoordinator(strategy) is coordinator
    assert coordinator.strategy is strategy
    assert lockstep.ClusterCoordinator(chief()) is not coordinator


@pytest.mark.slow
def test_join_without_scheduled_functions_returns_at_once(chief):
    coordinator = lockstep.ClusterCoordinator(chief())
    coordinator.join()
    assert coordinator.done()


def test_without_a_compiled_model_nothing_can_be_scheduled(chief):
    strategy = chief()
    with strategy.scope():
        keras.Sequential([keras.layers.Dense(1)]).compile("sgd", "mse")  # It is not built.
    with pytest.raises(lockstep.ModelError, match="has no model that is compiled and built"):
        lockstep.ClusterCoordinator(strategy).schedule(print)


def test_synchronous_training_is_for_fit(chief):
    with pytest.raises(lockstep.OptionError, match="max_staleness=0 is for fit"):
        lockstep.ClusterCoordinator(chief(max_staleness=0)).schedule(print)


@pytest.mark.slow
def test_a_missing_process_is_named(chief):
    strategy = chief()
    with strategy.scope():
        model = net()
    assert model.built
    with pytest.raises(lockstep.ClusterError, match=r"ps 0 at 127\..* could not be reached within 0\.3 s"):
        lockstep.ClusterCoordinator(strategy).schedule(print)
    with pytest.raises(lockstep.ClusterError, match=r"the chief cannot begin a loop: .*could not be reached") as told:
        strategy._process_group._dispatcher.raise_failure()
    assert told.value.exit_code == PEER_LOST


@pytest.mark.parametrize(
    "begin",
    [
        lambda strategy, model: model.fit(np.ones((2, 3)), np.ones((2, 1)), verbose=0),
        lambda strategy, model: lockstep.ClusterCoordinator(strategy).schedule(print),
    ],
    ids=["fit", "schedule"],
)
def test_the_failure_of_another_process_ends_the_wait_for_a_server(chief, monkeypatch, begin):
    strategy = chief(timeout_seconds=DEADLINE)
    with strategy.scope():
        model = net()
    dispatcher = strategy._process_group._dispatcher

    def cannot_connect(*_):
        dispatcher.fail_calls("ps 0 failed: the port is in use", USER_ERROR)
        raise RetryableConnectError("connection refused")

    monkeypatch.setattr(rpc, "_connect_once", cannot_connect)
    with pytest.raises(lockstep.ClusterError, match=r"^ps 0 failed: the port is in use$") as caught:
        begin(strategy, model)
    assert caught.value.exit_code == USER_ERROR


def test_the_chief_trains_no_batch_itself(chief):
    strategy = chief()
    with strategy.scope():
        model = net()
    before = model.get_weights()
    with pytest.raises(lockstep.ModelError, match=r"workers make the training steps. Fix: schedule a function"):
        model.train_on_batch(np.ones((2, 3)), np.ones((2, 1)))
    for new, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(new, old)


def test_pull_and_push_are_for_scheduled_functions(chief):
    strategy = chief()
    with pytest.raises(lockstep.ScopeError, match=r"strategy.pull is for scheduled functions"):
        strategy.pull(net())
    with pytest.raises(lockstep.ScopeError, match=r"strategy.push is for scheduled functions"):
        strategy.push(net(), [])


def test_what_cannot_be_scheduled_is_refused(chief):
    coordinator = lockstep.ClusterCoordinator(chief())
    with pytest.raises(lockstep.OptionError, match="fn: expected a function, got 7"):
        coordinator.schedule(7)
    with pytest.raises(lockstep.OptionError, match=r"a RemoteValue cannot be an argument. Fix: fetch it before"):
        coordinator.schedule(print, kwargs={"value": [lockstep.RemoteValue(None, None)]})
    with pytest.raises(
        lockstep.OptionError, match=r"a PerWorkerDataset cannot be .* Fix: pass its iterator, iter\(dataset"
    ):
        coordinator.schedule(print, args=[coordinator.create_per_worker_dataset([1, 2])])
    with pytest.raises(lockstep.OptionError, match=r"expected an iterable of batches, or a function .* got 7"):
        coordinator.create_per_worker_dataset(7)


def test_per_worker_values_cannot_be_used_in_the_loop_itself(chief):
    batches = iter(lockstep.ClusterCoordinator(chief()).create_per_worker_dataset([1, 2]))
    with pytest.raises(lockstep.ScopeError, match="stands for a value of each worker"):
        next(batches)


VALUES = [
    None,
    True,
    -3,
    float("inf"),
    "text",
    {"a": [1, (2.5, None)], 3: {}},
    np.arange(6, dtype="int16").reshape(2, 3),
    np.float32(0.1),
    [],
    (),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_results_come_as_they_were_returned(value):
    found = decode_result(encode_result([value], "f"))[0]
    assert type(found) is type(value)
    np.testing.assert_equal(found, value)


def test_arrays_of_jax_come_as_numpys():
    variable = keras.Variable(np.ones((2,), "float32"), dtype="bfloat16")
    found = decode_result(encode_result({"v": variable, "a": keras.ops.ones((3,))}, "f"))
    assert {name: (type(array), str(array.dtype), array.shape) for name, array in found.items()} == {
        "v": (np.ndarray, "bfloat16", (2,)),
        "a": (np.ndarray, "float32", (3,)),
    }


@pytest.mark.parametrize(
    ("value", "what"),
    [({"x": object()}, "step returned a object"), (np.array(["a"]), "an array of <U1"), ({(1, 2): 3}, "the key")],
)
def test_results_that_cannot_be_encoded_are_named(value, what):
    with pytest.raises(lockstep.OptionError, match=what):
        encode_result(value, "step")


def fact(what, arrays=None):
    return {"kind": "published", "what": what}, arrays or {}


def test_sync_points_are_kept_up_to_their_limit_and_the_newest_always():
    points = SyncPointLog(limit_bytes=2000)
    for number in range(4):
        points.add({"number": number}, {"a": np.zeros(64)})
    assert [points.response_to({"kind": "ask", "point": number}) for number in (0, 1, 4)] == [
        fact({"is_forgotten": True}),
        fact({"is_forgotten": True}),
        None,
    ]
    for number in (2, 3):
        told, arrays = points.response_to({"kind": "ask", "point": number})
        assert (told["what"], arrays["a"].size) == ({"number": number}, 64)
    points.add({"number": 4}, {"a": np.zeros(1000)})
    assert points.response_to({"kind": "ask", "point": 4})[1]["a"].size == 1000


@pytest.mark.parametrize(("limit", "kept"), [(0, [2]), (20_000, [1, 2]), (2**26, [0, 1, 2])])
def test_a_late_process_gets_the_weights_of_the_sync_point_while_they_are_kept(limit, kept):
    points = SyncPointLog(limit_bytes=limit)
    for number in range(3):
        points.add({}, {}, {"w": np.full(1000, float(number))})
    told = [points.response_to({"kind": "ask", "point": number})[1] for number in range(3)]
    assert [number for number, arrays in enumerate(told) if arrays and (arrays["w"] == number).all()] == kept
    assert [number for number, arrays in enumerate(told) if arrays] == kept
    points.add({"value": True}, {})
    assert points.response_to({"kind": "ask", "point": 3}) == fact({"value": True})


def test_a_worker_gets_only_known_tasks():
    queue = TaskQueue(patience=1.0)
    queue.add(3)
    assert [queue.take("worker 0", known=number) for number in (0, 1, 1, 9)] == [None, 0, None, 1]
    assert queue.release("worker 0") == [0, 1]
    assert [queue.take("worker 1", known=number) for number in (0, 1, 1)] == [None, 0, None]
    assert [queue.take("worker 2", now=5.0, known=number) for number in (0, 1)] == [None, 0]  # It takes too long.
    assert queue.below == 0
    assert queue.finish("worker 2", 0)
    assert queue.below == 1


def test_tasks_come_before_a_sync_point_which_outlasts_its_call():
    dispatcher, session = TaskDispatcher(), ClientSession(Peer(0, 1, "here", 1, information={"job": "worker"}))
    dispatcher.open(1)
    dispatcher.schedule({"n": 0})
    dispatcher.publish_sync_point({"value": 5})
    take = {"kind": "take", "call": 1, "point": 0, "known": 1, "seconds": 0}
    task, _ = dispatcher.handle(session, take, {})
    assert (task["kind"], task["task"], task["below"]) == ("task", 0, 0)
    assert dispatcher.handle(session, take, {}) == fact({"value": 5})
    assert dispatcher.handle(session, take | {"point": 1}, {})[0]["kind"] == "nothing"
    dispatcher.close({})
    dispatcher.open(2)
    assert dispatcher.handle(session, take, {}) == fact({"value": 5})
    assert dispatcher.handle(session, take | {"point": 1}, {})[0]["kind"] == "over"


def test_a_script_that_has_scheduled_fewer_functions_than_the_chiefs_before_a_wait_is_named():
    dispatcher, session = TaskDispatcher(), ClientSession(Peer(1, 2, "here", 1, information={"job": "worker"}))
    dispatcher.open(1)
    for number in range(2):
        dispatcher.schedule({"n": number})
    take = {"kind": "take", "call": 1, "seconds": 0}
    assert dispatcher.handle(session, take | {"point": 0, "known": 2}, {})[0]["task"] == 0
    dispatcher.publish_sync_point({})
    dispatcher.schedule({"n": 2})  # Behind the wait of a worker that comes late.
    assert dispatcher.handle(session, take | {"point": 0, "known": 2}, {})[0]["task"] == 1
    failed, _ = dispatcher.handle(session, take | {"point": 1, "known": 2, "seconds": DEADLINE}, {})
    assert (failed["kind"], failed["code"]) == ("failed", USER_ERROR)
    assert failed["sentence"].startswith(
        "The script of worker 1 of 2 (here, process 1) has scheduled 2 functions before it waits, and"
    )
    assert ". Fix: make the same calls of schedule," in failed["sentence"]
    with pytest.raises(ClusterError, match="has scheduled 2 functions"):
        dispatcher.join()


def test_a_task_that_a_worker_does_not_know_is_an_error_of_its_script():
    context = SimpleNamespace(role=SimpleNamespace(name="worker 1 of 2 (b:1)"))
    scheduler = WorkerScheduler(context, None, None, None)
    with pytest.raises(
        ClusterError, match=r"The script of worker 1 of 2 \(b:1\) has scheduled 0 functions .*Fix: "
    ) as caught:
        scheduler._run_task(Task(2, {}, {}))
    assert caught.value.exit_code == USER_ERROR


def test_raising_the_bound_completes_numbers_that_were_never_added():
    done = CompletedIds()
    done.add(5), done.add(9)
    done.raise_to(5)
    assert (done.below, 9 in done, 8 in done) == (6, True, False)
    done.raise_to(3)
    assert done.below == 6


def test_seed_offsets_give_the_numbers_of_sequential_steps():
    seed, average = np.array([7, 10], "uint32"), np.zeros(2, "float32")
    draws = SeedOffsets([StateMerge.SEED, StateMerge.MEAN], [np.array([7, 13], "uint32"), average + 1], [seed, average])
    first, second = draws.apply([seed, average], 0), draws.apply([seed, average], 2)
    assert (first[0].tolist(), second[0].tolist()) == ([7, 10], [7, 16])
    assert second[1] is average
    assert draws.apply([seed, average], 2, replica=1)[0].tolist() != [7, 16]
    assert draws.apply([seed, average], -1)[0].tolist() == [7, 7]  # of a worker that was lost for a while


def test_seeds_of_a_function_of_many_steps_on_several_devices():
    seed = np.array([7, 10], "uint32")
    followed = FollowedState([StateMerge.SEED], lambda: ({"number": 1, "update": 0}, {"0": seed}))
    values = followed.newest(1, {})
    drawn = [followed.at_step(values, lambda: [seed + np.uint32([0, 3])], 0, replica) for replica in (0, 2, 2**20)]
    assert len({tuple(one) for (one,) in drawn}) == 3


def test_after_a_join_the_processes_agree_on_the_steps_and_the_learning_rate_of_the_optimizer():
    ours, theirs = net(), net()
    for model in (ours, theirs):
        model.optimizer.build(model.trainable_variables)
    ours.optimizer.iterations.assign(7)
    ours.optimizer.learning_rate = 0.25
    set_values(optimizer_numbers_of(theirs), values_of(optimizer_numbers_of(ours)))
    assert (int(theirs.optimizer.iterations), float(theirs.optimizer.learning_rate)) == (7, 0.25)
