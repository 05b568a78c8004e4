"""Law 4 over processes: each row exactly once an epoch; an error names a worker that reads other data."""

import socket

import numpy as np
import pytest

pytestmark = pytest.mark.xdist_group(__name__)

SHAPES = [(2, 2), pytest.param(3, 1, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("workers", "devices"), SHAPES)
def test_each_row_once_an_epoch_and_who_reads_something_else_is_named(job, workers, devices):
    run = job(workers)
    reports = run.run("rows", devices=devices)
    assert all(one == reports[0] for one in reports)
    for kind in ("arrays", "generator", "dataset", "function", "again"):
        np.testing.assert_array_equal(reports[0][kind], np.ones((2, 37)), err_msg=kind)
    slope, start = reports[0]["line"]
    np.testing.assert_allclose(reports[0]["rows"], start + slope * np.arange(37) / 37, rtol=1e-5, atol=1e-6)
    odd = f"worker {workers - 1} of {workers} ({socket.gethostname()}, process {run.processes[f'worker{workers - 1}'].pid}) differs"
    expected = {
        "other_rows": f"'batch 1 of ndarray': {odd}: it has \"",
        "other_order": f'"batch 2 of generator \'generator\'": {odd}: it has "',
        "fewer_batches": f"'fit()': {odd} in 'arguments.batches of x': it has 4, ",
        "fewer_of_a_generator": f'"batch 7 of generator \'generator\'": {odd}: it has "the end", ',
        "more_of_a_function": f'"batch 7 of function \'<lambda>\'": {odd}: it has "8 rows", ',
        "fewer_rows": f"'batch 5 of ndarray': {odd}: it has \"",
        "fewer_rows_of_a_function": f'"batch 5 of function \'<lambda>\'": {odd}: it has "7 rows", ',
        "fewer_validation_batches": f"'fit()': {odd} in 'arguments.batches of validation_data': it has 4, ",
        "other_validation": f"'batch 1 of ndarray of validation_data': {odd}: it has \"",
    }
    for key, sentence in expected.items():
        assert reports[0][key].startswith(f"The workers do not agree on {sentence}"), reports[0][key]
    assert "Fix: give shuffling a seed" in reports[0]["other_order"]
