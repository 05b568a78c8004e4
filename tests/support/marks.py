"""Marks for many parametrized cases at once."""

import pytest


def quick_first(cases):
    """Return the cases with all but the first marked slow: ``./scripts/test --quick`` runs that one."""
    first, *others = (_as_parameters(case) for case in cases)
    return [
        first,
        *(pytest.param(*each.values, id=each.id, marks=(*each.marks, pytest.mark.slow)) for each in others),
    ]


def _as_parameters(case):
    if hasattr(case, "marks"):
        return case
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
