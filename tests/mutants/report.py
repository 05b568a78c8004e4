"""Write ``README.md``: the number of detected mutants, and why each survivor is harmless."""

import json
import textwrap
from pathlib import Path

from tests.mutants.draw import PACKAGES
from tests.mutants.mutant import Mutant, drawn, every
from tests.mutants.run import CAUGHT, Results

PAGE = Path(__file__).with_name("README.md")
REASONS = Path(__file__).with_name("survivors.json")
_HEAD = """# Mutants

Faults of one line each, and whether the tests notice them: {count} of them, {by_hand} written by hand
(`by_hand.py`) and {drawn} drawn by rule (`rules.py`, `drawn.json`). `./scripts/mutants` makes this
page; `results.json` has the test that caught each, and what it said.

| package | mutants | caught | by hand | caught |
| --- | ---: | ---: | ---: | ---: |
"""


def write() -> int:
    """Write the page; gives the number of survivors that nobody has explained, and of mutants that were not run."""
    results, reasons = Results(), json.loads(REASONS.read_text()) if REASONS.exists() else {}
    found = every()
    ruled = {mutant.id for mutant in drawn()}
    caught = {mutant.id for mutant in found if results.of(mutant).get("outcome") == CAUGHT}

    def row(name: str, own: list[Mutant]) -> str:
        hand = [mutant for mutant in own if mutant.id not in ruled]
        return f"| {name} | {len(own)} | {_share(own, caught)} | {len(hand)} | {_share(hand, caught)} |"

    rows = [row(f"`{name}`", [mutant for mutant in found if mutant.package == name]) for name in PACKAGES]
    text = _HEAD.format(count=len(found), by_hand=len(found) - len(ruled), drawn=len(ruled))
    text += "\n".join([*rows, row("all", found)]) + "\n\n## Survivors\n"
    left = [mutant for mutant in found if mutant.id not in caught]
    for mutant in left:
        outcome = results.of(mutant).get("outcome", "not run yet")
        why = textwrap.fill(reasons.get(mutant.id, "**Not explained.**"), 100, break_long_words=False)
        text += f"\n### {mutant.id}: {outcome}\n\n`{mutant.file}`, {mutant.what}\n\n"
        text += f"```diff\n- {mutant.old}\n+ {mutant.new}\n```\n\n{why}\n"
    PAGE.write_text(text)
    unexplained = [mutant.id for mutant in left if mutant.id not in reasons]
    print(f"{len(caught)} of {len(found)} are caught; not explained: {', '.join(unexplained) or 'none'}")
    return len(unexplained)


def _share(mutants: list[Mutant], caught: set[str]) -> str:
    count = sum(mutant.id in caught for mutant in mutants)
    return f"{count} ({100 * count // len(mutants)} %)" if mutants else "-"
