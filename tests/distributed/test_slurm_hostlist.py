"""Slurm's node lists, against one that is written out as it is made."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep.distributed.resolvers.slurm import expand_counts, expand_node_list

NAMES = st.text("abz09-._", min_size=1, max_size=4)


@st.composite
def ranges(draw):
    """``[…]`` and the texts that it stands for."""
    written, meant = [], []
    for _ in range(draw(st.integers(1, 3))):
        first, more, width = draw(st.integers(0, 120)), draw(st.integers(0, 5)), draw(st.integers(1, 4))
        start = f"{first:0{width}d}"
        written.append(f"{start}-{first + more}" if more or draw(st.booleans()) else start)
        meant += [f"{number:0{len(start)}d}" for number in range(first, first + more + 1)]
    return f"[{','.join(written)}]", meant


@st.composite
def nodes(draw):
    """One name that ends with a range, and its hosts: the last range changes fastest, then the first, the second …"""
    names = NAMES.map(lambda name: (name, [name]))
    *others, (last, ends) = [*draw(st.lists(st.one_of(ranges(), names), max_size=3)), draw(ranges())]
    begins = [""]
    for _, meant in others:
        begins = [begin + one for one in meant for begin in begins]
    return "".join(text for text, _ in others) + last, [begin + end for begin in begins for end in ends]


@pytest.mark.slow
@given(st.lists(nodes(), min_size=1, max_size=4))
def test_a_node_list_names_the_hosts_that_it_was_made_of(made):
    expected = [host for _, hosts in made for host in hosts]
    assert expand_node_list(",".join(text for text, _ in made)) == tuple(expected)


def test_the_examples_of_the_manual():
    assert expand_node_list("a[1-3,07],b,c[001-003]x[1-2]") == (
        *("a1", "a2", "a3", "a07", "b"),
        *("c001x1", "c001x2", "c002x1", "c002x2", "c003x1", "c003x2"),
    )
    assert expand_node_list("n[9-11]") == ("n9", "n10", "n11")
    assert expand_node_list("n[08-10]") == ("n08", "n09", "n10")


@pytest.mark.parametrize("text", ["", ",", "a,", ",a", "a,,b", "a[", "a]", "a[1", "a[]", "a[[1]]", "a b", "a[1 2]"])
def test_what_is_no_node_list(text):
    with pytest.raises(lockstep.ClusterError, match="expected a node list such as"):
        expand_node_list(text)


@pytest.mark.parametrize("ranges", ["3-1", "1-", "-1", "1,", "x", "1-2-3", "1-3:2", "²"])
def test_what_is_no_range(ranges):
    with pytest.raises(
        lockstep.ClusterError, match=r"expected a range that rises, such as '1-3', got '.*' in the node list"
    ):
        expand_node_list(f"a[{ranges}]")


@pytest.mark.parametrize("text", ["a[0-99999999999]", "a[0-999]b[0-999]"])
def test_a_node_list_without_end_takes_no_memory(text):
    with pytest.raises(lockstep.ClusterError, match="expected at most 65536 nodes"):
        expand_node_list(text)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5)), min_size=1))
def test_counts_are_those_that_were_written(pairs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in pairs)
    assert expand_counts(text) == tuple(count for count, times in pairs for _ in range(times))


@pytest.mark.parametrize("text", ["", "2,", "2(3)", "2(x)", "x3", "-1", "2(x3", "2 (x3)"])
def test_what_are_no_counts(text):
    with pytest.raises(lockstep.ClusterError, match="expected numbers such as"):
        expand_counts(text)
