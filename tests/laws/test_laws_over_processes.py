"""Laws 1 and 2 over processes: the division of devices into workers changes no result, and with deterministic=True no bit."""

import pytest

from tests.distributed.jobs.outcomes import assert_same_bits, train
from tests.laws.compare import RELATIVE, assert_close
from tests.support.processes import AS_FOR_USERS

pytestmark = [pytest.mark.xdist_group(__name__), pytest.mark.timeout(900)]

SMALL = {"numbers": "mlp", "bits": "mlp"}
LARGE = {"numbers": "cnn", "bits": "cnn_normalized"}
SHARDED = {"strategy": {"shard": "variables", "recompute": "blocks"}, "shard_from": 3}
# Workers, and devices of each. The nightly ones compile the same for minutes, with other numbers.
SHAPES = {
    (2, 2): pytest.mark.slow,
    (3, 1): pytest.mark.nightly,
    (4, 1): pytest.mark.nightly,
    (1, 4): pytest.mark.nightly,
}


@pytest.mark.parametrize(
    ("workers", "devices", "nets", "options"),
    [pytest.param(2, 1, SMALL, {}, marks=pytest.mark.nightly, id="2x1-small")]
    + [pytest.param(*shape, LARGE, {}, marks=mark, id=f"{shape[0]}x{shape[1]}") for shape, mark in SHAPES.items()]
    + [pytest.param(2, 2, LARGE, SHARDED, marks=pytest.mark.nightly, id="2x2-sharded")],
)
def test_numbers_and_bits_are_those_of_one_process(job, alone, workers, devices, nets, options):
    # The deterministic one runs first, because it fixes the size of the thread pool.
    found, *others = train(
        job(workers, environ=AS_FOR_USERS), [[nets["bits"], True], [nets["numbers"], False]], devices, **options
    )
    for other in others:
        assert_same_bits(other, found)
    bits = alone(nets["bits"], devices=1)
    assert_same_bits({name: found[name] for name in bits}, bits)
    (plain,) = alone(nets["numbers"]).values()
    assert found[nets["numbers"]].keys() == plain.keys()
    for name, value in plain.items():
        assert_close(found[nets["numbers"]][name], value, RELATIVE, name)


CASES = (
    *("class_weight", "gradient_accumulation", "batch_normalization_synchronized", "variables_of_every_aggregation"),
    *("dicts", "own_train_step", "steps_per_execution", "run_eagerly"),
)


# Losses of layers, several models, states, and updates that look at whole tensors.
CASES_OF_SHARDS = (
    *("add_loss", "adversaries", "attention", "frozen_and_recompiled", "global_clipnorm", "l2_and_l1", "lamb"),
    *("last_batch_of_one", "loss_of_what_the_call_has_kept", "mixed_float16", "muon", "towers_over_the_batch"),
)


@pytest.mark.parametrize(
    ("names", "only_fit", "options"),
    [
        pytest.param(CASES, True, {}, marks=pytest.mark.slow, id="fit"),
        pytest.param(CASES, False, {}, marks=pytest.mark.nightly, id="all"),
        pytest.param(CASES, False, SHARDED, marks=pytest.mark.nightly, id="all-sharded"),
        pytest.param(CASES_OF_SHARDS, True, SHARDED, marks=pytest.mark.nightly, id="fit-sharded"),
    ],
)
def test_what_can_be_in_a_step_has_the_numbers_of_plain_keras(job, names, only_fit, options):
    chief, other = job(2).run("cases", names=names, replicas=3, only_fit=only_fit, **options)
    assert chief["compared"] == dict.fromkeys(names, "the same")
    assert chief["digests"] == other["digests"]
