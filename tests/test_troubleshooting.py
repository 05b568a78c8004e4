"""The troubleshooting page has an entry for each error class and exit code, and quotes messages of the sources."""

import ast
import re
from pathlib import Path

import pytest

import lockstep
from lockstep import _errors

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def text_of(node):
    """The text of a string or f-string, with … for each value; None for other nodes."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def texts_of_the_sources():
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = text_of(node)
            if text:
                yield text


def quoted_messages():
    return [line.removeprefix("> ") for line in PAGE.splitlines() if line.startswith("> ")]


def is_in(message, text):
    parts = message.split("…")
    if not all(part in text for part in parts):  # This takes less time than the search for their order.
        return False
    return re.search(".*".join(re.escape(part) for part in parts), text, flags=re.DOTALL) is not None


def test_each_error_class_has_an_entry():
    names = {name for name in lockstep.__all__ if name.endswith("Error")} - {"LockstepError"}
    assert set(re.findall(r"^### (\w+Error)$", PAGE, flags=re.MULTILINE)) == names


def test_each_exit_code_has_an_entry():
    rows = re.findall(r"^\| (\d+) \| ([a-z ]+) \|", PAGE, flags=re.MULTILINE)
    assert {(int(code), name) for code, name in rows} == {
        (getattr(_errors, name), name.lower().replace("_", " "))
        for name in ("DONE", "INTERRUPTED", "NO_PROGRESS", "PEER_LOST", "USER_ERROR")
    }


@pytest.mark.slow
def test_quoted_messages_occur_in_the_sources():
    texts = list(texts_of_the_sources())
    messages = quoted_messages()
    assert len(messages) >= 20
    assert [message for message in messages if not any(is_in(message, text) for text in texts)] == []
    assert not any(is_in("no message of … is like this", text) for text in texts)
