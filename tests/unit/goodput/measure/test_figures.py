"""Statistics on synthetic latencies whose answers are known."""

from __future__ import annotations

import math

import numpy as np
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


def test_percentiles_are_numpys():
    values = list(np.random.default_rng(0).exponential(1.0, 137))
    for rank in (0, 1, 50, 90, 99, 100):
        assert percentile(values, rank) == pytest.approx(float(np.percentile(values, rank)))


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


def test_p50_p90_p99_of_a_ladder():
    figures = summarise([record(i, ttft=i / 1000) for i in range(101)], SLO)
    assert figures.spreads["ttft"].percentiles == pytest.approx((0.05, 0.09, 0.099))


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


def test_one_failure_in_two_hundred_leaves_the_tail_finite():
    figures = summarise([*(record(i) for i in range(200)), failure(200)], SLO)
    assert figures.tails["ttft"] == pytest.approx(0.05)


def test_without_objectives_every_completed_request_is_good():
    figures = summarise([record(0, ttft=99.0), failure(1)], parse_slo([]))
    assert figures.good == 1


def test_warm_up_requests_count_nowhere():
    figures = summarise([record(0, ttft=9.0, warm_up=True), record(1)], SLO)
    assert figures.sent == 1
    assert figures.spreads["ttft"].mean == pytest.approx(0.05)
    with pytest.raises(ValueError):
        summarise([record(0, warm_up=True)], SLO)


def test_the_clock_of_a_window_starts_with_its_last_warm_up_request():
    first, second = record(10, warm_up=True), record(12, ttft=0.05, tpot=0.005)
    assert summarise([first, second], SLO).duration == pytest.approx(0.2 + 0.1)


def test_a_reply_of_one_token_has_no_time_per_output_token():
    single = record(0, output_tokens=1)
    assert single.tpot == 0.0
    assert math.isnan(summarise([single], SLO).spreads["tpot"].median)


def test_lateness_is_what_was_sent_after_its_plan():
    late = RequestRecord(0, 1.0, 1.004, ttft=0.1, e2e=0.1)
    assert summarise([late], SLO).lateness.mean == pytest.approx(0.004)


def test_a_window_in_which_all_failed_has_figures():
    figures = summarise([failure(0), failure(1)], SLO)
    assert figures.attainment == 0
    assert figures.goodput == 0
