"""Steps on a mesh of TPUs and GPUs that are only described: each device has its part of the state, and layout="auto" exchanges no more than
Megatron's layout by hand."""

import pytest

pytest.importorskip("libtpu", reason="libtpu is not installed: ./scripts/test-accelerators")

from benchmarks.accelerator import nets
from tests.accelerators import steps
from tests.support import compile_cache

pytestmark = pytest.mark.timeout(900)
NET, MESH = "small LM", (2, 4)


@pytest.fixture(autouse=True, scope="module")
def _compiled_anew():
    """JAX cannot read a program for devices that are only described from its cache."""
    with compile_cache.unused():
        yield


@pytest.mark.parametrize("target", ["v5e 2x4", "H100 x 8"])
def test_auto_exchanges_no_more_than_megatron_and_keeps_a_part_of_the_state(target):
    found, layout = steps.measure_mesh(NET, MESH, target)
    by_hand, same = steps.measure_mesh(NET, MESH, target, layout=nets.megatron_rules(steps.NETS[NET]["blocks"]))
    assert layout.rules() == same.rules()
    assert found.exchanged == by_hand.exchanged
    assert found.arguments <= 1.1 * layout.bytes / MESH[1]
    assert found.donated == steps.sizes(NET).state
    assert not found.from_host


def test_variables_sharded_over_both_axes_need_their_part_of_all_devices():
    found, layout = steps.measure_mesh(NET, MESH, "v5e 2x4", shard="variables", recompute="blocks")
    assert found.arguments <= 1.1 * layout.bytes / (MESH[0] * MESH[1])
    sharded = [row for row in layout.variables if row.owner == "model" and "data" in row.axes]
    gathered = found.exchanged["all-gather"][1]
    assert gathered <= 2.2 * sum(row.bytes for row in sharded) / MESH[1]
