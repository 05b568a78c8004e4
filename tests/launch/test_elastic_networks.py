"""Nodes with separate addresses in network namespaces; one loses its network."""

import pytest

from tests.launch.launching import program, started, text_of
from tests.support.networks import Network, why_not
from tests.support.waiting import DEADLINE

pytestmark = [pytest.mark.xdist_group("networks"), pytest.mark.nightly]  # /etc/netns is one for the machine.

SECRET = {"LOCKSTEP_SECRET": "known" * 8}

CODE = """
generation = int(os.environ["LOCKSTEP_GENERATION"])
write(f"{generation}.{rank}", os.environ["TF_CONFIG"])
if generation == 0: time.sleep(200)
print("done by", os.environ["WORLD_SIZE"])
"""


@pytest.fixture
def network():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Network(2) as made:
        yield made


def test_a_node_that_is_cut_off_is_left_out_and_ends(network, tmp_path):
    """No connection is closed: each side must detect the loss."""
    limits = ("--nnodes", "1:2", "--join-seconds", 5, "--max-restarts", 1)
    common = (*limits, "--coordinator", f"{network.addresses[0]}:12421")
    path = program(tmp_path, CODE)
    with (
        started(*common, "--node-rank", 1, path, before=network.inside(1), **SECRET) as second,
        started(*common, path, before=network.inside(0), **SECRET) as first,
    ):
        addresses = [f"{address}:12422" for address in network.addresses]
        assert all(f'"{address}"' in text_of(tmp_path / f"0.{rank}") for rank in range(2) for address in addresses)
        network.cut(1)
        printed, messages = first.communicate(timeout=2 * DEADLINE)
        assert (first.returncode, printed) == (0, "[worker 0] done by 1\n"), messages
        assert f"process {second.pid}): lost, its connection closed" in messages
        _, messages = second.communicate(timeout=2 * DEADLINE)
        assert second.returncode == 75
        assert "was lost (its connection closed" in messages.splitlines()[-1]
