"""The window of unanswered Submits follows how fast a worker answers, and nothing else."""

from __future__ import annotations

import pytest

from triptych.proxy.pd.window import FIRST, LEAST, MOST, SLOW_SECONDS, SubmitWindow

SLOW = SLOW_SECONDS + 1.0


def answer(window: SubmitWindow, seconds: float, *, at: float = 0.0) -> bool:
    return window.answered(at, at + seconds)


def test_it_is_open_for_as_many_as_its_size():
    window = SubmitWindow()
    assert window.open(int(FIRST) - 1)
    assert not window.open(int(FIRST))


def test_answers_in_time_add_one_for_as_many_as_it_holds_up_to_a_limit():
    window = SubmitWindow()
    for _ in range(int(FIRST)):
        assert not answer(window, SLOW_SECONDS)
    assert window.size == pytest.approx(FIRST + 1, abs=0.02)
    window.size = MOST - 0.0001
    answer(window, 0.0)
    assert window.size == MOST


def test_a_slow_answer_halves_it_once_for_all_that_was_sent_before_and_leaves_some():
    window = SubmitWindow()
    assert [window.answered(0.0, SLOW) for _ in range(8)] == [True] + [False] * 7
    assert window.size == FIRST / 2
    for turn in range(1, 9):
        answer(window, SLOW, at=turn * SLOW)
    assert window.size == LEAST
