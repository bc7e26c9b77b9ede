"""Counts: read from the proxy's metrics, and what changed over a window."""

from __future__ import annotations

from triptych.metrics import ProxyMetrics
from triptych.proxy.live.counts import MOST_SECONDS, Counts, CountWindow, read_counts


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
    assert window.last(MOST_SECONDS * 5).at == MOST_SECONDS


def test_shares_of_nothing_are_unknown() -> None:
    assert Counts().hit_rate is None
    assert Counts().met_share is None
