"""The rate search against servers whose capacity is known, and the check for growing queues."""

from __future__ import annotations

import math
import random

import pytest

from triptych.goodput.load.job import RequestRecord
from triptych.goodput.measure.figures import drift_of, judge
from triptych.goodput.measure.search import SearchLimits, Verdict, search
from triptych.goodput.measure.slo import parse_slo

SLO = parse_slo(["ttft:1000 tpot:50"])


def server(capacity: float):
    return lambda rate: Verdict(rate <= capacity, 0.1)


@pytest.mark.parametrize("capacity", [0.3, 1.0, 3.7, 11.9, 160.0])
@pytest.mark.parametrize("start", [0.5, 4.0, 64.0])
def test_the_search_finds_the_capacity_within_its_resolution(capacity, start):
    found = search(server(capacity), SearchLimits(start))
    assert found.rate <= capacity < found.failing
    assert found.failing / found.rate <= 1.05
    assert not found.drifted


def test_nothing_sustained_is_a_rate_of_zero():
    found = search(server(0.0), SearchLimits(1.0, lowest=0.5))
    assert (found.rate, found.failing) == (0.0, 0.5)


def test_a_server_faster_than_the_highest_rate_is_reported_as_such():
    found = search(server(math.inf), SearchLimits(1.0, highest=20.0))
    assert (found.rate, found.failing) == (20.0, math.inf)


def test_one_bad_window_of_three_does_not_decide():
    calls = {"n": 0}

    def flaky(rate: float) -> Verdict:
        calls["n"] += 1
        return Verdict(rate <= 8.0 and calls["n"] != 1, 0.1)

    found = search(flaky, SearchLimits(4.0))
    assert 8.0 / 1.05 <= found.rate <= 8.0


def test_a_noisy_border_is_found_near_its_middle():
    rng = random.Random(1)

    def noisy(rate: float) -> Verdict:
        return Verdict(rate * rng.gauss(1.0, 0.03) <= 10.0, 0.1)

    rates = [search(noisy, SearchLimits(2.0, windows=5)).rate for _ in range(40)]
    assert 9.0 < sum(rates) / len(rates) < 10.3
    assert min(rates) > 8.0


def test_a_lucky_rate_is_voted_down_by_its_confirmations():
    seen: dict[float, int] = {}

    def lucky(rate: float) -> Verdict:
        seen[rate] = seen.get(rate, 0) + 1
        return Verdict(rate <= 8.0 or (rate < 9.0 and seen[rate] <= 2), 0.1)

    found = search(lucky, SearchLimits(4.0, confirmations=3))
    assert 8.0 / 1.05**2 <= found.rate <= 8.0
    assert found.votes[0] * 2 > found.votes[1]


def test_a_machine_that_slows_down_during_the_search_is_reported():
    windows = {"n": 0}

    def slowing(rate: float) -> Verdict:
        windows["n"] += 1
        return Verdict(rate <= 8.0, 0.1 * (1 + windows["n"] / 10))

    found = search(slowing, SearchLimits(4.0))
    assert found.drift > 1.2
    assert found.drifted


def records(ttfts, output_tokens=11, tpot=0.01):
    return [
        RequestRecord(
            i, i * 0.1, i * 0.1, ttft=t, e2e=t + tpot * (output_tokens - 1), output_tokens=output_tokens
        )
        for i, t in enumerate(ttfts)
    ]


def test_a_growing_queue_is_detected_and_its_growth_reported_in_seconds():
    rng = random.Random(0)
    drift = drift_of(records([0.1 + i * 0.004 + rng.uniform(0, 0.05) for i in range(100)]), SLO)
    assert drift.grows
    assert drift.growth == pytest.approx(0.4, abs=0.05)


def test_noise_and_small_growth_are_no_growing_queue():
    rng = random.Random(0)
    assert not drift_of(records([rng.uniform(0.1, 0.9) for _ in range(100)]), SLO).grows
    assert not drift_of(records([0.1 + i * 0.001 for i in range(100)]), SLO).grows


def test_a_growth_within_a_loose_objective_does_not_matter():
    ttfts = [0.1 + i * 0.004 for i in range(100)]
    assert not drift_of(records(ttfts), parse_slo(["ttft:20000"])).grows


def test_a_window_is_sustained_when_both_tails_are_inside():
    assert judge(records([0.2] * 50), SLO).sustained
    slow = judge(records([0.2] * 50, tpot=0.06), SLO)
    assert not slow.sustained
    assert "tpot" in slow.why and "ttft" not in slow.why
    assert not judge(records([0.2] * 98 + [1.5, 1.6]), SLO).sustained


def test_failures_end_what_latencies_would_sustain():
    broken = [RequestRecord(100 + i, 5.0, 5.0, error="timeout") for i in range(3)]
    assert not judge([*records([0.2] * 97), *broken], SLO).sustained


def test_the_reference_is_the_median_end_to_end_latency():
    assert judge(records([0.2] * 9), SLO).reference == pytest.approx(0.3)
