"""What processes of tests share, and what pytest-xdist makes of groups."""

import os
import time

import pytest

from tests.support import compile_cache
from tests.support.startup import shared_programs


@pytest.fixture
def shared(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_TEST_CACHE", str(tmp_path / "caches"))
    return compile_cache.shared_folder("tried")


def content(folder):
    return {entry.name: entry.read_text() for entry in folder.iterdir()}


def test_shared_folder_is_one_folder_for_each_kind(shared):
    assert compile_cache.shared_folder("tried") == shared
    assert compile_cache.shared_folder("other") != shared


def test_fill_and_publish_hand_entries_from_process_to_process(shared, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    (first / "a").write_text("program a")
    compile_cache.publish(first, shared)
    compile_cache.fill(second, shared)
    assert content(second) == {"a": "program a"}


def test_publish_keeps_an_entry_that_is_there(shared, tmp_path):
    (shared / "a").write_text("whole")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "a").write_text("ha")
    compile_cache.publish(tmp_path / "private", shared)
    assert content(shared) == {"a": "whole"}


def test_exchange_gives_and_gets_entries_that_are_written_to_their_end(shared, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, age in ((one, 0), (other, 10)):
        folder.mkdir()
        (folder / folder.name).write_text("program")
        os.utime(folder / folder.name, (time.time() - age,) * 2)
    compile_cache.exchange(other, shared)
    compile_cache.exchange(one, shared)
    assert content(shared) == {"other": "program"}
    assert content(one) == {"one": "program", "other": "program"}


def test_publish_removes_the_oldest_entries_beyond_the_limit(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_programs, "LIMIT", 8)
    (tmp_path / "private").mkdir()
    for age, path in enumerate((shared / "a", shared / "b", tmp_path / "private" / "c")):
        path.write_text("1234")
        os.utime(path, (1000 + age, 1000 + age))
    compile_cache.publish(tmp_path / "private", shared)
    assert content(shared) == {"c": "1234"}


@pytest.mark.xdist_group("tried")
def test_xdist_group_is_in_effect_if_it_is_asked_for(request):
    """Under pytest 9.2, pytest-xdist 3.8 ignores groups without a message."""
    is_grouped = vars(request.config.option).get("loadgroup", False)
    assert request.node.nodeid.endswith("@tried") == is_grouped
