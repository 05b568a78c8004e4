"""The table's arithmetic, the prediction and the advice, on measurements that are made by hand."""

import json
import math
import statistics
from dataclasses import asdict

import numpy as np
import pytest

from lockstep import OptionError
from lockstep.collectives.cost_model import (
    Network,
    NetworkLink,
    link_between,
    nonnegative_least_squares,
    predict_seconds,
)
from lockstep.tools.scaling import results
from lockstep.tools.scaling.api import report_of
from lockstep.tools.scaling.benchmark import WARMUP_STEPS, BlockTimer, block_ends
from lockstep.tools.scaling.prediction import (
    PredictionOptions,
    errors_of,
    model_of,
    network_for,
    predict_step,
    series_of,
)
from lockstep.tools.scaling.results import (
    Budget,
    CurvePoint,
    ScalingSetting,
    SettingFailure,
    choose,
    from_json,
    recommend,
    settings_of,
    shares_of,
    table_of,
    value_at,
)
from lockstep.tools.scaling.terminal import describe_result, render

from .made import BYTES, WITHIN, by_formula, measured

COMPUTE, INPUT, HOST = (1e-3, 2e-5, 3e-5, 2e-4), (1e-4, 0.0, 1e-6, 0.0), (3e-4, 0.0, 0.0, 1e-4)
SETTINGS = [(devices, batch) for devices in (1, 2, 4) for batch in (64, 128, 256)]


def test_speed_up_and_efficiency_are_ratios_of_rows_a_second():
    times = {(1, 64): 0.010, (2, 64): 0.008, (1, 32): 0.007, (2, 128): 0.013}
    table = table_of([measured(*key, blocks=(0.9 * one, one, 1.1 * one)) for key, one in times.items()])
    rows = {(row.setting.devices, row.setting.batch): row for row in table.rows}
    assert rows[2, 64].strong == pytest.approx((64 / 0.008) / (64 / 0.010))
    assert rows[2, 64].weak == pytest.approx((64 / 0.008) / (32 / 0.007))
    assert rows[2, 64].weak_efficiency == pytest.approx(rows[2, 64].weak / 2)
    assert rows[2, 128].strong is None
    assert rows[2, 128].weak_efficiency == pytest.approx((128 / 0.013) / (64 / 0.010) / 2)
    assert rows[1, 64].strong == rows[1, 64].weak_efficiency == 1
    assert rows[1, 64].epoch == pytest.approx(10 * 0.010)
    assert rows[1, 64].spread == pytest.approx(0.05)


def test_a_row_has_the_median_and_the_quartiles_of_its_blocks():
    blocks = (0.01, 0.03, 0.011, 0.012, 0.0105)
    (row,) = table_of([measured(1, 8, blocks=blocks)]).rows
    assert row.step == statistics.median(blocks)
    assert (row.low, row.high) == pytest.approx(tuple(np.percentile(blocks, [25, 75])))
    (row,) = table_of([measured(1, 8, blocks=(0.02,))]).rows
    assert (row.low, row.step, row.high) == (0.02, 0.02, 0.02)


@pytest.mark.parametrize(
    ("step", "bare", "all_reduce", "taking"),
    [(10, 6, 2, 1), (10, 12, 2, 1), (10, 6, 8, 1), (10, 6, 2, 9), (10, 0, 0, 0), (10, 10, 0, 3)],
)
def test_shares_are_the_whole_step_and_none_is_negative(step, bare, all_reduce, taking):
    shares = shares_of(step, bare, all_reduce, taking)
    assert shares.total == pytest.approx(step)
    assert min(shares.compute, shares.communication, shares.input, shares.host) >= 0
    if (step, bare, all_reduce, taking) == (10, 6, 2, 1):
        assert (shares.compute, shares.communication, shares.input, shares.host) == (4, 2, 1, 3)


def test_the_metric_is_interpolated():
    curve = [CurvePoint(0, 0.0, 0.1), CurvePoint(100, 1.0, 0.5), CurvePoint(300, 2.5, 0.4)]
    for place, expected in ((0, 0.1), (30, 0.22), (100, 0.5), (250, 0.425), (300, 0.4)):
        assert value_at(curve, place, by_rows=True) == pytest.approx(expected)
    assert value_at(curve, 1.75, by_rows=False) == pytest.approx(0.45)
    assert value_at(curve, 301, by_rows=True) is None
    assert value_at([], 1, by_rows=True) is None


def test_the_metric_at_a_point_does_not_depend_on_the_points_before():
    curve = [CurvePoint(0, 0.0, math.inf), CurvePoint(100, 1.0, 0.5)]
    assert value_at(curve, 100, by_rows=True) == value_at(curve, 1.0, by_rows=False) == 0.5


def test_settings_are_compared_where_all_have_been():
    slow = (CurvePoint(0, 0.0, 0.1), CurvePoint(640, 0.4, 0.9))
    quick = (CurvePoint(0, 0.0, 0.1), CurvePoint(600, 0.1, 0.7))
    table = table_of(
        [measured(1, 64, curve=slow), measured(2, 64, curve=quick), SettingFailure(ScalingSetting(4, 64), "no")]
    )
    assert (table.equal_rows, table.equal_seconds) == (600, 0.1)
    assert [row.at_rows for row in table.rows] == pytest.approx([0.1 + 0.8 * 600 / 640, 0.7])
    assert [row.at_time for row in table.rows] == pytest.approx([0.3, 0.7])
    assert [one.setting.devices for one in table.failed] == [4]


def test_what_could_not_be_timed_is_a_row_that_says_so():
    table = table_of([measured(1, 64, blocks=())])
    assert not table.rows
    assert "Too few steps" in table.failed[0].reason
    assert recommend(table) == ["No setting could be measured; the reasons are in the table."]


def test_blocks_end_with_the_last_step_and_are_about_equal():
    for steps in (5, 11, 100, 1001):
        ends = block_ends(steps)
        lengths = np.diff([WARMUP_STEPS, *ends])
        assert ends[-1] == steps
        assert lengths.max() - lengths.min() <= 1
    assert block_ends(WARMUP_STEPS) == []
    assert block_ends(None)[:3] == [WARMUP_STEPS + 10, WARMUP_STEPS + 20, WARMUP_STEPS + 40]


def test_the_clock_leaves_out_the_first_steps_and_evaluating():
    timer = BlockTimer(WARMUP_STEPS + 4, 100, lambda: 0.5, lambda: 0.0, before=0.1)
    for _ in range(WARMUP_STEPS + 4):
        if timer.record((), 1):
            timer.evaluate()
            timer.begin()
    assert sum(timer.lengths) == 4
    curve = timer.curve(10)
    assert [point.rows for point in curve] == [0, *(10 * (WARMUP_STEPS + number) for number in range(1, 5))]
    assert curve[-1].seconds == pytest.approx(sum(timer.seconds) * (1 + WARMUP_STEPS / 4))
    assert not timer.is_stopped


def test_the_last_call_of_an_epoch_counts_the_steps_that_it_has():
    timer = BlockTimer(15, 100, None, lambda: 0.0, steps_per_epoch=5)
    for _ in range(9):
        if timer.record((), 2):
            timer.begin()
    assert timer.steps == 15
    assert sum(timer.lengths) == 15 - 4  # The first 4 steps compile.


def test_numbers_change_their_unit_where_they_are_rounded():
    shown = {0.99951: "1 s", 0.9994: "999 ms", 0.00099951: "1 ms", 0.0009994: "999 µs", 599.9: "600 s", 600.0: "10 min"}
    assert {value: results.format_seconds(value) for value in shown} == shown


def test_a_prediction_is_exact_where_the_formula_is_the_truth():
    rows = table_of([by_formula(*one, COMPUTE, INPUT, HOST) for one in SETTINGS]).rows
    model = model_of(rows)
    for row, seconds, error in errors_of(model, rows):
        assert seconds == pytest.approx(row.step, rel=1e-6)
        assert abs(error) < 1e-6
    between = link_between(25.0, 20.0)
    network = network_for(model, "cpu", between, 2)
    shares = predict_step(model, 16, 1600, network)
    assert shares.compute == pytest.approx(1e-3 + 2e-5 * 100 + 3e-5 * 200 + 2e-4 * 2, rel=1e-6)
    assert shares.host == pytest.approx(3e-4 + 1e-4 * 2, rel=1e-6)
    expected = predict_seconds("ring", BYTES, 16, Network(WITHIN.within, NetworkLink(20e-6, 1 / 25e9), 2))
    assert shares.communication == pytest.approx(expected, rel=1e-6)


def test_accelerators_share_nothing_and_cpus_the_cores():
    many = [by_formula(*one, COMPUTE, INPUT, HOST) for one in SETTINGS]
    on_gpu = model_of(table_of([measured(*one, platform="gpu") for one in SETTINGS]).rows)
    assert on_gpu.compute[2:] == (0.0, 0.0)
    assert model_of(table_of(many).rows).compute[2] == pytest.approx(3e-5, rel=1e-6)
    assert network_for(on_gpu, "gpu", link_between("nvlink", None), None).devices_per_machine == 8
    assert network_for(on_gpu, "cpu", link_between("nvlink", None), None).devices_per_machine == 1


def test_a_series_is_strong_or_weak():
    model = model_of(table_of([by_formula(*one, COMPUTE, INPUT, HOST) for one in SETTINGS]).rows)
    network = network_for(model, "cpu", link_between("100GbE", None), None)
    strong = series_of(model, 64, network, is_weak=False)
    weak = series_of(model, 64, network, is_weak=True)
    assert [one.devices for one in strong] == [1, 2, 4, 8, 16, 32, 64]
    assert {one.batch for one in strong} == {64}
    assert [one.batch for one in weak] == [64 * 2**power for power in range(11)]
    assert strong[0].speed_up == weak[0].speed_up == 1
    assert weak[-1].speed_up == pytest.approx(1024 * weak[0].seconds / weak[-1].seconds)


def test_coefficients_are_not_negative_and_the_best():
    rng = np.random.default_rng(0)
    table = rng.uniform(size=(9, 4))
    assert nonnegative_least_squares(table, table @ [1.0, 0.0, 2.0, 3.0]) == pytest.approx([1.0, 0.0, 2.0, 3.0])
    found = nonnegative_least_squares(table, table @ [1.0, -2.0, 2.0, 0.5])
    assert (found >= 0).all()
    tried = np.square(table @ rng.uniform(0, 3, size=(4, 20_000)) - (table @ [1.0, -2.0, 2.0, 0.5])[:, None]).sum(0)
    assert np.square(table @ found - table @ [1.0, -2.0, 2.0, 0.5]).sum() <= tried.min()


def test_the_fastest_of_the_good_ones_is_taken():
    rows = [
        measured(1, 64, blocks=(0.010,) * 3),
        measured(2, 64, blocks=(0.006,) * 3, bare=0.005, all_reduce=0.002),
        measured(
            2, 512, blocks=(0.007,) * 3, rows_per_epoch=640, curve=(CurvePoint(0, 0, 0.1), CurvePoint(640, 0.01, 0.5))
        ),
    ]
    table = table_of(rows)
    assert choose(table).setting == ScalingSetting(2, 64)
    text = " ".join(recommend(table))
    assert "Take 2 devices, batch 64: 60 ms per epoch" in text
    assert "Faster, but worse after as many rows: 2 devices, batch 512" in text
    assert (
        "2 devices are 1.67 times as fast as one at this batch, an efficiency of 83%: 33% of a step is communication"
        in text
    )


def test_an_epoch_that_the_limit_has_cut_is_as_long_as_the_others():
    one = measured(1, 50, has_own_batches=True, rows_per_epoch=5_000, blocks=(0.02,) * 3)
    two = measured(2, 50, has_own_batches=True, rows_per_epoch=10_000, blocks=(0.01,) * 3)
    table = table_of([one, two])
    assert [row.epoch for row in table.rows] == [4.0, 2.0]
    assert choose(table).setting.devices == 2
    assert "2 devices are 2.00 times as fast as one" in recommend(table)[1]


def test_fewer_devices_are_taken_where_more_gain_nothing():
    table = table_of([measured(1, 64), measured(2, 64, blocks=(0.013, 0.0131, 0.0132), bare=0.012, all_reduce=0.006)])
    assert choose(table).setting == ScalingSetting(1, 64)
    text = " ".join(recommend(table))
    assert "2 devices are slower than one at this batch (1.31 times the time): 46% of a step is communication" in text


def test_advice_names_input_overhead_and_what_is_further_after_equal_time():
    ahead = (CurvePoint(0, 0.0, 0.1), CurvePoint(640, 0.01, 0.9))
    behind = (CurvePoint(0, 0.0, 0.1), CurvePoint(320, 0.02, 0.899), CurvePoint(640, 0.04, 0.9))
    table = table_of(
        [
            measured(0, 64, blocks=(0.004,) * 3, curve=()),
            measured(1, 64, blocks=(0.005,) * 3, bare=0.001, taking=0.002, curve=behind),
            measured(1, 128, blocks=(0.02,) * 3, curve=ahead),
        ]
    )
    text = " ".join(recommend(table))
    assert "40% of its time is spent on getting batches" in text
    assert "At batch 64 a step takes 4 ms in plain Keras and 5 ms under a strategy on one device." in text
    assert "After equal time (10 ms of training) 1 device, batch 128 is ahead: accuracy 0.9 against 0.4995" in text


def test_a_metric_that_shrinks_is_best_where_it_is_least():
    curve = (CurvePoint(0, 0, 2.0), CurvePoint(640, 0.1, 0.3))
    table = table_of(
        [
            measured(1, 64, metric="loss", is_higher_better=False, curve=curve),
            measured(
                2,
                64,
                metric="loss",
                is_higher_better=False,
                curve=(*curve[:1], CurvePoint(640, 0.1, 0.9)),
                blocks=(0.001,),
            ),
        ]
    )
    assert choose(table).setting.devices == 1


@pytest.mark.parametrize("order", [1, -1])
def test_what_has_diverged_is_not_taken_however_fast_it_is(order):
    curves = {32: (1.0, 0.5, 0.4), 64: (1.0, float("nan"), float("nan"))}
    both = [
        measured(1, batch, metric="loss", is_higher_better=False, blocks=(1 / batch**2,) * 3, curve=tuple(
            CurvePoint(320 * number, 0.05 * number, value) for number, value in enumerate(values)
        ))
        for batch, values in curves.items()
    ]  # fmt: skip
    table = table_of(both[::order])
    assert choose(table).setting == ScalingSetting(1, 32)
    assert "best 0.4)" in recommend(table)[0]


def test_what_is_no_number_is_null_in_json(tmp_path):
    one = measured(
        1,
        64,
        metric="loss",
        is_higher_better=False,
        curve=(CurvePoint(64, 0.1, 0.5), CurvePoint(128, 0.2, float("inf"))),
    )
    report_of("a net", "command", [one], PredictionOptions()).save_json(tmp_path / "figures.json")

    def refuse(word):
        raise AssertionError(word)

    values = json.loads((tmp_path / "figures.json").read_text(), parse_constant=refuse)
    assert [point["value"] for point in values["table"]["rows"][0]["measured"]["curve"]] == [0.5, None]


def test_medians_are_those_of_the_table():
    even = measured(1, 32, blocks=(0.01, 0.02))
    assert table_of([even]).rows[0].step == statistics.median(even.blocks)
    assert describe_result(even.setting, even) == "1 device, batch 32: 15 ms per step"
    rows = [measured(1, 8 * power, bare=0.004 * power) for power in (1, 2, 4, 9)]
    outlook = report_of("a net", "command", rows, PredictionOptions()).outlook
    errors = [abs(error) for _, _, error in outlook.checks]
    assert f"is {statistics.median(errors):.0%} in the median" in outlook.error


def test_what_was_measured_goes_through_json():
    for one in (by_formula(2, 64, COMPUTE, INPUT, HOST), SettingFailure(ScalingSetting(1, 2), "why")):
        assert from_json(json.loads(json.dumps(asdict(one)))) == one


def test_settings_that_are_compared_are_measured_one_after_the_other():
    assert settings_of((2, 4), (128, 64)) == [ScalingSetting(d, b) for b in (64, 128) for d in (0, 1, 2, 4)]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: settings_of((0,), (8,)), "devices: expected a whole number of at least 1, got 0"),
        (lambda: settings_of((1,), ()), r"batch: expected whole numbers such as \(1, 2\)"),
        (lambda: Budget(epochs=0), "epochs: expected"),
        (lambda: Budget(rows=0), "rows: expected"),
        (lambda: Budget(limit=0), "limit: expected a number of seconds, more than 0"),
        (lambda: PredictionOptions("token ring"), "bandwidth: expected GB/s or one of 10GbE, 100GbE"),
        (lambda: PredictionOptions(-1.0), "bandwidth: expected GB/s, more than 0"),
        (lambda: PredictionOptions(1.0, -2.0), "latency: expected a number of µs, 0 or more"),
        (lambda: PredictionOptions(devices_per_machine=0), "devices_per_machine: expected"),
    ],
)
def test_what_is_asked_wrongly_is_told(ask, message):
    with pytest.raises(OptionError, match=message):
        ask()


def test_a_fit_to_one_setting_or_two_is_not_called_exact():
    found = [by_formula(*one, COMPUTE, INPUT, HOST) for one in SETTINGS]
    for count, told in (
        (1, "to the one measured setting, too few to estimate its error"),
        (2, "to the 2 measured settings, too few"),
        (3, "On the 3 measured settings the error of the formula is 0% in the median, at most 0%"),
    ):
        report = report_of("a model", "a command", found[:count], PredictionOptions())
        assert told in report.outlook.error


def test_the_text_says_weak_or_strong_the_spread_and_what_failed():
    found = [by_formula(*one, COMPUTE, INPUT, HOST) for one in SETTINGS]
    report = report_of(
        "a [bold] model", "a command", [*found, SettingFailure(ScalingSetting(8, 64), "[red]no")], PredictionOptions()
    )
    text = render(report)
    assert max(map(len, text.splitlines())) <= 100
    for part in ("a [bold] model", "strong", "weak", "± 0%", "8 devices, batch 64: [red]no", "Predicted, not measured"):
        assert part in text
    assert str(report) == render(report)
    assert report.to_json()["outlook"]["checks"][0]["error"] == pytest.approx(0, abs=1e-6)
