"""The window of unanswered Submits follows how fast a worker answers, and nothing else."""

from __future__ import annotations

import pytest

from triptych.proxy.pd.window import ALONE, MOST, SHARED, SubmitWindow, WindowLimits

EITHER = pytest.mark.parametrize("limits", [ALONE, SHARED], ids=["alone", "shared"])


def answer(window: SubmitWindow, seconds: float, *, at: float = 0.0) -> bool:
    return window.answered(at, at + seconds)


@EITHER
def test_it_is_open_for_as_many_as_its_size(limits: WindowLimits):
    window = SubmitWindow(limits)
    assert window.open(int(limits.first) - 1)
    assert not window.open(int(limits.first))


@EITHER
def test_answers_in_time_add_one_for_as_many_as_it_holds_up_to_a_limit(limits: WindowLimits):
    window = SubmitWindow(limits)
    for _ in range(int(limits.first)):
        assert not answer(window, limits.slow)
    assert window.size == pytest.approx(limits.first + 1, abs=0.07)
    window.size = MOST - 0.0001
    answer(window, 0.0)
    assert window.size == MOST


@EITHER
def test_a_slow_answer_halves_it_once_for_all_that_was_sent_before_and_leaves_some(limits: WindowLimits):
    window, slow = SubmitWindow(limits), limits.slow + 1.0
    assert [window.answered(0.0, slow) for _ in range(8)] == [True] + [False] * 7
    assert window.size == limits.first / 2
    for turn in range(1, 9):
        answer(window, slow, at=turn * slow)
    assert window.size == limits.least


def test_where_several_share_a_worker_fewer_are_sent_and_an_answer_is_slow_sooner():
    assert SHARED.first < ALONE.first
    assert SHARED.least < ALONE.least
    assert SHARED.slow < ALONE.slow
