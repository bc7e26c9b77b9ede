"""Goodput: what met the SLO, and percentiles of the last minute."""

from __future__ import annotations

import pytest

from triptych.proxy.live.goodput import MOST_CALLS, GoodputWindow, Slo, mean, percentile

SLO = Slo(ttft=1.0, tpot=0.1)


@pytest.mark.parametrize(
    ("ttft", "seconds", "tokens", "good"),
    [
        (0.9, 1.8, 11, True),  # 0.09 s a token
        (1.1, 1.2, 11, False),  # too late
        (0.5, 2.0, 11, False),  # 0.15 s a token
        (0.5, 5.0, 1, True),  # one token has no time after it
        (1.0, 2.0, 11, True),  # at both limits
    ],
)
def test_a_call_is_good_when_both_times_meet_the_slo(
    ttft: float, seconds: float, tokens: int, good: bool
) -> None:
    window = GoodputWindow(SLO)
    window.answered(0.0, ttft, seconds, tokens)
    assert (window.met, window.measured) == (int(good), 1)


def test_a_failed_call_is_measured_and_not_met() -> None:
    window = GoodputWindow(SLO)
    window.failed()
    assert (window.met, window.measured) == (0, 1)


def test_calls_older_than_a_minute_leave_the_percentiles() -> None:
    window = GoodputWindow(SLO)
    window.answered(0.0, 9.0, 9.0, 1)
    window.answered(50.0, 0.5, 1.0, 6)
    read = window.read(61.0, 0.5)
    assert (read.ttft_p50, read.ttft_p99) == (0.5, 0.5)
    assert (read.tpot_p50, read.tpot_p99) == (0.1, 0.1)
    assert (read.ttft_slo, read.tpot_slo, read.met) == (1.0, 0.1, 0.5)


def test_a_minute_without_calls_has_no_times() -> None:
    read = GoodputWindow(SLO).read(0.0, None)
    assert (read.met, read.ttft_p50, read.ttft_p99, read.tpot_p50, read.tpot_p99) == (None,) * 5


def test_the_window_holds_a_bounded_number_of_calls() -> None:
    window = GoodputWindow(SLO)
    for index in range(MOST_CALLS + 10):
        window.answered(0.0, float(index >= 10), 1.0, 1)
    assert window.measured == MOST_CALLS + 10
    assert window.read(1.0, None).ttft_p50 == 1.0
    assert len(window._calls) == MOST_CALLS


@pytest.mark.parametrize(("values", "percent", "wanted"), [([1, 2, 3, 4], 50, 2), ([1, 2, 3, 4], 99, 4)])
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(
    values: list[float], percent: int, wanted: float
) -> None:
    assert percentile(values, percent) == wanted


def test_the_mean_of_nothing_is_nothing() -> None:
    assert mean([]) is None
    assert mean([1.0, 2.0]) == 1.5
