"""Parser of the subset of YAML that the printed manifests use, so that tests need no YAML package."""

import json
import re


def documents(text):
    """Return all documents of a text as dicts and lists."""
    return [_block(_lines(document)) for document in text.split("\n---\n")]


def _lines(text):
    """Return indentation and content of each line; a dash counts as a level."""
    for line in text.splitlines():
        words = line.lstrip(" ")
        indent = len(line) - len(words)
        while words.startswith("- "):
            yield indent, "-"
            indent, words = indent + 2, words[2:]
        if words and not words.startswith("#"):
            yield indent, words


def _block(lines):
    lines = list(lines)
    indent = lines[0][0]
    starts = [number for number, (own, _) in enumerate(lines) if own == indent]
    assert starts[0] == 0
    assert all(own >= indent for own, _ in lines)
    groups = [lines[start:end] for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)]
    if lines[0][1] == "-":
        return [_value("", group[1:]) for group in groups]
    if ": " not in lines[0][1] and not lines[0][1].endswith(":"):
        assert len(lines) == 1
        return _scalar(lines[0][1])
    pairs = [(group[0][1].partition(":"), group[1:]) for group in groups]
    keys = [key for (key, _, _), _ in pairs]
    assert len(set(keys)) == len(keys), f"a key stands twice: {keys}"
    return {key: _value(rest.strip(), below) for (key, _, rest), below in pairs}


def _value(scalar, below):
    assert not (scalar and below)
    return _block(below) if below else _scalar(scalar)


def _scalar(text):
    if re.fullmatch(r'\d+|true|false|null|".*"|\[.*\]|\{\}', text):
        return json.loads(text)
    assert re.fullmatch(r"[A-Za-z/][\w./-]*", text), f"quote this: {text}"
    assert text.lower() not in ("on", "off", "yes", "no", "y", "n"), f"quote this, which is a flag in YAML 1.1: {text}"
    return text
