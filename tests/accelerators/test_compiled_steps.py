"""Steps for TPUs and GPUs that are only described: number and bytes of their collectives, memory, and nothing for the host.

``./scripts/test-accelerators`` runs these in an environment of their own, ``.venv-accelerators``, and the nightly set compiles all nets, plans and
targets: ``benchmarks/compiled.py``.
"""

import functools

import pytest

pytest.importorskip("libtpu", reason="libtpu is not installed: ./scripts/test-accelerators")

from tests.accelerators import steps
from tests.accelerators.limits import faults
from tests.accelerators.steps import PLANS, Case
from tests.support import compile_cache

CASES = [
    *(Case("MLP", plan, "v5e 2x4") for plan in PLANS),
    *(Case("MLP", plan, "v5e 2x2") for plan in ("fast", "predict")),
    *(Case("CNN", plan, "v5e 2x4") for plan in ("fast", "uneven")),
    *(Case("small LM", plan, "v5e 2x4") for plan in ("uneven", "run")),
    *(Case(net, plan, "H100 x 8") for net in ("MLP", "CNN", "small LM") for plan in ("fast", "uneven")),
]
# Cases with one net run in one process, which compiles Keras's step once.
keras = functools.cache(steps.measure_keras)
sizes = functools.cache(steps.sizes)


@pytest.fixture(autouse=True, scope="module")
def _compiled_anew():
    """JAX cannot read a program for devices that are only described from its cache."""
    with compile_cache.unused():
        yield


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.xdist_group(case.net), id=str(case)) for case in CASES]
)
def test_step_exchanges_and_needs_what_its_model_implies(case):
    assert not check(case)


@pytest.mark.timeout(900)
def test_scanned_steps_are_one_program_with_the_collectives_of_one_step():
    case = Case("MLP", "fast", "v5e 2x2")
    one, joined = steps.measure(case), steps.measure_joined(case, 4)
    assert (joined.programs, joined.exchanged, joined.donated) == (1, one.exchanged, one.donated)
    assert not joined.from_host


@pytest.mark.timeout(900)
def test_sharded_variables_are_gathered_and_their_gradients_scattered_once():
    found = steps.measure(Case("MLP", "shard_variables", "v5e 2x2"))
    fast = steps.measure(Case("MLP", "fast", "v5e 2x2"))
    assert (found.number_of("all-gather"), found.number_of("reduce-scatter"), found.number_of("all-reduce")) == (
        2,
        2,
        1,
    )
    assert found.arguments < 0.4 * fast.arguments
    assert (found.donated, found.from_host) == (fast.donated, ())


@pytest.mark.timeout(900)
def test_shards_of_sizes_that_the_devices_do_not_divide_need_what_even_ones_do(monkeypatch):
    case = Case("small LM", "shard_variables", "H100 x 8")
    even, larger = steps.measure(case), {"words": 10_007, "width": 132}
    monkeypatch.setitem(steps.NETS, case.net, steps.NETS[case.net] | larger)
    odd = steps.measure(case)
    assert {name: odd.number_of(name) for name in odd.exchanged} == {
        name: even.number_of(name) for name in even.exchanged
    }
    growth = 10_007 * 132 / (10_000 * 128)
    assert odd.arguments < 1.05 * growth * even.arguments
    assert all(size < 1.1 * growth * even.exchanged[name][1] for name, (_, size) in odd.exchanged.items())
    assert (odd.donated, odd.from_host) == (even.donated, ())


def check(case):
    devices = len(steps.devices(case.target))
    alike = Case(case.net, case.plan if case.plan in (*steps.KINDS, "uneven") else "fast", case.target)
    return faults(case, steps.measure(case), keras(alike), sizes(case.net), steps.padded_rows(case), devices)
