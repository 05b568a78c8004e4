"""What is counted of asynchronous training, and how an epoch's logs show it."""

from collections import Counter

from lockstep.parameter_server.staleness import StalenessMetrics, UpdateCounters


def counted(batches, traffic, staleness):
    count = UpdateCounters()
    count.batches, count.traffic, count.staleness = batches, traffic, Counter(staleness)
    return count


def test_a_batch_is_one_update_with_the_bytes_of_all_its_parts():
    count = UpdateCounters()
    count.add([{"bytes": 100, "rows": 4}, {"bytes": 11, "rows": 3}])
    count.add([{"bytes": 5}])
    assert (count.batches, count.traffic) == (2, 116)


def test_staleness_is_that_of_the_first_server_and_takes_the_place_of_what_was_known():
    count = UpdateCounters()
    for known in ([[0, 3]], [[0, 4], [2, 1]]):
        count.set_staleness([{"staleness": known}, {"staleness": [[0, 99]]}])
    assert count.staleness == {0: 4, 2: 1}


def epochs(*moments):
    """The logs of epochs, and what was said; each moment is what a callback hears, when, and what is counted until then."""
    now, counts, said, found = 0.0, UpdateCounters(), [], []
    statistics = StalenessMetrics(lambda: counts, said.append, lambda: now)
    for what, now, *until in moments:  # noqa: B007 # The clock gives it.
        counts = counted(*until) if until else counts
        if what == "begin":
            statistics.on_epoch_begin(len(found))
        elif what == "test":
            statistics.on_test_begin()
        else:
            found.append({})
            statistics.on_epoch_end(len(found) - 1, found[-1])
    return found, said


def test_each_epoch_has_its_own_numbers():
    found, said = epochs(
        ("begin", 10.0),
        ("end", 12.0, 8, 4_000_000, {0: 6, 1: 2}),
        ("begin", 20.0),
        ("end", 24.0, 12, 4_000_400, {0: 6, 1: 4, 4: 2}),
    )
    assert found == [
        {"updates_per_sec": 4.0, "bytes_per_sec": 2_000_000.0, "staleness": 0.25},
        {"updates_per_sec": 1.0, "bytes_per_sec": 100.0, "staleness": 2.5},
    ]
    assert said == [
        "epoch 1: 8 updates, 4.0 a second, 2 MB/s; gradients by staleness: 0: 6, 1: 2",
        "epoch 2: 4 updates, 1.0 a second, 0.0001 MB/s; gradients by staleness: 1: 2, 4: 2",
    ]


def test_the_time_of_validation_is_no_time_of_training():
    found, _ = epochs(("begin", 0.0), ("test", 2.0, 4, 0, {}), ("end", 100.0, 4, 0, {}))
    assert found[0]["updates_per_sec"] == 2.0


def test_an_epoch_without_a_batch_shows_nothing():
    assert epochs(("begin", 0.0), ("end", 1.0)) == ([{}], [])


def test_where_no_staleness_is_known_none_is_shown():
    found, said = epochs(("begin", 0.0), ("end", 1.0, 2, 10, {}))
    assert "staleness" not in found[0]
    assert said[0].endswith("by staleness: none")
