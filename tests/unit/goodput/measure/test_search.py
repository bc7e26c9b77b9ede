"""The rate search against servers whose capacity is known, and the check for growing queues."""

from __future__ import annotations

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


def test_one_bad_window_of_three_does_not_decide():
    calls = {"n": 0}

    def flaky(rate: float) -> Verdict:
        calls["n"] += 1
        return Verdict(rate <= 8.0 and calls["n"] != 1, 0.1)

    found = search(flaky, SearchLimits(4.0))
    assert 8.0 / 1.05 <= found.rate <= 8.0


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


def test_failures_end_what_latencies_would_sustain():
    broken = [RequestRecord(100 + i, 5.0, 5.0, error="timeout") for i in range(3)]
    assert not judge([*records([0.2] * 97), *broken], SLO).sustained
