"""Statistics on synthetic latencies whose answers are known."""

from __future__ import annotations

import math

import pytest

from triptych.goodput.load.job import RequestRecord
from triptych.goodput.measure.figures import percentile, summarise
from triptych.goodput.measure.slo import parse_slo

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
