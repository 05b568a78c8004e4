"""Draw horizontal bars of ratios on a logarithmic axis as SVG, readable on light and dark pages."""

import math
from pathlib import Path
from xml.sax.saxutils import escape

from curves import COLORS

LEFT, TOP, WIDTH, BAR, GAP, LEGEND = 170, 52, 620, 13, 12, 3
TICKS = {2.0**power: str(2**power) if power >= 0 else f"1/{2**-power}" for power in range(-6, 7)}


def draw(path: Path, title: str, groups: dict[str, dict[str, float]]) -> None:
    """Write, for each group, a bar a name from 1 to its ratio; names have the same colors in all groups."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    color = dict(zip(names, COLORS, strict=False))
    ticks = _enclosing([ratio for bars in groups.values() for ratio in bars.values()])
    bottom = TOP + sum(BAR * len(bars) + GAP for bars in groups.values())
    width, height = LEFT + WIDTH + 60, bottom + 36 + 20 * math.ceil(len(names) / LEGEND)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#333">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',  # Its own page, whatever the page around it.
        f'<text x="{width / 2:.0f}" y="20" font-size="14" font-weight="bold" text-anchor="middle">{escape(title)}</text>',
        *_axis(ticks, bottom),
    ]
    top = TOP + GAP / 2
    for group, bars in groups.items():
        parts.append(
            f'<text x="{LEFT - 12}" y="{top + BAR * len(bars) / 2 + 4:.1f}" text-anchor="end">{escape(group)}</text>'
        )
        for name, ratio in bars.items():
            parts += _bar(ratio, ticks, top, color[name])
            top += BAR
        top += GAP
    path.write_text("\n".join([*parts, *_legend(color, bottom + 32), "</svg>\n"]))


def _axis(ticks: list[float], bottom: float) -> list[str]:
    parts = []
    for tick in ticks:
        x, stroke = _at(tick, ticks), "#333" if tick == 1 else "#ddd"
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{stroke}"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP - 8}" text-anchor="middle">{TICKS[tick]}</text>')
    return parts


def _bar(ratio: float, ticks: list[float], top: float, color: str) -> list[str]:
    one, end = _at(1, ticks), _at(ratio, ticks)
    left, length = min(one, end), max(1, abs(end - one))
    x, anchor = (end + 4, "start") if ratio >= 1 else (end - 4, "end")
    return [
        f'<rect x="{left:.1f}" y="{top + 1:.1f}" width="{length:.1f}" height="{BAR - 2}" fill="{color}"/>',
        f'<text x="{x:.1f}" y="{top + BAR - 3:.1f}" font-size="10" text-anchor="{anchor}">{ratio:.2f}</text>',
    ]


def _legend(color: dict[str, str], top: float) -> list[str]:
    parts = []
    for number, (name, value) in enumerate(color.items()):
        x, y = 20 + number % LEGEND * (LEFT + WIDTH + 20) / LEGEND, top + 20 * (number // LEGEND)
        parts.append(f'<rect x="{x:.0f}" y="{y - 10}" width="14" height="11" fill="{value}"/>')
        parts.append(f'<text x="{x + 20:.0f}" y="{y}">{escape(name)}</text>')
    return parts


def _at(ratio: float, ticks: list[float]) -> float:
    low, high = math.log(ticks[0]), math.log(ticks[-1])
    share = (math.log(ratio) - low) / (high - low)
    return LEFT + WIDTH * min(1, max(0, share))


def _enclosing(ratios: list[float]) -> list[float]:
    """The ticks that enclose the ratios and 1."""
    low = max((tick for tick in TICKS if tick <= min([1, *ratios])), default=min(TICKS))
    high = min((tick for tick in TICKS if tick >= max([2, *ratios])), default=max(TICKS))
    return [tick for tick in TICKS if low <= tick <= high]
