"""The estimate of what a step still takes: exact at a steady pace, honest when the pace changes."""

from __future__ import annotations

import pytest

from triptych.progress.time_left import STALLED_SECONDS, TimeLeft


def steady(seconds: float, *, pace: float, every: float = 1.0, start: float = 100.0) -> TimeLeft:
    """An estimate after so many seconds of `pace` units a second."""
    found = TimeLeft(start)
    for step in range(1, round(seconds / every) + 1):
        found.observe(start + step * every, step * every * pace)
    return found


def test_a_steady_step_takes_what_is_left_at_its_pace():
    assert steady(10, pace=5).left(110.0, 200) == pytest.approx(30.0)


def test_between_two_advances_the_estimate_counts_down():
    found = steady(100, pace=0.1, every=10)
    assert found.left(200.0, 20) == pytest.approx(100.0)
    assert found.left(206.0, 20) == pytest.approx(94.0)


def test_a_faster_pace_is_believed_within_a_minute():
    found = steady(100, pace=1)
    for second in range(1, 61):
        found.observe(200.0 + second, 100 + 10 * second)
    assert found.left(260.0, 1700) == pytest.approx(100.0, rel=0.2)


def test_an_overdue_advance_makes_the_estimate_longer_and_never_negative():
    found = steady(10, pace=5)
    left = [found.left(110.0 + idle, 60) for idle in (1, 5, 10, 20)]
    assert left == sorted(left, key=lambda seconds: seconds or 0.0)
    assert all(seconds is not None and seconds >= 0 for seconds in left)


def test_of_a_stalled_step_nothing_is_known():
    found = steady(10, pace=5)
    assert found.left(110.0 + STALLED_SECONDS - 1, 200) is not None
    assert found.left(110.0 + STALLED_SECONDS + 1, 200) is None


def test_a_step_of_minutes_between_advances_is_not_stalled_after_one():
    found = steady(600, pace=1 / 120, every=120)
    assert found.left(700.0 + STALLED_SECONDS + 1, 10) == pytest.approx(600.0 - STALLED_SECONDS - 1)


def test_a_stalled_step_that_goes_on_counts_its_stall():
    found = steady(10, pace=5)
    found.observe(140.0, 55)
    left = found.left(140.0, 105)
    assert left is not None and left > 20


def test_nothing_to_do_takes_no_time():
    assert TimeLeft(0.0).left(0.0, 0) == 0.0


def test_what_is_done_takes_no_time_even_if_more_was_done_than_there_was():
    assert steady(10, pace=5).left(110.0, 50) == 0.0
    assert steady(10, pace=5).left(110.0, 40) == 0.0


def test_without_a_total_nothing_is_known():
    assert steady(10, pace=5).left(110.0, None) is None


def test_before_the_first_advance_nothing_is_known():
    found = TimeLeft(0.0)
    assert found.left(5.0, 100) is None
    found.observe(5.0, 0)
    assert found.left(5.0, 100) is None


def test_a_clock_that_goes_back_counts_as_standing():
    found = steady(10, pace=5)
    found.observe(50.0, 55)
    assert found.left(50.0, 105) == pytest.approx(50 / 5.5, rel=0.05)
    assert found.left(40.0, 105) == found.left(50.0, 105)
    found.observe(51.0, 60)
    assert found.left(51.0, 110) == pytest.approx(10.0, rel=0.15)


def test_a_step_that_begins_again_is_not_finished_before_its_time():
    found = steady(10, pace=5)
    found.observe(111.0, 0)
    left = found.left(111.0, 50)
    assert left is not None and left == pytest.approx(10.0, rel=0.2)
