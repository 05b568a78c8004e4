"""The mutants match the current sources: each applies, changes one line, and is valid Python."""

import ast
import functools
from collections import Counter

import pytest

from tests.mutants.by_hand import FAULTS
from tests.mutants.draw import LEAST, PACKAGES
from tests.mutants.mutant import ROOT, GoneError, Mutant, drawn, every
from tests.mutants.rules import changes


def test_there_are_enough_of_each_package():
    assert len(every()) >= 150
    assert len(FAULTS) >= 40
    assert len(drawn()) >= 110
    counts = Counter(mutant.package for mutant in drawn())
    assert set(counts) == set(PACKAGES)
    assert min(counts.values()) >= LEAST
    assert {fault.package for fault in FAULTS} == {*PACKAGES, "_atomic_files.py"}


def test_no_two_have_one_name_or_one_place():
    assert len({mutant.id for mutant in every()}) == len(every())
    assert len({mutant.place() for mutant in every()}) == len(every())


@functools.cache
def dump_of(path):
    return ast.dump(ast.parse((ROOT / path).read_text()))


@pytest.mark.slow
def test_each_changes_one_line_of_the_sources():
    for mutant in every():
        path, source = mutant.source()
        before = (ROOT / path).read_text()
        pairs = enumerate(zip(before.split("\n"), source.split("\n"), strict=True), start=1)
        assert [n for n, (one, other) in pairs if one != other] == [mutant.place()[1]], mutant.id
        compile(source, mutant.id, "exec")
        assert ast.dump(ast.parse(source)) != dump_of(path), mutant.id


def test_a_line_that_has_moved_to_another_file_is_found():
    moved = Mutant("moved", "devices/no_longer_here.py", "chunk = -(-rows // replicas)", "chunk = 1", "")
    assert moved.place()[0].name == "batch_layout.py"


def test_a_line_that_is_gone_is_told():
    with pytest.raises(GoneError, match=r"nobody no longer applies: devices/batch_layout\.py has no line 'chunk = 7'"):
        Mutant("nobody", "devices/batch_layout.py", "chunk = 7", "chunk = 8", "").place()


SOURCE = '''
"""A text with 1 and True."""
def work(count: int = 3, *, loud: bool = False) -> "int | None":
    """Returns 1."""
    if count < 2 and loud:
        raise ValueError(f"{count + 1} is not 2")
    announce("started", 1)
    begin(count, loud)
    for item in items[1:count]:
        break
    return other(a, b, limit=4) - min(a, 5)
'''

MADE = {
    ("a number too large by 1", 'def work(count: int = 4, *, loud: bool = False) -> "int | None":'),
    ("the other truth value", 'def work(count: int = 3, *, loud: bool = True) -> "int | None":'),
    ("a condition that is turned round", "if not (count < 2 and loud):"),
    ("and for or", "if count < 2 or loud:"),
    ("another comparison", "if count <= 2 and loud:"),
    ("a number too large by 1", "if count < 3 and loud:"),
    ("a call that is dropped", "pass"),
    ("two arguments swapped", "begin(loud, count)"),
    ("a slice that begins too late", "for item in items[(1) + 1:count]:"),
    ("a slice that ends too early", "for item in items[1:(count) - 1]:"),
    ("a number too large by 1", "for item in items[2:count]:"),
    ("continue instead of break", "continue"),
    ("None is returned", "return None"),
    ("another operator", "return other(a, b, limit=4) + min(a, 5)"),
    ("two arguments swapped", "return other(b, a, limit=4) - min(a, 5)"),
    ("an argument that is dropped", "return other(a, b) - min(a, 5)"),
    ("a number too large by 1", "return other(a, b, limit=5) - min(a, 5)"),
    ("another function", "return other(a, b, limit=4) - max(a, 5)"),
    ("a number too large by 1", "return other(a, b, limit=4) - min(a, 6)"),
}


def test_the_rules_change_code_and_no_messages():
    assert {(change.rule, change.new) for change in changes(SOURCE)} == MADE
