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
    """Return all products, half of them marked nightly; in the other half each two values of two factors still meet.

    That is so for three or more factors of which all but one have two values.
    """
    return [
        pytest.param(
            *(value for _, value in each),
            marks=[pytest.mark.nightly] * (sum(number for number, _ in each) % 2),
        )
        for each in itertools.product(*map(enumerate, factors))
    ]


def _as_parameters(case):
    if hasattr(case, "marks"):
        return case
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
