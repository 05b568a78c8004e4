"""The roofline of a step, and the time of its collectives."""

import dataclasses

import pytest

from lockstep.collectives.cost_model import NetworkLink
from lockstep.tools.plan.estimate import CompiledStep, Memory, Survey, estimate
from lockstep.tools.plan.hardware import Accelerator, Target

# A device of 1 TFLOP/s and 1 GB/s, and links of 1 ms and 1 MB/s.
SHEET = Accelerator("x", "X", "cuda", "", memory_bandwidth=1e9, link=1e6, latency=1e-3, peak={"float32": 1e12})
MEMORY = Memory(0, 0, 0, 0, 0, 0, 0)
STEP = CompiledStep(rows=16, memory=MEMORY, needed=0, traffic=2_000_000)
SURVEY = Survey(16, None, False, "float32", flops_per_row=1e9)
BETWEEN = NetworkLink(1e-2, 1e-5)


def of(step=STEP, survey=SURVEY, devices=4, strategy="replicated", sheet=SHEET):
    return estimate(step, survey, Target(sheet, (devices,)), strategy, BETWEEN)


def test_a_step_takes_as_long_as_its_arithmetic_or_its_memory():
    found = of()
    assert (found.operations, found.arithmetic, found.traffic) == (4e9, pytest.approx(4e-3), pytest.approx(2e-3))
    assert (found.seconds, found.bound, found.efficiency) == (pytest.approx(4e-3), "arithmetic", 1.0)
    slow = of(dataclasses.replace(STEP, traffic=20_000_000))
    assert (slow.seconds, slow.bound) == (pytest.approx(20e-3), "memory")


def test_the_device_with_most_rows_counts():
    assert of(dataclasses.replace(STEP, rows=13)).arithmetic == pytest.approx(4e-3)


def test_recomputed_blocks_have_one_more_forward_pass():
    assert of(strategy="recompute").arithmetic == pytest.approx(4 / 3 * of().arithmetic)


@pytest.mark.parametrize(
    ("name", "size", "seconds"),
    [
        ("all-reduce", 8000, 2 * 3 * (1e-3 + 2000 * 1e-6)),  # 2 (n - 1) rounds of an n-th
        ("all-gather", 8000, 3 * (1e-3 + 2000 * 1e-6)),
        ("reduce-scatter", 2000, 3 * (1e-3 + 2000 * 1e-6)),
        ("collective-permute", 2000, 1e-3 + 2000 * 1e-6),
    ],
)
def test_collectives_take_the_rounds_of_a_ring(name, size, seconds):
    once = of(dataclasses.replace(STEP, collectives=((name, 1, size, None),)))
    twice = of(dataclasses.replace(STEP, collectives=((name, 2, 2 * size, None),)))
    assert once.communication == pytest.approx(seconds)
    assert twice.communication == pytest.approx(2 * seconds)
    assert once.seconds == pytest.approx(4e-3 + seconds)
    assert of(dataclasses.replace(STEP, collectives=((name, 1, size, None),)), devices=1).communication == 0


def test_a_ring_over_several_machines_is_as_slow_as_the_network():
    step = dataclasses.replace(STEP, collectives=(("all-reduce", 1, 8000, None),))
    assert of(step, devices=16).communication > 5 * of(step, devices=8).communication


@pytest.mark.parametrize(
    "unknown",
    [
        {"sheet": dataclasses.replace(SHEET, peak={"bfloat16": 1e12})},
        {"sheet": dataclasses.replace(SHEET, memory_bandwidth=None)},
        {"sheet": dataclasses.replace(SHEET, link=None)},
        {"survey": dataclasses.replace(SURVEY, flops_per_row=None)},
        {"step": dataclasses.replace(STEP, memory=None)},
    ],
)
def test_time_is_unknown_without_a_figure(unknown):
    assert of(**unknown) is None


def test_a_mesh_shares_out_rows_and_products_and_exchanges_in_groups():
    mesh = dataclasses.replace(STEP, rows=8, collectives=(("all-reduce", 1, 8000, (0, 1)),))
    alone = dataclasses.replace(STEP, rows=8, collectives=(("all-reduce", 1, 8000, None),))
    found, expected = of(mesh, devices=4, strategy="model:2"), of(alone, devices=2, strategy="model:1")
    assert found.communication == expected.communication
    shared = dataclasses.replace(mesh, share=1 / 8)
    assert of(shared, devices=8, strategy="model:8").arithmetic == of(mesh, devices=8).arithmetic
    assert (
        of(mesh, devices=8, strategy="model:8").arithmetic == 8 * of(mesh, devices=8).arithmetic
    )  # all on each device


def test_the_operations_of_any_step_are_shared_out_with_the_variables():
    survey = dataclasses.replace(SURVEY, flops_per_step=8e9)
    assert of(survey=survey).operations == 4e9 + 8e9  # four rows, and all variables
    assert of(survey=survey, strategy="optimizer").operations == 4e9 + 2e9


GROUPS_OVER_MACHINES = [  # of 16 devices in machines of 8: what leaves a machine at the same time
    (tuple(range(4)), 0),
    (tuple(range(8)), 0),
    (tuple(range(16)), 1),
    ((0, 8), 8),
    ((0, 4, 8, 12), 4),
]


@pytest.mark.parametrize(("group", "crossing"), GROUPS_OVER_MACHINES)
def test_groups_that_reach_over_machines_share_their_link(group, crossing):
    step = dataclasses.replace(STEP, collectives=(("all-reduce", 1, 8000, group),))
    sent = 8000 / len(group)
    one = 1e-2 + crossing * sent * 1e-5 if crossing else 1e-3 + sent * 1e-6
    assert of(step, devices=16, strategy="model").communication == pytest.approx(2 * (len(group) - 1) * one)


@pytest.mark.parametrize(("pairs", "is_far"), [((0, 1, 8, 9), False), ((7, 8), True), (None, True)])
def test_a_permute_is_as_slow_as_its_slowest_message(pairs, is_far):
    step = dataclasses.replace(STEP, collectives=(("collective-permute", 2, 4000, pairs),))
    one = 1e-2 + 2000 * 1e-5 if is_far else 1e-3 + 2000 * 1e-6
    assert of(step, devices=16).communication == pytest.approx(2 * one)
