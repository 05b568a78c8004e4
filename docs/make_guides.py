"""Make docs/guides from the examples: what README.md says there, how the scripts differ, the model, what was printed.

    python docs/make_guides.py

Change the files in examples/, never those in docs/guides; tests/test_docs_guides.py compares.
"""

import ast
import difflib
import re
import textwrap
from pathlib import Path

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
PAIRS = (("single.py", "mirrored.py"), ("mirrored.py", "asynchronous.py"), ("mirrored.py", "two_workers.py"))
AROUND = 2  # lines that are the same, shown before and after a difference
FIRST, LAST = 4, 2  # lines of a long output that are shown


def pages() -> dict[str, str]:
    """The text of each guide, by the name of its example."""
    return {path.parent.name: page(path.parent) for path in sorted(EXAMPLES.glob("*/mirrored.py"))}


def page(folder: Path) -> str:
    """One guide."""
    note = f"<!-- Made by docs/make_guides.py from examples/{folder.name}: change it there. -->"
    parts = [note, (folder / "README.md").read_text().strip()]
    parts += [difference(folder, *pair) for pair in PAIRS if (folder / pair[1]).exists()]
    return "\n\n".join([*parts, model(folder), printed(folder)]) + "\n"


def difference(folder: Path, one: str, other: str) -> str:
    """What makes one script the other; their docstrings are left out, and that of the second one introduces it."""
    texts = [(folder / name).read_text() for name in (one, other)]
    docstring = wrapped(ast.get_docstring(ast.parse(texts[1])).split("\n\n")[0])
    lines = [re.sub(r'\A"""[\s\S]*?"""\n+', "", text).splitlines() for text in texts]
    changes = list(difflib.unified_diff(*lines, one, other, lineterm="", n=AROUND))
    shown = [re.sub("^@@.*", "@@", line).strip("\n") for line in changes]
    files = wrapped(f"The whole files: {linked(folder, one)}, {linked(folder, other)}.")
    return f"## From {one} to {other}\n\n{docstring}\n\n{files}\n\n" + block("diff", shown)


def model(folder: Path) -> str:
    """How the model is built, which all scripts of the folder share."""
    text = (folder / "model.py").read_text()
    found = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "build")
    source = ast.get_source_segment(text, next(found))
    return f"## The model\n\n{linked(folder, 'model.py')}, which also loads the data.\n\n" + block("python", [source])


def printed(folder: Path) -> str:
    """What was recorded; of a long output its beginning and its end."""
    _, machine, *rest = (folder / "results.md").read_text().strip().split("\n\n")
    shown = [shortened(part) if part.startswith("```") else wrapped(part) for part in rest]
    cut = f"Long outputs are cut in the middle; {linked(folder, 'results.md')} has all of them."
    return "\n\n".join(["## What they printed", wrapped(f"{machine} {cut}"), *shown])


def wrapped(text: str) -> str:
    """A paragraph in lines of the width of all pages."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def shortened(fenced: str) -> str:
    """A block of output with no more lines than are worth reading."""
    lines = fenced.splitlines()[1:-1]
    if len(lines) > FIRST + LAST + 2:
        lines = [*lines[:FIRST], "…", *lines[-LAST:]]
    return block("", lines)


def linked(folder: Path, name: str) -> str:
    """A link from a guide to a file of its example."""
    return f"[{name}](../../examples/{folder.name}/{name})"


def block(language: str, lines: list[str]) -> str:
    """A fenced block."""
    return "\n".join([f"```{language}", *lines, "```"])


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / "guides" / f"{name}.md").write_text(text)
