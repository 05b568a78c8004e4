"""What runs on the workers and the evaluator of a job with parameter servers."""

from types import SimpleNamespace
from unittest.mock import Mock

import keras
import numpy as np

from lockstep.parameter_server.chief_fit import ChiefFit
from lockstep.parameter_server.worker_fit import WorkerFit, _Evaluator
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
    _Evaluator(model, Validation(), lines.append).evaluate([np.zeros((2, 3)), np.float32([1, 0, 0])], [], 1, "")
    (line,) = lines
    assert "val_f1_score: [" in line
    assert f"val_loss: {(0 + 2 + 2 + 0) / 12:.4g}" in line


def test_workers_learn_of_the_hooks_of_many_epochs():
    state = "state of random generators " * 600
    hooks = [[kind, f"{state}{epoch}"] for epoch in range(300) for kind in ("begin", "end")]
    done = []
    data = Mock(epoch_hooks=hooks[:9], pass_metadata=lambda: {"pass": 1, "hooks": data.epoch_hooks})
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
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
