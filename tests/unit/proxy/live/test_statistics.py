"""Statistics: counts read from the metrics, goodput against the SLO, and the history's points."""

from __future__ import annotations

import pytest

from triptych.base.metrics import ProxyMetrics
from triptych.proxy.live.objects import Flow
from triptych.proxy.live.statistics import (
    MAX_CALLS,
    MAX_SECONDS,
    Counts,
    CountWindow,
    GoodputWindow,
    Slo,
    Transfers,
    percentile,
    read_counts,
)


def test_errors_are_the_servers_and_refusals_the_clients() -> None:
    metrics = ProxyMetrics()
    for status, count in (("200", 5), ("400", 3), ("429", 2), ("499", 7), ("500", 1), ("503", 1)):
        metrics.requests.labels(status, "other").inc(count)
    counts = read_counts(metrics, 1.0, 0.0, 0, 0)
    assert (counts.requests, counts.errors, counts.refused) == (19, 4, 3)


def test_an_item_hits_unless_it_was_encoded_for_its_request() -> None:
    metrics = ProxyMetrics()
    for origin, count in (("store", 2), ("pd", 1), ("joined", 1), ("encoded", 4)):
        metrics.items.labels(origin).inc(count)
    counts = read_counts(metrics, 1.0, 0.0, 0, 0)
    assert (counts.items, counts.hits, counts.hit_rate) == (8, 4, 0.5)


def test_a_window_tells_what_was_added_and_how_fast() -> None:
    window = CountWindow()
    for second in range(31):
        window.add(Counts(at=float(second), requests=2.0 * second, measured=second, met=second / 2))
    last = window.last(10)
    assert last.requests == 20.0
    assert last.rate(last.requests) == 2.0
    assert last.met_share == 0.5


def test_a_window_shorter_than_asked_reaches_to_its_begin() -> None:
    window = CountWindow()
    assert window.last(10) == Counts()
    window.add(Counts(at=5.0, requests=1.0))
    assert window.last(10).rate(1.0) == 0.0
    window.add(Counts(at=7.0, requests=5.0))
    assert window.last(10) == Counts(at=2.0, requests=4.0)


def test_a_window_forgets_what_is_older_than_a_minute() -> None:
    window = CountWindow()
    for second in range(1000):
        window.add(Counts(at=float(second)))
    assert window.last(MAX_SECONDS * 5).at == MAX_SECONDS


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
def test_a_call_is_good_when_both_times_meet_the_slo(ttft, seconds, tokens, good):
    window = GoodputWindow(SLO)
    window.answered(0.0, ttft, seconds, tokens)
    assert (window.met, window.measured) == (int(good), 1)


def test_calls_older_than_a_minute_leave_the_percentiles() -> None:
    window = GoodputWindow(SLO)
    window.answered(0.0, 9.0, 9.0, 1)
    window.answered(50.0, 0.5, 1.0, 6)
    read = window.read(61.0, 0.5)
    assert (read.ttft_p50, read.ttft_p99) == (0.5, 0.5)
    assert (read.tpot_p50, read.tpot_p99) == (0.1, 0.1)
    assert (read.ttft_slo, read.tpot_slo, read.met) == (1.0, 0.1, 0.5)


def test_the_window_holds_a_bounded_number_of_calls() -> None:
    window = GoodputWindow(SLO)
    for index in range(MAX_CALLS + 10):
        window.answered(0.0, float(index >= 10), 1.0, 1)
    assert window.measured == MAX_CALLS + 10
    assert window.read(1.0, None).ttft_p50 == 1.0
    assert len(window._calls) == MAX_CALLS


@pytest.mark.parametrize(("values", "percent", "wanted"), [([1, 2, 3, 4], 50, 2), ([1, 2, 3, 4], 99, 4)])
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(
    values: list[float], percent: int, wanted: float
) -> None:
    assert percentile(values, percent) == wanted


def test_embeddings_flow_by_the_way_that_they_went() -> None:
    transfers = Transfers()
    assert transfers.flows()["shm"] == Flow(0.0, 0.0)
    for second in range(20):
        transfers.poll(100.0 + second)
    for way in ("encoded", "encoded", "shm", "of a later release"):
        transfers.add(way, 1000)
    transfers.poll(120.0)
    flows = transfers.flows()
    assert (flows["encoded"], flows["shm"]) == (Flow(0.2, 200.0), Flow(0.1, 100.0))
    assert (flows["store"], flows["peer"]) == (Flow(0.1, 100.0), Flow(0.0, 0.0))
