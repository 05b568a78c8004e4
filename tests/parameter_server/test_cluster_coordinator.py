"""Loops of one's own with variables on servers, by real processes; each job has a deadline."""

import json
import re

import keras
import numpy as np
import pytest

from tests.launch.launching import program, run

DEADLINE = 120.0

BEGIN = """
import faulthandler; faulthandler.dump_traceback_later(100, exit=True)
import keras, lockstep, numpy as np
name = task["type"] + str(task["index"])
def say(**what):
    write("said-" + name, json.dumps(what))
def by_hand():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
"""

TRAINING = """
import jax
keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
x = random.normal(size=(96, 5)).astype("float32")
y = x[:, :1] * 2 + x[:, 1:2] ** 2
layers = keras.layers
def batches():
    while True:
        for start in range(0, 96, 16):
            yield x[start : start + 16], y[start : start + 16]
def make_model(optimizer, dropout):
    inner = [layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dropout(dropout), layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *inner])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model
def found_of(model):
    return [np.asarray(weight, "float64").tolist() for weight in model.get_weights()]
def train(schedule, join, fetch, make_model, pull, push, iterator):
    model = make_model(keras.optimizers.Adam(0.01), 0.2)
    def step(batches):
        return model.train_on_batch(*next(batches), return_dict=True)
    def twice(batches, *, factor):
        first, second = (model.train_on_batch(*next(batches)) for _ in range(2))
        return {"first": first, "both": ([first[0] * factor], np.asarray(second))}
    @jax.jit
    @jax.value_and_grad
    def loss_of(trainable, others, rows, targets):
        return ((model.stateless_call(trainable, others, rows)[0] - targets) ** 2).mean()
    def sgd(batches):
        values, others = pull(model), [v.value for v in model.non_trainable_variables]
        loss, gradients = loss_of(values, others, *next(batches))
        push(model, gradients)
        return loss
    told = []
    for epoch in range(2):
        results = [schedule(step, (iterator,)) for _ in range(4)]
        if epoch:
            join()
            told.append([result["mae"] for result in fetch(results)])
        told.append(model.evaluate(x, y, verbose=0))
        model.optimizer.learning_rate = 0.003
    nested = fetch({"nested": (schedule(step, (iterator,)), [schedule(step, (iterator,))])})
    told += [nested["nested"][0]["loss"], nested["nested"][1][0]["loss"]]
    join()
    told.append(found_of(model))
    model = make_model(keras.optimizers.SGD(0.05), 0.0)
    found = fetch(schedule(twice, (iterator,), {"factor": 2}))
    told += [found["first"], found["both"][0], found["both"][1].tolist()]
    def tested():
        own = model.test_on_batch(x[:16], y[:16], return_dict=True)["loss"]
        predicted = np.asarray(model.predict_on_batch(x[:2])), model.predict(x[:2], verbose=0)
        return own, predicted, model.evaluate(x[:16], y[:16], verbose=0)
    told += [keras.tree.map_structure(lambda one: np.asarray(one).tolist(), fetch(schedule(tested, ())))]
    join()  # Only then has the worker what is not trained, for a gradient of its own.
    results = [schedule(sgd, (iterator,)) for _ in range(3)]
    told.append([float(loss) for loss in fetch(results)])
    model.fit(x, y, batch_size=48, verbose=0, shuffle=False)
    told.append(model.evaluate(x, y, verbose=0))
    return told
"""

DISTRIBUTED = """
strategy = lockstep.ParameterServerStrategy()
coordinator = lockstep.ClusterCoordinator(strategy)
iterator = iter(coordinator.create_per_worker_dataset(batches))
def make_in_scope(*given):
    with strategy.scope():
        return make_model(*given)
loop = coordinator.schedule, coordinator.join, coordinator.fetch
say(told=train(*loop, make_in_scope, strategy.pull, strategy.push, iterator))
"""

ALONE = """
def pull(model):
    return [v.value for v in model.trainable_variables]
def push(model, gradients):
    for variable, gradient in zip(model.trainable_variables, gradients):
        variable.assign(variable.value - 0.05 * gradient)
def schedule(function, args, kwargs={}):
    return function(*args, **kwargs)
told = train(schedule, lambda: None, lambda found: found, make_model, pull, push, batches())
"""

COUNTING = """
strategy = lockstep.ParameterServerStrategy({options})
with strategy.scope():
    model = by_hand()
    model.compile(keras.optimizers.SGD(1.0), "mse")
coordinator = lockstep.ClusterCoordinator(strategy)
def count(number, label, *, own):
    {inside}
    own.append(number)
    strategy.pull(model)
    strategy.push(model, [np.full((3, 1), -1.0), np.zeros(1)])
    return {{"number": number, "label": label, "who": name}}
own = coordinator.create_per_worker_resource(list)
def round_of(pieces, label):
    return [coordinator.schedule(count, args=(number, label), kwargs=dict(own=own)) for number in range(pieces)]
"""


def said_in(folder):
    return {path.name.removeprefix("said-"): json.loads(path.read_text()) for path in folder.glob("said-*[0-9]")}


def job(folder, code, *words, workers=2, code_expected=0):
    """Run it to its end; what each process has said, and the output."""
    path = program(folder, BEGIN + code)
    done = run("--workers", workers, "--servers", 1, *words, path, deadline=DEADLINE, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == code_expected, done.stdout + done.stderr
    return said_in(folder), done


def near(one, other):
    pairs = list(zip(keras.tree.flatten(one), keras.tree.flatten(other), strict=True))
    assert pairs
    for first, second in pairs:
        np.testing.assert_allclose(first, second, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_one_worker_trains_as_plain_keras_does_and_all_processes_see_the_same(tmp_path):
    said, _ = job(tmp_path, TRAINING + DISTRIBUTED, workers=1)
    assert sorted(said) == ["chief0", "ps0", "worker0"]
    assert said["ps0"] == said["worker0"] == said["chief0"]
    alone = {"keras": keras, "np": np}
    exec(TRAINING + ALONE, alone)
    near(said["chief0"]["told"], alone["told"])


ROUNDS = """
results = round_of(20, "polled")
times = 0
while not coordinator.done():
    times += 1
found = coordinator.fetch(results)
sums = coordinator.fetch({"sums": [coordinator.schedule(lambda: 1.5), (coordinator.schedule(lambda: np.arange(2)), 7)]})
round_of(10, "joined")
coordinator.join()
first = model.get_weights()[0].ravel().tolist()
if strategy.is_chief:
    model.layers[-1].bias.assign([5.0])
one = round_of(1, "again")[0].get()
if strategy.is_chief:
    model.layers[-1].bias.assign(model.layers[-1].bias + 1)
coordinator.join()
say(found=found, times=times, first=first, sums=[sums["sums"][0], sums["sums"][1][0].tolist(), sums["sums"][1][1]], one=one,
    last=[weight.ravel().tolist() for weight in model.get_weights()])
try:
    round_of(8, "wrong")
    coordinator.join()
except lockstep.ClusterError as error:
    write("error-" + name, str(error))
    raise
except ValueError:  # The launcher ends all when this worker has ended.
    wait_for(lambda: is_there("error-chief0"))
    raise
"""
MEETING = """if label == "polled":
        write('at-' + name); wait_for(lambda: is_there('at-worker0') and is_there('at-worker1'))
    if label == "again":
        try:
            model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
        except lockstep.ScopeError as error:
            label = str(error)
    if label == "wrong" and number == 2:
        wait_for(lambda: all(is_there('said-' + process) for process in ('chief0', 'ps0', 'worker0', 'worker1')))
        raise ValueError('two is too much')"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """A job of two workers that goes well until a function raises; its folder, what was said and the output."""
    folder = tmp_path_factory.mktemp("counted")
    return folder, *job(folder, COUNTING.format(options="", inside=MEETING) + ROUNDS, code_expected=13)


@pytest.mark.slow
@pytest.mark.xdist_group("counted")
def test_two_workers_run_each_function_once_and_all_processes_get_the_same(counted):
    _, said, _ = counted
    assert sorted(said) == ["chief0", "ps0", "worker0", "worker1"]
    chief = said["chief0"]
    assert all(each == chief for each in said.values())
    assert [one["number"] for one in chief["found"]] == list(range(20))
    assert {one["who"] for one in chief["found"]} == {"worker0", "worker1"}
    assert chief["sums"] == [1.5, [0, 1], 7]
    assert chief["one"]["label"].startswith("A scheduled function cannot call fit. Fix: use train_on_batch")
    assert chief["first"] == [30.0] * 3
    assert chief["last"] == [[31.0] * 3, [6.0]]  # Where the chief's script has changed a weight, that stands


@pytest.mark.slow
@pytest.mark.xdist_group("counted")
def test_what_a_function_raises_is_named_at_the_chief(counted):
    folder, _, done = counted
    error = (folder / "error-chief0").read_text()
    assert re.match(r"worker [01] .* failed in task 35: ValueError: two is too much", error)
    assert "raise ValueError('two is too much')" in done.stdout  # The traceback is where it was raised.


@pytest.mark.slow
def test_nothing_is_lost_and_nothing_counts_twice_when_a_worker_is_killed(tmp_path):
    """Worker 1 dies right after a push, so that its piece is done again; started again, it goes through the script and works on."""
    rounds = """
first = coordinator.fetch(round_of(8, "first"))
again = round_of(12, "second")
coordinator.join()
say(first=[one["number"] for one in first], who=[one["who"] for one in coordinator.fetch(again)],
    weights=model.get_weights()[0].ravel().tolist())
"""
    dying = """if name == "worker1" and label == "first" and not is_there("died"):
        strategy.pull(model)
        strategy.push(model, [np.full((3, 1), -1.0), np.zeros(1)])
        write("died"); os.kill(os.getpid(), signal.SIGKILL)
    if label == "first" and name == "worker0":
        wait_for(lambda: is_there("died"))
    if label == "second":
        write("second-" + name); wait_for(lambda: is_there("second-worker0") and is_there("second-worker1"))"""
    code = COUNTING.format(options="max_staleness=3", inside=dying) + rounds
    said, done = job(tmp_path, code, "--max-restarts", 1)
    assert sorted(said) == ["chief0", "ps0", "worker0", "worker1"], done.stdout + done.stderr
    assert all(each == said["chief0"] for each in said.values())
    assert said["chief0"]["first"] == list(range(8))
    assert set(said["chief0"]["who"]) == {"worker0", "worker1"}
    assert said["chief0"]["weights"] == [20.0] * 3
    assert "will be reassigned to other workers" in done.stdout


@pytest.mark.slow
def test_an_error_of_the_chief_between_joins_ends_all_in_order(tmp_path):
    rounds = """
round_of(4, "")
if strategy.is_chief:
    coordinator.join()
    raise KeyError("mine")
try:
    coordinator.join()
    coordinator.fetch(round_of(2, ""))
except lockstep.ClusterError as error:
    say(error=str(error))
"""
    said, _ = job(tmp_path, COUNTING.format(options="", inside="pass") + rounds, workers=1, code_expected=13)
    assert {who: each["error"] for who, each in said.items()} == dict.fromkeys(
        ["ps0", "worker0"], "the chief has failed: KeyError: 'mine'"
    )
