"""Differences between workers: messages name the worker, the entry and both values."""

import pytest

from lockstep.distributed.control.value_differences import digest, find_disagreement, first_difference

NAMES = ["worker 0", "worker 1", "worker 2", "worker 3"]
NAN = float("nan")


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, None),
        ([1, NAN], [1, NAN], None),
        (1, 2, ("", "1", "2")),
        ({"a": 1}, {"a": 1, "b": 2}, ("b", "nothing", "2")),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, ("a.b.c", "1", "2")),
        ({"a": [1, 2]}, {"a": [2, 1]}, ("a", "[1, 2]", "[2, 1]")),
        ({"a": 1}, {"a": True}, ("a", "1", "true")),
        ({"a": None}, {}, ("a", "null", "nothing")),
    ],
)
def test_the_first_difference_is_found(left, right, found):
    assert first_difference(left, right) == found


def test_a_long_value_is_cut_in_the_sentence():
    _, here, _ = first_difference("x" * 1000, "y")
    assert len(here) < 250


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([1, 1, 1, 1], None),
        (
            [{"lr": 1}, {"lr": 2}],
            "The workers do not agree on 'options': worker 1 differs in 'lr': it has 2, worker 0 has 1.",
        ),
        ([2, 1, 1, 1], "The workers do not agree on 'options': worker 0 differs: it has 2, the others have 1."),
        (
            [1, 2, 1, 3],
            "The workers do not agree on 'options': worker 1 and worker 3 differ: worker 1 has 2, worker 0 has 1.",
        ),
        (
            [2, 1, 1, 1, 3],
            "The workers do not agree on 'options': worker 0 and worker 4 differ: worker 0 has 2, the others have 1.",
        ),
    ],
)
def test_who_differs_from_the_most_or_from_the_chief_is_named(values, sentence):
    found = find_disagreement(values)
    assert (found and found.sentence("options", values, [*NAMES, "worker 4"])) == sentence


def test_equal_values_have_equal_digests():
    assert digest({"a": 1, "b": [NAN]}) == digest({"b": [NAN], "a": 1})
    assert digest({"a": 1}) != digest({"a": 1.0})
