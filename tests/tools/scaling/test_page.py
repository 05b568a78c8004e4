"""The page in a real browser: light, dark, narrow, wide and printed; and what can be reached by Tab."""

import os
import re
import shutil
import signal
import subprocess
from html.parser import HTMLParser
from xml.dom.minidom import parseString

import numpy as np
import pytest

from lockstep import OptionError
from lockstep.tools.scaling.api import report_of
from lockstep.tools.scaling.html_report import (
    Axis,
    Bar,
    ChartPoint,
    Series,
    bar_chart,
    line_chart,
    page_of,
    ticks_of,
)
from lockstep.tools.scaling.prediction import PredictionOptions
from lockstep.tools.scaling.results import CurvePoint, ScalingSetting, SettingFailure

from .made import by_formula, measured

LIMIT = 120
ONE_NUMBER = np.array([65536, 256, 1], np.int32)  # makes one of the three bytes of a pixel
EVIL = "<script>alert('x')</script> & \"quoted\""
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--virtual-time-budget=2000"),
)
PROBE = """<script>addEventListener("load", () => {
const root = document.documentElement, all = [...document.querySelectorAll("*")];
const reached = all.filter(one => one.tabIndex >= 0 && one.getAttribute("tabindex") === "0").length;
const wide = all.filter(one => one.tagName === "svg" && one.getBoundingClientRect().right > innerWidth).length;
const shown = [...document.querySelectorAll("figure svg")].map(one => one.getBoundingClientRect())
  .map(box => [box.x, box.y, box.width, box.height].map(Math.round).join(" ")).join(";");
document.title = ["PROBE", innerWidth, root.scrollWidth, root.scrollHeight, reached, wide, shown].join("|");
});</script></body>"""


def report():
    settings = [(devices, batch) for devices in (1, 2, 4) for batch in (64, 128, 256)]
    found = [by_formula(*one, (1e-3, 2e-5, 3e-5, 2e-4), (1e-4, 0, 1e-6, 0), (3e-4, 0, 0, 1e-4)) for one in settings]
    return report_of(
        EVIL, f"lockstep scale {EVIL}", [*found, SettingFailure(ScalingSetting(8, 64), EVIL)], PredictionOptions()
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "scaling.html"
    report().save_html(path)
    return path


@pytest.fixture
def browser(tmp_path):
    """Runs Chromium once, to its end or the limit."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None and os.environ.get("CI") != "true":
        pytest.skip("There is no chromium; apt-get install chromium brings it.")

    def run(page, *flags):
        data = tmp_path / f"profile{len(list(tmp_path.iterdir()))}"
        command = [program, *FLAGS, f"--user-data-dir={data}", *flags, page.as_uri()]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        try:
            return child.communicate(timeout=LIMIT)[0]
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()

    return run


def picture(browser, page, tmp_path, width, height, *flags):
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "shot.png"
    browser(page, f"--screenshot={path}", f"--window-size={width},{height}", *flags)
    return np.asarray(image.open(path).convert("RGB")).astype(int)


def probed(browser, page, tmp_path, width):
    copy = tmp_path / "probed.html"
    copy.write_text(page.read_text().replace("</body>", PROBE))
    dom = browser(copy, "--dump-dom", f"--window-size={width},900")
    inner, wide, high, reached, beyond, boxes = re.search(r"PROBE\|(.*?)</title>", dom)[1].split("|")
    shown = [tuple(map(int, box.split())) for box in boxes.split(";")]
    return int(inner), int(wide), int(high), int(reached), int(beyond), shown


class Reachable(HTMLParser):
    """Counts what the page says can be reached, and what has a name."""

    def __init__(self):
        super().__init__()
        self.points = self.reachable = self.unnamed = 0

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.points += tag in ("circle", "rect") and found.get("class") == "mark"
        self.reachable += found.get("tabindex") == "0"
        self.unnamed += found.get("tabindex") == "0" and not found.get("aria-label")


def test_the_page_needs_nothing_else_and_escapes_what_it_shows(page):
    text = page.read_text()
    assert not re.search(r"<script|https?://|@import|url\(|<link|<img", text)
    assert text.count("&lt;script&gt;") >= 3
    assert re.findall(r"<h(\d)", text)[:3] == ["1", "2", "3"]
    for part in ("Strong scaling", "Weak scaling", "±", "keras-lockstep", "prefers-color-scheme", "@media print"):
        assert part in text


def test_every_point_of_every_chart_can_be_reached_and_has_a_name(page):
    found = Reachable()
    found.feed(page.read_text())
    tables = page.read_text().count('class="scroll"')
    assert found.points > 50
    assert found.reachable == found.points + tables
    assert found.unnamed == 0


@pytest.mark.parametrize("width", [500, 1400])
@pytest.mark.slow
def test_nothing_is_wider_than_the_window_and_tab_reaches_each_point(browser, page, tmp_path, width):
    inner, wide, _, reached, beyond, _ = probed(browser, page, tmp_path, width)
    found = Reachable()
    found.feed(page.read_text())
    assert wide <= inner
    assert beyond == 0
    assert reached == found.reachable


@pytest.mark.slow
def test_nothing_is_wider_than_a_narrow_frame(browser, page, tmp_path):
    inner, wide, *_ = framed(browser, page, tmp_path, 400)
    assert (inner, wide) == (400, 400)


def framed(browser, page, tmp_path, width):
    """A window of the browser is never narrower than 500; a frame is."""
    inside = page.read_text().replace("</body>", PROBE.replace("document.title =", "parent.document.title ="))
    (tmp_path / "inside.html").write_text(inside)
    outside = tmp_path / "outside.html"
    outside.write_text(
        f'<!doctype html><title></title><iframe src="inside.html" width={width} height=900 style="border:0"></iframe>'
    )
    dom = browser(outside, "--dump-dom", "--window-size=800,1000", "--allow-file-access-from-files")
    return [int(number) for number in re.search(r"PROBE\|(.*?)</title>", dom)[1].split("|")[:3]]


@pytest.mark.slow
def test_charts_are_drawn_on_light_and_on_dark_paper(browser, page, tmp_path):
    *_, high, _, _, boxes = probed(browser, page, tmp_path, 1400)
    assert len(boxes) >= 7
    pages = {
        "light": picture(browser, page, tmp_path, 1400, high, "--blink-settings=preferredColorScheme=1"),
        "dark": picture(browser, page, tmp_path, 1400, high, "--blink-settings=preferredColorScheme=0"),
    }
    assert pages["light"][2, 2].min() > 230
    assert pages["dark"][2, 2].max() < 60
    for shown in pages.values():
        for x, y, width, height in boxes:
            inside = shown[y : y + height, x : x + width].reshape(-1, 3)
            saturated = inside[inside.max(1) - inside.min(1) > 60]
            assert len(np.unique(inside.astype(np.int32) @ ONE_NUMBER)) > 50
            assert len(saturated) > 100


@pytest.mark.slow
def test_a_window_of_500_shows_the_text_dark_on_light(browser, page, tmp_path):
    shown = picture(browser, page, tmp_path, 500, 900, "--blink-settings=preferredColorScheme=1")
    assert shown.min() < 80
    assert np.median(shown) > 230


@pytest.mark.slow
def test_it_prints_on_a_few_pages(browser, page, tmp_path):
    path = tmp_path / "page.pdf"
    browser(page, f"--print-to-pdf={path}", "--no-pdf-header-footer")
    pages = len(re.findall(rb"/Type\s*/Page\b", path.read_bytes()))
    assert 2 <= pages <= 12


@pytest.mark.parametrize("diverged", [(0,), (1,), (0, 1)], ids=str)
def test_what_has_diverged_is_left_out_of_the_charts(diverged):
    curves = [
        (CurvePoint(0, 0.0, 1.0), CurvePoint(640, 0.1, float("nan") if one in diverged else 0.5)) for one in (0, 1)
    ]
    both = [measured(1, 64 + one, metric="loss", is_higher_better=False, curve=curves[one]) for one in (0, 1)]
    page = page_of(report_of("a net", "command", both, PredictionOptions()))
    assert not re.search(r'(d|cx|cy)="[^"]*nan', page)
    assert ("Loss by rows" in page) == (len(diverged) < 2)


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(OptionError, match="cannot be written: No such file or directory"):
        report().save_html(tmp_path / "absent" / "page.html")


@pytest.mark.parametrize("most", [0.0003, 0.9, 1, 7, 12, 99, 12_345, 7e8, 2e12])
def test_ticks_are_round_few_and_enclose(most):
    ticks = ticks_of([most / 3, most])
    assert min(ticks) == 0
    assert max(ticks) >= most * (1 - 1e-9)
    assert 3 <= len(ticks) <= 9
    assert len(set(ticks.values())) == len(ticks)
    assert ticks_of([0.0]) == ticks_of([1.0])


def test_a_chart_by_itself_is_xml_and_its_places_are_those_of_the_axes():
    x, y = Axis("x", {1.0: "1", 2.0: "2", 4.0: "4"}, is_log=True), Axis("y", ticks_of([10]))
    assert (x.fraction(1), x.fraction(2), x.fraction(4)) == pytest.approx((0, 0.5, 1))
    assert (y.fraction(0), y.fraction(5), y.fraction(99)) == pytest.approx((0, 0.5, 1))
    assert Axis("", {1.0: "1"}).fraction(1) == 0.5
    chart = line_chart("<T>", x, y, [Series("a & b", [ChartPoint(1, 2, "<p>"), ChartPoint(4, 9, "q")], 0, 1)])
    circles = parseString(chart.svg).getElementsByTagName("circle")
    across = [float(circle.getAttribute("cx")) for circle in circles]
    up = [float(circle.getAttribute("cy")) for circle in circles]
    assert across[0] < across[1]
    assert up[0] > up[1]


def test_the_parts_of_a_bar_are_as_long_as_their_shares():
    chart = bar_chart("B", ["one", "two"], [Bar("1", [(0.25, "a"), (0.75, "b")])])
    marks = [one for one in parseString(chart.svg).getElementsByTagName("rect") if one.getAttribute("class") == "mark"]
    first, second = (float(one.getAttribute("width")) for one in marks)
    assert second == pytest.approx(3 * first, rel=0.01)
