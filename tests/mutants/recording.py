"""Pytest plugin (for ``-p``): report the running test to :mod:`trace`, and record the time of each test."""

import sys
from collections import defaultdict

import pytest

from tests.mutants import trace

_seconds: dict[str, float] = defaultdict(float)
_outcomes: dict[str, str] = {}
_test = trace.NOTHING


def _recorder():
    return sys.modules[trace.MODULE].recorder


def name_of(nodeid: str) -> str:
    """The name of a test, without the group that pytest-xdist adds to it."""
    return nodeid.rpartition("@")[0] if nodeid.rfind("@") > nodeid.rfind("]") else nodeid


def fixture_key(definition) -> str:
    """The name of a fixture of several tests, among the names of tests."""
    return f"fixture {definition.scope} {definition.baseid} {definition.argname}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    global _test
    _test = name_of(item.nodeid)
    _recorder().switch(_test)
    try:
        return (yield)
    finally:
        _recorder().switch(trace.NOTHING)
        _recorder().note("time", _test, f"{_seconds[_test]:.3f}", _outcomes.get(_test, "passed"))
        shared = {
            one for found in item._fixtureinfo.name2fixturedefs.values() for one in found if one.scope != "function"
        }
        for definition in shared:
            _recorder().note("uses", _test, fixture_key(definition))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    if fixturedef.scope == "function":
        return (yield)
    _recorder().switch(fixture_key(fixturedef))
    try:
        return (yield)
    finally:
        _recorder().switch(_test)


def pytest_runtest_logreport(report):
    _seconds[name_of(report.nodeid)] += report.duration
    if report.outcome != "passed":
        _outcomes[name_of(report.nodeid)] = report.outcome
