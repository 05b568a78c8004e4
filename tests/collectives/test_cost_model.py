"""Bytes and rounds are counted in the programs, and the formulas of the cost model say the same."""

import jax
import numpy as np
import pytest
from jax import lax

import lockstep
from lockstep.collectives import ALGORITHMS
from lockstep.collectives.cost_model import (
    FORMULAS,
    AllReduceMeasurement,
    Network,
    NetworkLink,
    fit_network,
    predict_seconds,
)
from lockstep.testing import count_traffic

ELEMENTS = 5040 * 16  # Divisible by 1 … 10 and by powers of two: nothing is padded.
BYTES = 4 * ELEMENTS
VECTOR = [jax.ShapeDtypeStruct((ELEMENTS,), "float32")]
TWO_LEVELS = Network(NetworkLink(1e-6, 1e-9), NetworkLink(3e-5, 4e-9), devices_per_machine=4)


@pytest.mark.parametrize("devices", [2, 3, 4, 7, 8])
def test_the_ring_moves_as_few_bytes_as_possible(devices):
    found = count_traffic("ring", VECTOR, devices)
    assert len(found.rounds) == 2 * (devices - 1)
    assert found.sent == found.received == pytest.approx([2 * (devices - 1) / devices * BYTES] * devices)


@pytest.mark.parametrize(("devices", "rounds"), [(2, 2), (4, 4), (8, 6), (64, 12), (4096, 24)])
def test_halving_and_doubling_moves_the_same_in_few_rounds(devices, rounds):
    vector = [jax.ShapeDtypeStruct((4096 * 3,), "float32")]
    found = count_traffic("halving_doubling", vector, devices)
    assert len(found.rounds) == rounds
    assert found.sent == found.received == pytest.approx([2 * (devices - 1) / devices * 4 * 4096 * 3] * devices)


def test_halving_and_doubling_folds_in_what_is_beyond_a_power_of_two():
    found = count_traffic("halving_doubling", VECTOR, 6)
    assert len(found.rounds) == 2 * 2 + 2
    assert found.sent == [2.5 * BYTES] * 2 + [1.5 * BYTES] * 2 + [BYTES] * 2


def test_the_first_device_is_the_bottleneck_of_copies():
    found = count_traffic("reduce_to_one", VECTOR, 8)
    assert len(found.rounds) == 7 + 3
    assert found.received[0] == 7 * BYTES
    assert found.sent[0] == 3 * BYTES
    found = count_traffic("hierarchical_copy", VECTOR, 9)
    assert len(found.rounds) == 2 * 2 + 2 * 2
    assert found.received[0] == found.sent[0] == 4 * BYTES


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_the_tree_moves_as_few_bytes_as_the_ring_but_for_short_vectors(devices):
    found = count_traffic("tree", VECTOR, devices)
    assert found.sent == found.received == pytest.approx([2 * (devices - 1) / devices * BYTES] * devices)
    short = [jax.ShapeDtypeStruct((4000,), "float32")]
    assert count_traffic("tree", short, devices).sent == [(devices - 1) * 16_000] * devices


@pytest.mark.parametrize("devices", [2, 4, 5])
def test_half_precision_moves_half_the_bytes(devices):
    vector = [jax.ShapeDtypeStruct((ELEMENTS,), "float32")]
    found = count_traffic("half_precision", vector, devices)
    assert found.sent == pytest.approx([(devices - 1) / devices * BYTES] * devices)


def test_packs_multiply_the_rounds_and_not_the_bytes():
    found = count_traffic(lockstep.RingAllReduce(4), VECTOR, 4)
    assert len(found.rounds) == 4 * 6
    assert found.sent == [1.5 * BYTES] * 4


def test_the_bytes_of_a_function_are_counted_too():
    found = count_traffic(lambda array, axis: lax.all_gather(array, axis).sum(axis=0), VECTOR, 5)
    assert found.sent == [4 * BYTES] * 5
    found = count_traffic(lambda array, axis: lax.psum_scatter(array, axis, tiled=True), VECTOR, 1)
    assert found.sent == [0]


def in_a_while_loop(array, axis):
    return lax.while_loop(lambda value: value.sum() < 0, lambda value: lax.psum(value, axis), array)


def in_a_conditional(array, axis):
    return lax.cond(array.sum() < 0, lambda: lax.psum(array, axis), lambda: array)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (in_a_while_loop, "communicates inside 'while'"),
        (in_a_conditional, "communicates inside 'cond'"),
        (lambda array, axis: lax.pmax(array, axis), "what 'pmax' sends is not known here"),
        (lambda array, axis: lax.psum(array, axis, axis_index_groups=[[0, 1], [2, 3]]), "axis_index_groups are not"),
    ],
)
def test_what_cannot_be_counted_is_refused(ops, message):
    with pytest.raises(lockstep.OptionError, match=message):
        count_traffic(ops, VECTOR, 4)


@pytest.mark.parametrize("algorithm", FORMULAS)
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8, 9, 16])
def test_the_formulas_say_what_is_counted(algorithm, devices):
    elements = 5040 * devices  # More than the tree sends whole.
    traffic = count_traffic(ALGORITHMS[algorithm](), [jax.ShapeDtypeStruct((elements,), "float32")], devices)
    assert predict_seconds(algorithm, 4 * elements, devices, Network(NetworkLink(1, 0), NetworkLink(1, 0), 99)) == len(
        traffic.rounds
    )
    bytes_alone = predict_seconds(algorithm, 4 * elements, devices, Network(NetworkLink(0, 1), NetworkLink(0, 1), 99))
    assert bytes_alone == pytest.approx(traffic.in_turn)
    on_two_levels = predict_seconds(algorithm, 4 * elements, devices, TWO_LEVELS)
    rounds = [TWO_LEVELS.seconds(np.asarray(each.pairs), each.nbytes) for each in traffic.rounds]
    assert on_two_levels == pytest.approx(sum(rounds))


def test_the_ring_costs_what_the_paper_says():
    network = Network(NetworkLink(2e-6, 3e-9), NetworkLink(2e-6, 3e-9), 64, seconds_per_added_byte=5e-10)
    n, m = 16, 1e6
    expected = 2 * (n - 1) * 2e-6 + 2 * (n - 1) / n * m * 3e-9 + (n - 1) / n * m * 5e-10
    assert predict_seconds("ring", m, n, network) == pytest.approx(expected)


def test_devices_of_a_machine_share_its_way_out():
    free, shared = NetworkLink(0, 0), NetworkLink(0, 1)
    one_crosses = predict_seconds("ring", 8, 8, Network(free, shared, 4))
    assert one_crosses == pytest.approx(2 * 7)
    all_cross = predict_seconds("halving_doubling", 8, 8, Network(free, shared, 4))
    assert all_cross == pytest.approx(2 * 4 * 1)


@pytest.mark.slow
def test_each_algorithm_has_its_range():
    network = Network(NetworkLink(5e-6, 1 / 200e9), NetworkLink(20e-6, 1 / 25e9), 8)
    for devices in (8, 64, 512, 4096):
        times = {name: predict_seconds(name, 1e3, devices, network) for name in FORMULAS}
        assert min(times, key=times.get) == "halving_doubling"
    for devices in (64, 512):
        assert predict_seconds("half_precision", 1e9, 8, network) < predict_seconds("ring", 1e9, 8, network)
        assert predict_seconds("ring", 1e9, devices, network) < predict_seconds(
            "hierarchical_copy", 1e9, devices, network
        )
        assert predict_seconds("hierarchical_copy", 1e9, devices, network) < predict_seconds(
            "reduce_to_one", 1e9, devices, network
        )


def test_a_fit_finds_the_values_that_made_the_times():
    network = Network(NetworkLink(4e-6, 2e-10), NetworkLink(4e-6, 2e-10), 4, seconds_per_added_byte=1e-10)
    found, error = fit_network(
        [AllReduceMeasurement(a, m, 4, predict_seconds(a, m, 4, network)) for a in FORMULAS for m in (1e3, 1e5, 1e7)]
    )
    assert found.within.latency == pytest.approx(4e-6)
    assert found.within.seconds_per_byte == pytest.approx(2e-10)
    assert found.seconds_per_added_byte == pytest.approx(1e-10)
    assert error < 1e-9


def test_a_fit_has_no_negative_value():
    rng = np.random.default_rng(0)
    noisy = [AllReduceMeasurement(a, m, 4, m * 1e-9 * rng.uniform(0.5, 2)) for a in FORMULAS for m in (1e3, 1e5, 1e7)]
    found, error = fit_network(noisy)
    assert min(found.within.latency, found.within.seconds_per_byte, found.seconds_per_added_byte) >= 0
    assert 0 < error < 1


def test_a_cost_without_a_formula_is_refused():
    with pytest.raises(lockstep.OptionError, match="no formula for 'star'; there are: auto, "):
        predict_seconds("star", 1e3, 8, TWO_LEVELS)
    with pytest.raises(lockstep.OptionError, match="devices_per_machine: expected a whole number of at least 1, got 0"):
        Network(NetworkLink(0, 0), NetworkLink(0, 0), 0)


@pytest.mark.parametrize("algorithm", FORMULAS)
@pytest.mark.parametrize("devices", [2, 3, 5, 7, 8])
def test_messages_are_between_the_devices_that_there_are(algorithm, devices):
    pairs = np.concatenate([stage.pairs for stage in FORMULAS[algorithm](devices)])
    assert set(pairs.ravel().tolist()) == set(range(devices))
