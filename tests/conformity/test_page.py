"""The page of what is the same is what the results and the tables say; each row names a test that is there."""

import ast
import functools
import json

import pytest

from tests.conformity import page

ROWS = [(name, row) for name, rows in page.behaviours().items() for row in rows]


@functools.cache
def functions_in(path):
    tree = ast.parse((page.ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_page_is_what_its_sources_say():
    assert page.PAGE.read_text() == page.page(), "run python -m tests.conformity.page"


def test_each_new_failure_has_a_known_cause():
    assert page.unexplained(json.loads(page.RESULTS.read_text())) == []


@pytest.mark.parametrize("name", page.TITLES)
def test_each_row_names_a_test_that_is_there_or_a_difference(name):
    for row in page.behaviours()[name]:
        if row["where"].startswith("tests/"):
            path, _, test = row["where"].partition("::")
            assert test in functions_in(path), row
        else:
            assert row["where"].startswith("difference: "), row


def test_no_behaviour_is_told_twice_and_none_without_its_source():
    told = [row["behaviour"] for _, row in ROWS]
    assert len(set(told)) == len(told) >= 400
    assert all(row["behaviour"] and ".py: " in row["source"] for _, row in ROWS)
