"""Figures of a run, and the search of a rate."""

from __future__ import annotations

import math
import random

import pytest

from triptych.base.errors import ConfigError
from triptych_bench.goodput.load.job import RequestRecord
from triptych_bench.goodput.measure.figures import drift_of, judge, percentile, summarise
from triptych_bench.goodput.measure.search import SearchLimits, Verdict, search
from triptych_bench.goodput.measure.slo import parse_slo

SLO = parse_slo(["ttft:100 tpot:10"])


def record(index: int, ttft: float = 0.05, tpot: float = 0.005, **more) -> RequestRecord:
    values = {"output_tokens": 11, "prompt_tokens": 7, "asked_tokens": 11} | more
    gaps = tuple([tpot] * (values["output_tokens"] - 1))
    return RequestRecord(
        index, index * 0.1, index * 0.1, ttft=ttft, e2e=ttft + sum(gaps), itls=gaps, **values
    )


def failure(index: int) -> RequestRecord:
    return RequestRecord(index, index * 0.1, index * 0.1, error="503 no encoder")


def test_percentiles_of_infinite_values_are_infinite_only_where_they_reach():
    values = [1.0] * 99 + [math.inf]
    assert percentile(values, 50) == 1.0
    assert percentile(values, 98) == 1.0
    assert percentile(values, 99) == math.inf
    assert math.isnan(percentile([], 50))


def test_ttft_tpot_itl_and_e2e_of_one_request():
    figures = summarise([record(0, ttft=0.2, tpot=0.01)], SLO)
    assert figures.spreads["ttft"].median == pytest.approx(0.2)
    assert figures.spreads["tpot"].median == pytest.approx(0.01)
    assert figures.spreads["itl"].mean == pytest.approx(0.01)
    assert figures.spreads["e2el"].percentiles[2] == pytest.approx(0.3)


def test_goodput_counts_requests_that_meet_every_objective_per_second():
    records = [record(0), record(1, ttft=0.2), record(2, tpot=0.02), record(3)]
    figures = summarise(records, SLO)
    assert figures.duration == pytest.approx(0.2 + 0.25)
    assert figures.good == 2
    assert figures.goodput == pytest.approx(2 / 0.45)
    assert figures.throughput == pytest.approx(4 / 0.45)
    assert figures.attainments == {"ttft": 0.75, "tpot": 0.75}


def test_attainment_divides_by_what_was_sent_failures_included():
    figures = summarise([record(0), record(1), failure(2), failure(3)], SLO)
    assert (figures.sent, figures.completed, figures.failed, figures.good) == (4, 2, 2, 2)
    assert figures.attainment == 0.5
    assert figures.attainments == {"ttft": 0.5, "tpot": 0.5}


def test_a_failure_is_infinitely_late_in_the_tail_and_absent_from_the_latencies():
    figures = summarise([*(record(i) for i in range(50)), failure(50)], SLO)
    assert figures.tails["ttft"] == math.inf
    assert figures.spreads["ttft"].percentiles[2] == pytest.approx(0.05)


def test_warm_up_requests_count_nowhere():
    figures = summarise([record(0, ttft=9.0, warm_up=True), record(1)], SLO)
    assert figures.sent == 1
    assert figures.spreads["ttft"].mean == pytest.approx(0.05)
    with pytest.raises(ValueError):
        summarise([record(0, warm_up=True)], SLO)


def test_in_a_closed_loop_the_first_wave_takes_none_of_the_measured_time():
    """Four at once, each a quarter of a second: 16 a second, however few of them are measured."""
    waves = [
        RequestRecord(4 * wave + n, 0.25 * wave, 0.25 * wave, ttft=0.05, e2e=0.25, warm_up=wave == 0)
        for wave in range(3)
        for n in range(4)
    ]
    figures = summarise(waves, SLO, closed=True)
    assert figures.duration == pytest.approx(0.5)
    assert figures.throughput == pytest.approx(16.0)


def test_objectives_are_read_in_milliseconds():
    slo = parse_slo(["ttft:500 tpot:50", "e2el:8000"])
    assert str(slo) == "ttft:500 tpot:50 e2el:8000"
    assert slo.seconds("ttft") == 0.5
    assert parse_slo(["tpot:50"]).seconds("ttft") == math.inf


def test_a_limit_is_met_exactly_and_missed_above():
    slo = parse_slo(["ttft:500,tpot:50"])
    assert slo.misses({"ttft": 0.5, "tpot": 0.05, "e2el": 9.0}) == ()
    assert slo.misses({"ttft": 0.501, "tpot": 0.06, "e2el": 9.0}) == ("ttft", "tpot")


@pytest.mark.parametrize(
    "word", ["itl:5", "ttft", "ttft:", "ttft:-1", "ttft:nan", "ttft:inf", "ttft:1 ttft:2"]
)
def test_what_is_no_objective_is_refused_by_name(word):
    with pytest.raises(ConfigError, match="--slo"):
        parse_slo([word])


SEARCHED = parse_slo(["ttft:1000 tpot:50"])


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
    drift = drift_of(records([0.1 + i * 0.004 + rng.uniform(0, 0.05) for i in range(100)]), SEARCHED)
    assert drift.grows
    assert drift.growth == pytest.approx(0.4, abs=0.05)


def test_failures_end_what_latencies_would_sustain():
    broken = [RequestRecord(100 + i, 5.0, 5.0, error="timeout") for i in range(3)]
    assert not judge([*records([0.2] * 97), *broken], SEARCHED).sustained
