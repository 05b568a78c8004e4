"""The chief's arrays on every worker, without processes: tests of jobs have those."""

import time
from dataclasses import replace
from types import SimpleNamespace

import keras
import ml_dtypes
import numpy as np
import pytest

import lockstep
from lockstep.data.process_group import ProcessGroup
from lockstep.distributed import worker_process_group
from lockstep.distributed.control.failure_detector import find_failure
from lockstep.distributed.control.heartbeat import Limits
from lockstep.distributed.control.transport import HEADER_BYTES, MAX_BYTES, decode, encode
from tests.distributed.threaded_job import ThreadedJob
from tests.support.waiting import wait_until

ARRAYS = {
    "matrix": np.arange(35, dtype=np.float32).reshape(5, 7),
    "transposed": np.arange(6, dtype=np.int16).reshape(2, 3).T,
    "number": np.asarray(3, np.uint32),
    "empty": np.zeros((0, 4)),
    "odd": np.asarray([0.5, -1.5, 2], ml_dtypes.bfloat16),
    "flag": np.asarray([True]),
}


@pytest.mark.parametrize("numbers", [1, 3, 1000])
def test_broadcast_arrays_are_those_of_the_chief_in_chunks_of_any_size(numbers, monkeypatch):
    said, sent = [], []
    client = SimpleNamespace(
        group=SimpleNamespace(is_chief=True), broadcast=lambda topic, value: said.append(value) or value
    )
    monkeypatch.setattr(worker_process_group, "_CHUNK", numbers)
    monkeypatch.setattr(worker_process_group, "sum_over_workers", lambda placement, own: sent.append(own) or own)
    assert worker_process_group._broadcast_arrays(client, None, ARRAYS).keys() == ARRAYS.keys()

    worker = SimpleNamespace(group=SimpleNamespace(is_chief=False), broadcast=lambda topic, value: said[0])
    chunks = iter(sent)
    monkeypatch.setattr(worker_process_group, "sum_over_workers", lambda placement, own: next(chunks) + own)
    found = worker_process_group._broadcast_arrays(worker, None, {})
    assert list(found) == list(ARRAYS)
    for name, array in found.items():
        assert (array.dtype, array.shape) == (ARRAYS[name].dtype, ARRAYS[name].shape), name
        np.testing.assert_array_equal(array, ARRAYS[name], name)
    assert next(chunks, None) is None
    assert all(len(chunk) <= numbers for chunk in sent)


class Ending(ProcessGroup):
    """A process group that notes the ends of steps."""

    def __init__(self, ended):
        self.ended = ended

    def end_steps(self):
        self.ended.append(True)


def test_a_checkpoint_with_more_metadata_than_a_message_takes_reaches_all(monkeypatch):
    metadata = {"epoch": 3, "hooks": ["x" * MAX_BYTES]}
    said, sent = [], []

    def broadcast(topic, value):
        said.append(decode(encode({"kind": topic, "value": value})[HEADER_BYTES:])["value"])
        return said[-1]

    chief = SimpleNamespace(group=SimpleNamespace(is_chief=True, workers=2, index=0), broadcast=broadcast)
    monkeypatch.setattr(worker_process_group, "sum_over_workers", lambda placement, own: sent.append(own) or own)
    expected = worker_process_group.WorkerProcessGroup(chief, None).broadcast_from_chief((7, ARRAYS, metadata))

    worker = SimpleNamespace(
        group=SimpleNamespace(is_chief=False, workers=2, index=1), broadcast=lambda topic, value: said.pop(0)
    )
    monkeypatch.setattr(worker_process_group, "sum_over_workers", lambda placement, own: sent.pop(0) + own)
    step, arrays, found = worker_process_group.WorkerProcessGroup(worker, None).broadcast_from_chief(None)
    assert (step, found) == (expected[0], expected[2]) == (7, metadata)
    assert arrays.keys() == expected[1].keys() == ARRAYS.keys()
    np.testing.assert_array_equal(arrays["matrix"], ARRAYS["matrix"])


@pytest.mark.slow
def test_code_between_steps_has_no_limit():
    model = SimpleNamespace(layers=[], variables=[], optimizer=None, get_compile_config=dict)
    limits = Limits(timeout=60, long=1800)

    def call(session):
        group = worker_process_group.WorkerProcessGroup(session, None)
        arguments = {
            "x": SimpleNamespace(num_batches=1, meter=SimpleNamespace(waited=0.0, read=0.0)),
            "callbacks": None,
        }
        with group.surround_call(model, "fit", arguments, 32):
            session.report(1, "step")
            callbacks = keras.callbacks.CallbackList(arguments["callbacks"])
            callbacks.on_epoch_end(0, {})
            yield
            session.report(2, "step")
        yield

    with ThreadedJob(2) as job:
        known = job.sessions[0].heartbeats
        calls = [call(session) for session in job.sessions.values()]
        for _ in range(2):
            job.everyone(lambda session: next(calls[session.group.index]))
            wait_until(lambda: all(status.activity == "program" for status in known()), "heartbeats that say so")
            now = time.monotonic()
            waiting = [replace(status, heard=now, since=now - 1801) for status in known()]
            assert find_failure(now, waiting, limits) is None


def test_code_after_a_call_for_one_batch_has_no_limit(monkeypatch):
    ended = []
    monkeypatch.setattr(lockstep.MirroredStrategy, "_join_process_group", lambda self: Ending(ended))
    with lockstep.MirroredStrategy(["cpu:0"]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for call in (model.train_on_batch, model.test_on_batch):
        call(np.ones((4, 2)), np.ones((4, 1)))
    model.predict_on_batch(np.ones((4, 2)))
    assert len(ended) == 3


def test_each_compilation_is_reported_also_after_a_second_compile():
    reported = []
    client = SimpleNamespace(report=lambda step, activity: reported.append(activity))
    strategy = lockstep.MirroredStrategy(["cpu:0"])
    strategy._step_hooks = (worker_process_group.ProgressReporter(client, None, check_every=0),)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    x, y = np.ones((4, 2)), np.ones((4, 1))
    for _ in range(2):
        reported.clear()
        with strategy.scope():
            model.compile("sgd", "mse")
        model.fit(x, y, batch_size=2, verbose=0)
        assert reported == ["data", "compiling", "step", "data", "step", "step"]
