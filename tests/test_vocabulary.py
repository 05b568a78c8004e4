"""The field's words stand in code and documentation; private words of earlier versions do not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.rst")]
    + [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
)
# Written when these words were used; a decision is not rewritten.
WRITTEN_BEFORE = {ROOT / "docs" / "decisions"}

PRIVATE = {
    "desk": "task dispatcher",
    "courier": "RPC client",
    "knock|knocks|knocked|knocking": "handshake",
    "lane|lanes": "channel",
    "pulse|pulses": "heartbeat",
    "bury|buried|buries": "kill and reap",
    "taking part|taking_part|takes part|take part": "participate, or the name of the role",
    "onlooker|onlookers": "observer",
    "roster": "admission",
    "hand out again|handed out again|hands out again": "reassign",
    "stranger|strangers": "unauthenticated peer",
    "together_with|alone_program|run_apart": "the name of what it does",
    "whoever|nobody|somebody": "the actor",
    "of one's own|one's own": "custom",
    "goes on|go on|went on|going on": "continue, resume",
}


@pytest.mark.parametrize("word", PRIVATE)
def test_private_words_are_not_used(word):
    pattern = re.compile(rf"(?<![\w/])(?:{word})(?![\w/=])", re.IGNORECASE)  # pulse= is an argument of rich
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in FILES
        if not WRITTEN_BEFORE & set(path.parents)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.search(line.replace("_", " ") if " " in word else line)
    ]
    assert not found, f"Fix: write {PRIVATE[word]!r}:\n" + "\n".join(found)


def test_the_glossary_has_one_line_for_each_term():
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    terms = [term.strip() for line in lines if line.startswith("| ") for term in line.split("|")[1].split(",")]
    terms = [term for term in terms if term not in ("term", "---")]
    assert len(terms) > 40
    assert len(terms) == len(set(terms))
