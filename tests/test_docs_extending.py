"""What docs/extending.md adds works: each example passes the suite that all of its kind pass."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from lockstep.cluster_resolver import RESOLVERS, resolve
from tests.data import test_inputs
from tests.distributed import cases as cluster_cases
from tests.distributed import test_resolvers
from tests.laws.cases import case_named
from tests.laws.compare import Topology, assert_same, reference, run

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()


@pytest.fixture(scope="module")
def page():
    """The names of the page's code, which runs as it stands."""
    names = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)), names)
    return SimpleNamespace(**names)


def law_1(topology):
    case = case_named("global_clipnorm")
    assert_same(run(case, topology, only_fit=True), reference(case, True), case.relative)


@pytest.mark.slow
def test_the_operation_keeps_law_1_on_three_devices(page):
    law_1(Topology(3, 3, {"cross_device_ops": page.DirectAllReduce(num_packs=2)}))


def test_the_resolver_does_what_every_resolver_does(page, monkeypatch):
    required, numbers = ("PMI_RANK", "PMI_SIZE", "MASTER_ADDR"), ("PMI_RANK", "PMI_SIZE")

    def variables(index):
        return {"PMI_RANK": str(index), "PMI_SIZE": "3", "MASTER_ADDR": cluster_cases.HOSTS[0]}

    case = cluster_cases.Case("MPICH", page.MpichClusterResolver, variables, required=required, numbers=numbers)
    for index in range(3):
        test_resolvers.test_the_same_cluster_gives_the_same_group(case, index)
    for name in required:
        test_resolvers.test_a_missing_variable_is_named(case, name, None)
        test_resolvers.test_a_missing_variable_is_named(case, name, " ")
    for name in numbers:
        test_resolvers.test_what_is_no_number_is_shown_with_what_was_expected(case, name, "-1")
    test_resolvers.test_it_says_what_it_saw(case)
    test_resolvers.test_nothing_but_the_mapping_is_read(case, monkeypatch)
    test_resolvers.test_an_index_must_be_below_the_number_of_workers(case, 3)
    test_resolvers.test_the_user_may_fix_where_worker_0_is(case)
    found = resolve(variables(2), [*RESOLVERS, page.MpichClusterResolver])
    assert isinstance(found, page.MpichClusterResolver)


def test_the_resolver_says_what_the_page_shows(page):
    (shown,) = re.findall(r"`(<MpichClusterResolver: .*?>)`", PAGE)
    assert repr(page.MpichClusterResolver({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "node-a"})) == shown


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_the_input_gives_each_row_once_with_the_numbers_of_keras(page, monkeypatch, tmp_path):
    def folder(x, y):
        for number, (rows, targets) in enumerate(test_inputs.cut(x, y)):
            np.savez(tmp_path / f"{number:03}.npz", x=rows, y=targets)
        return {"x": page.Folder(tmp_path)}

    monkeypatch.setitem(test_inputs.KINDS, "folder", folder)
    test_inputs.test_every_row_once_in_order_with_the_numbers_of_keras("folder", Topology(3, 2))


@dataclass(frozen=True)
class One(Topology):
    """The strategy of the page."""

    make: type | None = None

    def strategy(self):
        return self.make("cpu:1")


@pytest.mark.slow
def test_the_strategy_keeps_law_1(page):
    law_1(One(1, 1, make=page.OneDeviceStrategy))
    with page.OneDeviceStrategy("cpu:1").scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((3, 2)), np.ones((3, 1)), verbose=0)
    assert {device.id for device in model.weights[0].value.devices()} == {1}


def test_the_hook_counts_the_rows_of_a_fit(page):
    assert page.counter.rows == 7
