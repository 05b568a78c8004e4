"""What runs on the workers and the evaluator of a job with parameter servers."""

import keras
import numpy as np

from lockstep.parameter_server.worker_fit import _Evaluator


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
