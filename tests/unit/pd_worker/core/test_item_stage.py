"""A mark that an item is stored counts for some seconds, from its latest coming."""

from __future__ import annotations

from triptych.pd_worker.core.item_stage import MARK_SECONDS, ReadyMarks


def test_a_mark_counts_until_its_seconds_are_over():
    marks = ReadyMarks()
    marks.add(["a"], 100.0)
    assert marks.has("a", 100.0 + MARK_SECONDS * 0.9)
    assert not marks.has("a", 100.0 + MARK_SECONDS)
    assert not marks.has("b", 100.0)


def test_a_key_that_is_marked_again_counts_from_then_and_older_ones_are_forgotten():
    marks = ReadyMarks()
    marks.add(["a", "b"], 100.0)
    marks.add(["a"], 100.0 + MARK_SECONDS * 0.5)
    marks.add(["c"], 100.0 + MARK_SECONDS * 1.2)
    later = 100.0 + MARK_SECONDS * 1.3
    assert [marks.has(key, later) for key in "abc"] == [True, False, True]
    assert len(marks) == 2


def test_a_dropped_mark_counts_no_more():
    marks = ReadyMarks()
    marks.add(["a"], 100.0)
    marks.drop("a")
    marks.drop("a")
    assert not marks.has("a", 100.0)
