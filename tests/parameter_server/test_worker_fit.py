"""What runs on the workers and the evaluator of a job with parameter servers."""

import json
from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from lockstep._errors import ClusterError
from lockstep.data.keras_adapter import KerasInput
from lockstep.data.random_state import capture_random_state, restore_random_state
from lockstep.data.sources import Pending, make_source
from lockstep.execution.replica import replica_seed
from lockstep.parameter_server import fit_dispatch
from lockstep.parameter_server.chief_fit import ChiefFit
from lockstep.parameter_server.evaluator import _evaluate, run_evaluator
from lockstep.parameter_server.fit_dispatch import ChiefFitDispatch, WorkerFitDispatch
from lockstep.parameter_server.gradient_step import GradientResult
from lockstep.parameter_server.worker_fit import WorkerFit
from tests.parameter_server.test_task_dispatcher import ServedDispatcher


class Validation(keras.utils.PyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, number):
        return np.ones((4, 2)), np.eye(3)[[0, 1, 2, 0]]


def test_evaluator_logs_a_metric_of_several_numbers():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile(loss="mse", metrics=[keras.metrics.F1Score()])
    lines = []
    _evaluate(model, Validation(), [np.zeros((2, 3)), np.float32([1, 0, 0])], [], "1", lines.append)
    (line,) = lines
    assert "val_f1_score: [" in line
    assert f"val_loss: {(0 + 2 + 2 + 0) / 12:.4g}" in line


def net(width=1):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(width)])
    model.compile("sgd", "mse")
    return model


def test_workers_learn_of_the_hooks_of_many_epochs():
    state = "state of random generators " * 600
    hooks = [[kind, f"{state}{epoch}"] for epoch in range(300) for kind in ("begin", "end")]
    done = []
    data = Mock(epoch_hooks=hooks[:9], pass_metadata=lambda: {"pass": 1, "hooks": data.epoch_hooks})
    model = net()
    batches = SimpleNamespace(batch=lambda *numbers: numbers)
    batches.begin = lambda metadata: done.extend(metadata["hooks"][len(done) :])
    with ServedDispatcher() as served:
        chief = ChiefFit(model, data, served.dispatcher, 1, None, 1, None)
        worker = WorkerFit(model, None, batches, served.client(1), None, 1, None)
        for key, count in (("first", 9), ("second", 9), ("third", len(hooks))):
            data.epoch_hooks = hooks[:count]
            chief._pass_key = key
            chief._publish_pass()
            assert worker._batch({"pass": key, "batch": 7, "lowest": 5}) == (7, 5)
            assert done == hooks[:count]


def chief_of(served, values):
    """A chief that has these non-trainable values, and has resumed after 50 steps."""
    chief = ChiefFit(net(), Mock(), served.dispatcher, 1, None, None, None)
    chief._state_sync = SimpleNamespace(totals=SimpleNamespace(non_trainable=values), steps_before=50)
    return chief


@pytest.mark.parametrize("is_known", [True, False])
def test_a_checkpoint_has_the_state_after_the_last_step_or_is_not_written(is_known):
    """When the servers are lost, the state after the last step may be lost with them; that before it belongs to another step."""
    with ServedDispatcher() as served:
        chief, before, after = chief_of(served, []), [[0], [], [], []], [[1], [], [], []]
        chief._client, chief._keras_state, chief._state_after_steps = Mock(), before, after if is_known else None
        served.dispatcher.abort("ps 0 of 1 was lost")
        if is_known:
            assert chief.newest_state() is after
        else:
            with pytest.raises(
                ClusterError, match="ps 0 of 1 was lost"
            ):  # Before Keras takes an older state for the newest.
                chief.wait_for_steps()
            assert chief.wait_for_steps() is None
            with pytest.raises(ClusterError, match="ps 0 of 1 was lost"):
                chief.newest_state()


class Tasks:
    """A dispatcher whose only worker does the first task last, if it may."""

    def __init__(self):
        self.worker_count, self.has_failed, self.publish, self.open = 1, False, Mock(), Mock()
        self.scheduled, self.done = [], []

    def schedule(self, task, when_done):
        self.scheduled.append((task["batch"], when_done))

    def wait_until(self, condition):
        while not condition():
            number, when_done = self.scheduled.pop(1 if len(self.scheduled) > 1 else 0)
            self.done.append(number)
            result = Future()
            result.set_result(({"no_sums": [], "rows": 2, "logs": {"loss": number}, "names": ["loss"]}, {}))
            when_done(result)


def steps_of(tasks, state, batch, has_reader=False):
    """A chief that makes steps; gives a function that makes the step of the batch with a number."""
    data = Mock(epoch_hooks=[], pass_metadata=lambda: {"hooks": []}, source=Mock(has_reader=has_reader))
    chief = ChiefFit(net(), data, tasks, 1, None, None, None)
    chief._state_sync, chief._counters = Mock(totals=Mock(metrics=[])), Mock()
    chief._metric_logs = lambda metrics: {}
    chief._keras_state = chief._state_after_steps = state

    def step(number, state=state):
        data.last_taken = 1, number
        return chief.step(state, batch)[0]

    return step


def test_the_chief_does_not_run_further_ahead_of_a_batch_than_workers_may_keep_batches():
    """A worker that hangs keeps its batch, and all others keep the later ones, as that may be reassigned to them."""
    tasks, large = Tasks(), jax.ShapeDtypeStruct((2, 2**24), "float32")
    step = steps_of(tasks, ([], [], [], []), (large,))
    for number in range(12):
        step(number)
        assert number - min((*(first for first, _ in tasks.scheduled), number)) <= 2**28 // (2 * 2**24 * 4)
    assert tasks.done != sorted(tasks.done)


def test_the_chief_runs_ahead_of_a_batch_if_workers_read_each_by_its_number():
    tasks, large = Tasks(), jax.ShapeDtypeStruct((2, 2**24), "float32")
    step = steps_of(tasks, ([], [], [], []), (large,), has_reader=True)
    for number in range(12):
        step(number)
    assert 1 not in tasks.done


def test_the_first_logs_of_an_epoch_are_not_those_of_the_epoch_before():
    tasks, first, reset = Tasks(), ([], [], [], [1.0]), ([], [], [], [0.0])
    step = steps_of(tasks, first, (np.ones((2, 2), "float32"),))
    assert step(0)["loss"] == 0
    assert step(1, reset)["loss"] == 1


def test_a_log_of_a_metric_that_is_not_a_number_is_that_of_the_metric():
    worker = WorkerFit(net(), None, None, None, Mock(traffic=(0, 0)), 1, None)
    logs, metric_logs = {"loss": float("nan"), "own": 1.0}, {"loss": float("nan")}
    assert worker._report(4, GradientResult({}, logs, metric_logs, [], []))["logs"] == {"own": 1.0}


def test_no_worker_waits_for_one_that_compiles_its_first_step():
    """Its first pull does not count it as active, and its gradient is one of values that it has pulled after that."""
    done = []
    client = Mock(traffic=(0, 0), pull=lambda rows, *, part, will_push: done.append(will_push) or {})
    tasks = Mock(wait_for=lambda call, key: ({"number": 1, "update": 0}, {}))
    worker = WorkerFit(net(), Mock(replicas=1), Mock(batch=lambda *numbers: (np.ones((4, 2)),)), tasks, client, 1, None)
    worker._compute = lambda *given: done.append("step") or GradientResult({}, {}, {}, [], given[2])
    worker._observe_changes = Mock()
    what = {"pass": "", "batch": 0, "lowest": 0, "steps_before": 0, "optimizer": {}, "state": 1}
    for update in range(2):
        worker._run_task(SimpleNamespace(what=what | {"update": update}, arrays={}, number=update))
    assert done == [False, "step", True, "step", True, "step"]


@pytest.mark.parametrize("devices", [(2, 2), (4, 2), (2, 1)])
def test_replicas_of_all_workers_draw_different_numbers(devices):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    seed = np.array(model.non_trainable_variables[0].value)
    tasks = Mock(wait_for=lambda call, key: ({"number": 1, "update": 0}, {"0": seed}))
    batches = SimpleNamespace(batch=lambda *numbers: (np.ones((4, 2), "float32"),))
    seen = []

    def compute(values, non_trainable, metrics, batch):
        seen.append(non_trainable[0])
        return GradientResult({}, {}, {}, [non_trainable[0] + np.uint32([0, 3])], metrics)

    drawn = set()
    for part, replicas in enumerate(devices):
        worker = WorkerFit(model, Mock(replicas=replicas), batches, tasks, Mock(traffic=(0, 0)), 1, None)
        worker._compute, worker._pull_values, worker._is_checked = compute, Mock(), True
        worker._observe_changes = Mock()
        what = {"pass": "", "batch": 0, "lowest": 0, "part": part, "parts": 2, "update": 0}
        what |= {"steps_before": 0, "optimizer": {}, "state": 1}
        worker._run_task(SimpleNamespace(what=what, arrays={}, number=part))
        numbers = range(replicas)
        drawn |= {tuple(np.asarray(replica_seed(jnp.asarray(seen[-1]), jnp.int32(number)))) for number in numbers}
    assert len(drawn) == sum(devices)


@pytest.mark.parametrize(
    ("begun", "exits"),
    [
        ([(0.0, 7), (0.0, 700)], False),  # It was not signalled.
        ([(4.9, 7), (4.9, 700)], False),
        ([(5.1, 7), (6.0, 10), (7.0, 12), (90.0, 8)], False),  # All of these may have been in flight.
        ([(5.1, 7), (6.0, 13)], True),
    ],
)
def test_a_worker_that_was_signalled_exits_if_the_chief_continues(begun, exits):
    preemption = Mock(exit_alone=Mock(side_effect=SystemExit(75)))
    worker = WorkerFit(net(), None, None, None, Mock(), 1, None, preemption, workers=2)
    worker._batch = Mock(side_effect=InterruptedError("its work"))
    for number, (preemption.seconds_signalled, update) in enumerate(begun, start=1):
        with pytest.raises(SystemExit if exits and number == len(begun) else InterruptedError):
            worker._run_task(SimpleNamespace(what={"update": update}, arrays={}, number=update))


@pytest.mark.slow
def test_a_history_of_any_size_comes_to_all_processes(monkeypatch):
    history = keras.callbacks.History()
    history.history, history.epoch = {"matrix": [np.ones((800, 800))] * 2, "number": [1j]}, [0]
    with ServedDispatcher() as served:
        chief = ChiefFitDispatch(MagicMock(), served.dispatcher, MagicMock())
        monkeypatch.setattr(chief, "_chief_fit", MagicMock())
        data = reads(Shuffled())()
        data.track_state(None)
        assert chief.run_call(net(), "fit", {"x": data}, lambda: history) is history
        found = worker_of(served).run_call(net(), "fit", {"x": reads(Shuffled())()}, None)
    assert (np.array(found.history["matrix"]).shape, found.history["number"]) == ((2, 800, 800), ["1j"])


def evaluated_lines(served, on_line):
    """Runs an evaluator to the end of the call; gives its lines. ``on_line`` gets the number of each of them."""
    lines = []

    def log(line):
        lines.append(line)
        on_line(len(lines))

    model, client = net(3), Mock(versions=[6])
    client.pull.return_value = {variable.path: np.zeros(variable.shape) for variable in model.trainable_variables}
    task_client = served.client(1, "evaluator", timeout_seconds=2, long_seconds=2)
    run_evaluator(model, Validation(), task_client, client, 1, log)
    return lines


def test_the_evaluator_evaluates_each_epoch_of_a_training_that_begins_later():
    with ServedDispatcher() as served:
        chief = chief_of(served, [])
        chief.publish_epoch(5)
        steps = {1: lambda: chief.publish_epoch(6), 2: lambda: served.dispatcher.close({"epoch": [5, 6]})}
        lines = evaluated_lines(served, lambda number: steps[number]())
    assert [line.partition(":")[0] for line in lines] == [f"evaluator, after epoch {n} and 56 updates" for n in (6, 7)]


def test_the_evaluator_skips_epochs_that_have_ended_and_the_chief_keeps_the_values_of_the_newest():
    with ServedDispatcher() as served:
        chief = chief_of(served, [])
        for epoch in range(9):
            chief._state_sync.totals.non_trainable = [np.full(1000, epoch)]
            chief.publish_epoch(epoch)
        kept = [array for _, arrays in served.dispatcher._published.values() for array in arrays.values()]
        assert [array[0] for array in kept] == [8]
        chief._state_sync.totals.non_trainable = []
        chief.publish_epoch(9)
        lines = evaluated_lines(served, lambda number: served.dispatcher.close({"epoch": [*range(10)]}))
    assert [line.partition(" and ")[0] for line in lines] == ["evaluator, after epoch 10"]


def test_an_epoch_that_ends_before_a_step_of_this_run_has_the_values_of_the_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with ServedDispatcher() as served:
        chief = ChiefFit(model, Mock(), served.dispatcher, 1, None, None, None)
        chief._state_sync = SimpleNamespace(totals=SimpleNamespace(non_trainable=[]), steps_before=0)
        chief.publish_epoch(5)
        (kept,) = (arrays for _, arrays in served.dispatcher._published.values() if arrays)
    (seed,) = model.non_trainable_variables
    assert {name: value.tolist() for name, value in kept.items()} == {"0": np.asarray(seed.value).tolist()}


def test_the_evaluator_logs_that_it_came_too_late_for_the_last_epoch():
    with ServedDispatcher() as served:
        chief_of(served, []).publish_epoch(5)

        def end_call(number):
            if number == 1:
                served.dispatcher.close({"epoch": [5, 6]}, {"trainable/0": np.ones(3)}, {"hooks": np.ones(2)})
                served.dispatcher.open(2)
                served.dispatcher.close({"epoch": []}, {"trainable/0": np.zeros(3)})

        lines = evaluated_lines(served, end_call)
    assert "did not evaluate epoch 7, the last one" in lines[-1]


@pytest.mark.parametrize("evaluator", [None, "here:1"])
def test_the_chief_publishes_epochs_only_for_an_evaluator(evaluator):
    context, fit, arguments = Mock(role=Mock(evaluator=evaluator)), Mock(), {}
    ChiefFitDispatch(context, Mock(), Mock())._add_callbacks(net(), arguments, fit)
    for callback in arguments["callbacks"]:
        callback.on_epoch_begin(0)
        if isinstance(callback, keras.callbacks.LambdaCallback):
            callback.on_epoch_end(0, {})
    assert fit.publish_epoch.called == bool(evaluator)


@pytest.mark.parametrize("later", ["evaluate", "fit"])
def test_a_worker_that_comes_after_later_calls_has_the_weights_of_fit_or_logs_that_they_are_gone(later):
    model = net()
    values = {name: np.full(variable.shape, 7) for name, variable in fit_dispatch.synced_variables(model).items()}
    hooks = {"hooks of the data": np.frombuffer(b"[]", np.uint8), "history": np.frombuffer(b"{}", np.uint8)}
    with ServedDispatcher() as served:
        served.dispatcher.close({"epoch": [], "taken": 0, "random": capture_random_state()}, values, hooks)
        served.dispatcher.open(2)
        served.dispatcher.close({"value": 0.5}, values if later == "fit" else None)
        worker = worker_of(served)
        worker.run_call(model, "fit", {"x": reads(Shuffled())()}, None)
    is_trained = all((variable.numpy() == 7).all() for variable in model.variables)
    assert (is_trained, worker._context.log.called) == (later == "evaluate", later == "fit")


# --- the data of a worker that comes late ----------------------------------------------------------------------------


class Shuffled(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.order = np.arange(40)

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return np.ones((10, 2), "float32"), self.order[10 * number :][:10, None].astype("float32")

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def numbers():
    for number in range(30):
        yield np.ones((4, 2), "float32"), np.full((4, 1), number, "float32")


def reads(data):
    """Gives the input of each call on this data; what one has read and not used is there for the next."""
    pending = Pending()
    return lambda: KerasInput(make_source(data, pending=lambda _: pending), lambda batch: batch, 0, 4, lambda _: None)


def end_call(dispatcher, own, epochs):
    """Ends a call in which the chief has read so many epochs."""
    own.track_state(None)
    for _ in range(epochs):
        own.on_epoch_begin()
        batches = own.get_jax_iterator()
        for _ in range(4):
            batches.take(None)
        own.on_epoch_end()
    hooks = {"hooks of the data": np.frombuffer(json.dumps(own.epoch_hooks).encode(), np.uint8)}
    hooks |= {"history": np.frombuffer(b"{}", np.uint8)}
    result = {"epoch": [], "taken": own.total_taken, "random": capture_random_state()}
    dispatcher.close(result, {"weights": np.ones(3)}, hooks)


def assert_alike(own, chiefs):
    """The next batch is the same on both."""
    if isinstance(own, Shuffled):
        assert (own.order == chiefs.order).all()
    else:
        assert next(own)[1][0] == next(chiefs)[1][0]


def worker_of(served):
    return WorkerFitDispatch(Mock(role=Mock(job="worker", workers=["b:1"])), served.client(1), Mock())


@pytest.mark.parametrize("make", [numbers, Shuffled])
def test_a_worker_that_comes_after_two_calls_reads_what_the_chief_reads_in_the_next(make):
    chiefs, own = make(), make()
    of_chief, of_worker = reads(chiefs), reads(own)
    with ServedDispatcher() as served:
        end_call(served.dispatcher, of_chief(), 2)
        served.dispatcher.open(2)
        end_call(served.dispatcher, of_chief(), 1)
        worker = worker_of(served)
        for _ in range(2):
            worker.run_call(net(), "fit", {"x": of_worker()}, None)
    assert_alike(own, chiefs)


@pytest.mark.parametrize("make", [numbers, Shuffled])
@pytest.mark.parametrize("role", ["worker", "ps"])
def test_an_evaluation_leaves_data_and_random_numbers_alike_on_all_processes(make, role):
    """The chief evaluates alone: what it reads and draws, the others must not use again."""
    chiefs, own, before = make(), make(), capture_random_state()
    with ServedDispatcher() as served:
        chief = ChiefFitDispatch(Mock(), served.dispatcher, Mock())
        served.dispatcher.close({})
        data = reads(chiefs)()

        def evaluation():
            data.on_epoch_begin()
            batches = data.get_jax_iterator()
            for _ in range(4):
                batches.take(None)
            data.on_epoch_end()
            np.random.random(7)
            return 0.5

        assert chief.run_call(net(), "evaluate", {"x": data}, evaluation) == 0.5
        drawn = np.random.random()
        restore_random_state(before)
        follower = WorkerFitDispatch(Mock(role=Mock(job=role, workers=["b:1"])), served.client(1), Mock())
        assert follower.run_call(net(), "evaluate", {"x": reads(own)()}, None) == 0.5
    assert np.random.random() == drawn
    assert_alike(own, chiefs)


@pytest.mark.parametrize("make", [numbers, Shuffled])
def test_a_worker_that_got_no_batch_of_a_call_reads_what_the_chief_reads_in_the_next(make, monkeypatch):
    chiefs, own = make(), make()
    with ServedDispatcher() as served:

        class Idle:
            def __init__(self, *arguments):
                pass

            def run(self):
                served.in_thread(lambda: end_call(served.dispatcher, reads(chiefs)(), 2))
                return worker._task_client.wait_for_end(1)

        monkeypatch.setattr(fit_dispatch, "WorkerFit", Idle)
        monkeypatch.setattr(WorkerFitDispatch, "_connect_to_servers", Mock())
        worker = worker_of(served)
        worker.run_call(net(), "fit", {"x": reads(own)()}, None)
        served.wait()
    assert_alike(own, chiefs)
