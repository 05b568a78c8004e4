"""Draw ``architecture.svg``, the packages and their imports: ``python docs/make_architecture.py``.

Boxes are the entries of ``LAYERS`` in ``tests/test_layers.py``, which also finds the imports. An
arrow points from a package to one that it imports; arrows that follow from others are left out.
``tests/test_layers.py`` compares the picture with the sources.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.test_layers import LAYERS, package_imports  # noqa: E402

PICTURE = ROOT / "docs" / "architecture.svg"
LEFT_OUT = {
    *LAYERS[0],
    "__main__",
    "_logging",
    "callbacks",
    "cluster_resolver",
    "config",
    "datasets",
    "experimental",
    "partitioners",
    "testing",
}
BOXES = {  # The lower subpackages are one box.
    "distributed/cluster": "distributed/{cluster,resolvers,control}",
    "distributed/resolvers": "distributed/{cluster,resolvers,control}",
    "distributed/control": "distributed/{cluster,resolvers,control}",
}
COLUMNS = {  # The position of a box from 0 (left) to 1 (right); all others are in the middle.
    "launch": 0.08,
    "tools": 0.8,
    "distributed": 0.41,
    "parameter_server": 0.86,
    "fit": 0.7,
    "doctor": 0.54,
    "custom_loops": 0.3,
    "execution": 0.46,
    "collectives": 0.54,
    "data": 0.4,
    "devices": 0.3,
    "distributed/{cluster,resolvers,control}": 0.2,
    "checkpoint": 0.66,
    "_keras": 0.48,
}
WIDTH, HIGH, STEP = 900, 34, 74
STYLE = """
text { font: 13px ui-monospace, Menlo, Consolas, monospace; text-anchor: middle; fill: #1f2933; }
rect { fill: #eef3f8; stroke: #52667a; rx: 6px; }
path { fill: none; stroke: #8296a8; stroke-width: 1.2; marker-end: url(#tip); }
marker path { fill: #8296a8; stroke: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e9ee; } rect { fill: #26323e; stroke: #8296a8; } path { stroke: #9fb3c8; }
}
"""


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without arrows that follow from two others."""

    def reached(name: str, seen: set[str]) -> set[str]:
        for other in graph[name] - seen:
            seen.add(other)
            reached(other, seen)
        return seen

    return {
        name: {one for one in targets if not any(one in reached(other, set()) for other in targets if other != one)}
        for name, targets in graph.items()
    }


def picture() -> str:
    """Return the picture as SVG."""
    numbers = {BOXES.get(name, name): number for number, names in enumerate(LAYERS) for name in names}
    names = [name for name in numbers if name not in LEFT_OUT]
    below: dict[str, set[str]] = {name: set() for name in names}
    for name, imported in package_imports().items():
        own = BOXES.get(name, name)
        if own in below:
            below[own] |= {BOXES.get(other, other) for other in imported}
    for name in names:  # Packages of one layer may import each other; the picture shows layers only.
        below[name] = {other for other in below[name] if other in below and numbers[other] < numbers[name]}
    arrows = reduced(below)
    rows = sorted({numbers[name] for name in names}, reverse=True)
    height = STEP * len(rows)
    centre = {
        name: (WIDTH * COLUMNS.get(name, 0.5), 10 + STEP * rows.index(numbers[name]) + HIGH / 2) for name in names
    }
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="The packages of Lockstep; arrows are imports">',
        f"<style>{STYLE}</style>",
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z"/></marker>',
    ]
    for name in names:
        for other in sorted(arrows[name]):
            (x1, y1), (x2, y2) = centre[name], centre[other]
            y1, y2 = y1 + HIGH / 2, y2 - HIGH / 2
            bend = STEP * 0.4
            lines.append(
                f'<path d="M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"/>'
            )
    for name in names:
        x, y = centre[name]
        box = 8 * len(name) + 30
        lines.append(f'<rect x="{x - box / 2:.0f}" y="{y - HIGH / 2:.0f}" width="{box}" height="{HIGH}"/>')
        lines.append(f'<text x="{x:.0f}" y="{y + 5:.0f}">{name}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
