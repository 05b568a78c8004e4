"""A checkpoint whose checksums are right and whose metadata is not: it is passed over, and its field is named."""

import ast
import contextlib
import copy
import inspect
import json
import math
import shutil
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lockstep
from lockstep._keras.callback_state import CALLBACK_STATE
from lockstep.callbacks import BackupAndRestore, LearningRateScaling, NanGuard, ThroughputMonitor
from lockstep.checkpoint.store import CheckpointStore
from lockstep.fit.checkpointing.callback_attributes import FirstAttributes, packed_attributes, unpacked_attributes
from lockstep.fit.checkpointing.metadata_check import check_metadata
from tests.checkpoint.test_damage import fields_of, say
from tests.fit.monitoring.runs import built, data

pytestmark = pytest.mark.xdist_group(__name__)  # One training makes the checkpoints of all tests.


class Own(keras.callbacks.ModelCheckpoint):
    """A user's, with state of its own in each form that a checkpoint has."""

    def __init__(self, filepath):
        super().__init__(filepath, monitor="loss", save_best_only=True, save_weights_only=True)
        self.phase, self.seen, self.table = "warm-up", [], {}

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        self.phase = f"batch {batch}"
        self.seen = [*self.seen, (batch, None)]
        self.table = {"last": keras.ops.convert_to_numpy(logs["loss"])}


def callbacks(folder):
    return [
        BackupAndRestore(folder / "run", save_freq=1, keep=2, async_=False),
        keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=9),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        Own(folder / "best.weights.h5"),
        LearningRateScaling(8, warmup_epochs=1),
        NanGuard("skip"),
        ThroughputMonitor(),
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with the checkpoints of a run, which is not changed."""
    folder = tmp_path_factory.mktemp("metadata")
    trained(built(), folder, callbacks(folder), epochs=2)
    return folder


@pytest.fixture(scope="module")
def facts(whole):
    """The metadata of the newest of them."""
    return fields_of(CheckpointStore(whole / "run").paths()[-1])["facts"]


@pytest.fixture(scope="module")
def model():
    return built()


@contextlib.contextmanager
def changed(whole, facts, which=slice(-1, None)):
    """A copy of the folder, in which the newest checkpoint, or several, have this metadata and a right checksum."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "copy"
        shutil.copytree(whole, folder)
        for path in CheckpointStore(folder / "run").paths()[which]:
            say(path, fields_of(path) | {"facts": facts})
        yield folder


def trained(model, folder, given, epochs=3):
    x, y = data()
    return model.fit(x, y, batch_size=16, epochs=epochs, callbacks=given, verbose=0)


def places(value, path=()):
    """Where in nested lists and dicts something stands."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**9, 10**30, -(10**30), 0.5, math.nan, math.inf, -0.0, "", "text", "0" * 16, "/tmp/elsewhere"]),
    st.sampled_from([[], {}, [[]], [1], {"a": 1}, {"list": 3}, {"array": "no such", "scalar": True}, {"dict": [[1]]}]),
    st.sampled_from(
        [{"keras.ops": "__builtins__"}, {"keras.ops": "less"}, {"array": []}, {"tuple": [{}]}, {"set": []}]
    ),
    st.recursive(st.integers(0, 1), lambda inner: st.lists(inner, max_size=2), max_leaves=5),
)


def wrong_metadata(facts):
    where = [path for name, value in facts.items() for path in places(value, (name,))]
    return st.tuples(st.sampled_from(where), WRONG)


def refusal(folder):
    """The line about the newest checkpoint of a folder; None if it is not passed over."""
    lines = []
    store = CheckpointStore(folder / "run", log=lines.append)
    newest = store.paths()[-1]
    if store.newest(lambda found: check_metadata(found, callbacks(folder))).path == newest:
        assert not lines
        return None
    (line,) = lines
    assert line.startswith(f"checkpoint refused: {newest}: metadata: ")
    return line.removeprefix(f"checkpoint refused: {newest}: metadata: ")


def drawn_metadata(facts, count):
    """Calls a function with so many examples of wrong metadata, each as its path and its value."""
    options = settings(
        max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )
    return lambda function: options(given(wrong_metadata(facts))(function))()


@pytest.mark.slow
def test_wrong_metadata_is_passed_over_and_its_field_is_named(whole, facts):
    lines = []

    @drawn_metadata(facts, 400)
    def _(drawn):
        path, new = drawn
        with changed(whole, replaced(facts, path, new)) as folder:
            line = refusal(folder)
        lines.append(line)
        if line is not None:
            assert line.startswith(f"'{path[0]}'"), line
            assert ": expected " in line

    assert lines.count(None) < 0.2 * len(lines)


@pytest.mark.slow
def test_fit_resumes_from_what_is_not_passed_over(whole, facts, model):
    """Or says in one of its errors why it cannot."""
    begun = []

    @drawn_metadata(facts, 60)
    def _(drawn):
        path, new = drawn
        with changed(whole, replaced(facts, path, new)) as folder:
            is_of_subclass = path[:3] == ("callbacks", 3, 1) and {*path[3:4]} <= {*CALLBACK_STATE["ModelCheckpoint"]}
            if is_of_subclass or refusal(folder) is not None:
                return
            note = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch))
            refused = pytest.raises(lockstep.CheckpointError, match="from a run with another set-up")
            with refused if path[0] == "setup" else contextlib.nullcontext():
                trained(model, folder, [*callbacks(folder), note])

    assert begun
    assert set(begun) == {2}


@pytest.mark.parametrize("field", ["epoch", "hooks", "random", "callbacks", "logs", "setup", "variables", "position"])
def test_metadata_without_a_field_is_passed_over(field, whole, facts):
    without = {name: value for name, value in facts.items() if name != field}
    with changed(whole, without) as folder:
        line = refusal(folder)
    assert line.startswith(f"'{field}': expected ")
    assert ", got nothing. Fix: use a directory in which this program has written" in line


def test_a_position_beyond_the_memory_of_a_generator_is_refused(whole, facts):
    """NumPy would read there without a check."""
    with changed(whole, replaced(facts, ("random", "numpy", 2), 10**6)) as folder:
        assert refusal(folder).startswith("'random': expected a state of random generators, got ")


def test_checkpoints_that_are_all_refused_are_listed_before_training(whole, facts, model):
    refused = pytest.raises(lockstep.CheckpointError, match="no checkpoint there is good")
    with changed(whole, facts | {"epoch": -1}, slice(None)) as folder, refused as caught:
        trained(model, folder, callbacks(folder))
    assert str(caught.value).count("metadata: 'epoch': expected a whole number of at least 0, got -1.") == 2


# What comes back of callbacks.


@pytest.mark.parametrize("make", [Own, lambda path: keras.callbacks.ModelCheckpoint(path, monitor="loss")])
def test_a_checkpoint_does_not_choose_where_callbacks_write(make, tmp_path):
    callback = make(tmp_path / "here.weights.h5")
    unpacked_attributes(
        callback, {"filepath": "elsewhere", "save_freq": 1, "_current_epoch": 3, "set_model": 5}, {}, FirstAttributes()
    )
    assert callback.filepath == str(tmp_path / "here.weights.h5")
    assert callback.save_freq == "epoch"
    assert callback._current_epoch == 3
    assert callable(callback.set_model)


def test_state_that_a_user_added_comes_back():
    callback, other = Own("a.weights.h5"), Own("b.weights.h5")
    callback.phase, callback.seen = "main", [(1, None)]
    arrays = {}
    unpacked_attributes(
        other,
        json.loads(json.dumps(packed_attributes(callback, "", arrays, FirstAttributes())[0])),
        arrays,
        FirstAttributes(),
    )
    assert (other.phase, other.seen, other.filepath) == ("main", [(1, None)], "b.weights.h5")


class Graced(keras.callbacks.EarlyStopping):
    """Keeps values in attributes of Keras that no callback of Keras has there."""

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.wait, self.best_epoch = -3, {"loss": logs["loss"], "epoch": epoch}


def test_a_subclass_may_keep_other_values_in_the_attributes_of_keras(model, tmp_path):
    def graced():
        return [BackupAndRestore(tmp_path), Graced("loss")]

    for epochs in (1, 2):
        used = graced()
        trained(model, tmp_path, used, epochs=epochs)
    assert (used[1].wait, used[1].best_epoch["epoch"]) == (-3, 1)
    assert CheckpointStore(tmp_path).newest(lambda found: check_metadata(found, graced())).metadata["epoch"] == 2


NO_STATE = {  # What methods of Keras's callbacks assign besides state: objects, and what is made anew for each call of fit.
    "BackupAndRestore": set(),
    "CSVLogger": {"csv_file", "writer"},
    # An argument, of which Keras changes the sign.
    **{name: {"min_delta"} for name in ("EarlyStopping", "ModelCheckpoint", "OrbaxCheckpoint", "ReduceLROnPlateau")},
    "ProgbarLogger": {"progbar", "epochs", "verbose"},
    "TensorBoard": {
        *("_batch_trace_context", "_is_tracing", "_log_write_dir", "_model", "_profiler_started", "_should_trace"),
        *("_start_batch", "_stop_batch", "_summary_module", "_train_dir", "_val_dir", "_writers"),
    },
}


def assigned(kind):
    """The attributes that methods of a class assign, but for its constructor."""
    for function in ast.walk(ast.parse(Path(inspect.getsourcefile(kind)).read_text())):
        if not isinstance(function, ast.ClassDef) or function.name != kind.__name__:
            continue
        for method in function.body:
            if isinstance(method, ast.FunctionDef) and method.name != "__init__":
                targets = [node for node in ast.walk(method) if isinstance(node, ast.Attribute)]
                yield from (
                    node.attr
                    for node in targets
                    if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
                )


PUBLIC = [
    kind
    for name, kind in vars(keras.callbacks).items()
    if inspect.isclass(kind) and name not in ("Callback", "CallbackList")
]


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_the_state_of_each_callback_of_keras_is_known(kind):
    bases = [
        base for base in kind.__mro__ if base.__module__.startswith("keras.") and base is not keras.callbacks.Callback
    ]
    found = {name for base in bases for name in assigned(base)}
    assert found - NO_STATE.get(kind.__name__, set()) <= set(CALLBACK_STATE[kind.__name__])


def test_a_custom_loop_passes_over_wrong_metadata_too(tmp_path, caplog):
    caplog.set_level("INFO", "lockstep")
    strategy = lockstep.MirroredStrategy(["cpu:0"])
    with strategy.checkpoint(tmp_path, save_freq=1) as checkpoint:
        for step in (1, 2):
            checkpoint.save(step, np.full(3, step, "float32"))
    newest = CheckpointStore(tmp_path).paths()[-1]
    for metadata in ({}, {"random": None}, {"random": {"random": []}}):
        say(newest, fields_of(newest) | {"facts": metadata})
        with strategy.checkpoint(tmp_path) as checkpoint:
            state, step = checkpoint.restore(np.zeros(3, "float32"))
        assert (step, state.tolist()) == (1, [1, 1, 1])
        assert f"{newest}: metadata: 'random': expected a state of random generators, got " in caplog.text
        caplog.clear()
