"""Marks for many parametrized cases at once."""

import itertools

import pytest


def quick_first(cases):
    """Return the cases with all but the first marked slow: ``./scripts/test --quick`` runs that one."""
    first, *others = (_as_parameters(case) for case in cases)
    return [
        first,
        *(pytest.param(*each.values, id=each.id, marks=(*each.marks, pytest.mark.slow)) for each in others),
    ]


def every_pair(*factors):
    """Return all products, marked nightly but for one in as many as the shortest factor has values.

    In those that are not, each two values of two of three or more factors still meet: for a third factor has a value for
    each remainder of the sum of their numbers. Of two factors, they have each value.
    """
    apart = min(map(len, factors))
    return [
        pytest.param(
            *(value for _, value in each),
            marks=() if sum(number for number, _ in each) % apart == 0 else pytest.mark.nightly,
        )
        for each in itertools.product(*map(enumerate, factors))
    ]


def some_of(every_day, *factors):
    """Return all products, marked nightly but for those of ``every_day``, which have each value of each factor."""
    every_day, found = list(every_day), list(itertools.product(*map(list, factors)))
    for number, values in enumerate(map(list, factors)):
        assert all(any(each[number] == value for each in every_day) for value in values)
    assert all(each in found for each in every_day)
    return [pytest.param(*each, marks=() if each in every_day else pytest.mark.nightly) for each in found]


def diagonal_first(ones, others):
    """Return all pairs, of which those off the diagonal are nightly: each value of either is in one that is not."""
    assert len(ones) >= len(others)
    return [
        pytest.param(*_values(one), *_values(other), marks=[pytest.mark.nightly] * (row % len(others) != column))
        for row, one in enumerate(ones)
        for column, other in enumerate(others)
    ]


def _values(case):
    return case if isinstance(case, tuple) else (case,)


def _as_parameters(case):
    if hasattr(case, "marks"):
        return case
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
