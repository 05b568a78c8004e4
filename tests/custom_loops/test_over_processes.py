"""A custom training loop over several workers gives the results of one process."""

import numpy as np
import pytest

import lockstep
from tests.custom_loops.tools_used import brought_together, dtypes, left_and_read_on, padded, trained
from tests.laws.compare import assert_close


@pytest.mark.parametrize("devices", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_methods_give_the_results_of_one_process_on_each_worker(job, tmp_path, devices):
    told = job(2).run("loop", devices=devices, folder=str(tmp_path))
    alone = lockstep.MirroredStrategy([f"cpu:{number}" for number in range(2 * devices)], replicas=4)
    expected = brought_together(alone) | {f"trained {n}": value for n, value in enumerate(trained(alone))}
    workers = [dict(np.load(tmp_path / f"worker{number}.npz")) for number in range(2)]
    for name, value in expected.items():
        np.testing.assert_array_equal(workers[0][name], workers[1][name], err_msg=name)
        assert_close(workers[0][name], value, 1e-5, name)
    assert [each["own"] for each in told] == [[0, 1], [2, 3]]
    assert [each["uneven"] for each in told] == [[[0, 1], [2, 3]], [[4], []]]
    both_have = [[0, 0, 1, 1, 10, 10, 11, 11], [2, 2, 3, 3, 12, 12, 13, 13]]
    only_the_second_has = [14, 14, 15, 15]
    assert [each["drawn"] for each in told] == 2 * [[*both_have, only_the_second_has]]
    for name, function in {"padded": padded, "left": left_and_read_on, "dtypes": dtypes}.items():
        assert [each[name] for each in told] == 2 * [function(alone)], name
