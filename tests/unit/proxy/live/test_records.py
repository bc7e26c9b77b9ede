"""Records of calls that have ended, and statistics over them."""

from __future__ import annotations

import pytest

from support.fakes.live_view import call_record
from triptych.base.machine.worker_load import WorkerLoad
from triptych.base.metrics import ProxyMetrics
from triptych.base.types import WorkerInfo
from triptych.proxy.live.calls import KEEP_SECONDS, MAX_KEPT, MAX_NEWEST, CallRecord, CallRecords
from triptych.proxy.live.cluster_view import MAX_NAMES, WorkerNames
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
from triptych.proxy.live.timeline import RequestTimeline
from triptych.proxy.workers import Worker


def record(ended: float, seconds: float = 0.1, status: int = 200) -> CallRecord:
    return call_record(ended - seconds, ended, RequestTimeline(), status=status)


def test_slow_and_failed_calls_are_kept_when_many_others_have_ended_since() -> None:
    records = CallRecords()
    gone = []
    for order in range(2000):
        seconds, status = (9.0 if order == 7 else 0.1), (503 if order == 8 else 200)
        gone.append(records.add(order, record(order / 100, seconds, status)))
    assert records.get(7) is not None and records.get(8) is not None
    kept = {order for order, _ in records.all()}
    left = {each[0] for each in gone if each}
    assert len(kept) == MAX_NEWEST + MAX_KEPT
    assert kept.isdisjoint(left) and kept | left == set(range(2000))


def test_what_was_slow_long_ago_gives_its_place_up() -> None:
    records = CallRecords()
    records.add(0, record(1.0, 60.0))
    for order in range(1, MAX_NEWEST + MAX_KEPT + 1):
        records.add(order, record(KEEP_SECONDS + 100.0))
    assert records.get(0) is None and records.get(1) is not None


def worker(pool: str, address: str, name: str = "") -> Worker:
    info = WorkerInfo(address, pool, "incarnation", "key", "model")
    return Worker(info, load=WorkerLoad(name) if name else None)


def test_a_worker_is_named_as_it_says_and_by_its_address_until_then() -> None:
    workers = {("encoder", "10.0.0.7:50051"): worker("encoder", "10.0.0.7:50051")}
    names = WorkerNames(workers)
    names.poll()
    assert names("10.0.0.7:50051") == "10.0.0.7:50051"
    workers["encoder", "10.0.0.7:50051"].load = WorkerLoad("encoder-1")
    names.poll()
    assert names("10.0.0.7:50051") == "encoder-1"
    # Records of requests name it when it has gone.
    workers.clear()
    names.poll()
    assert names("10.0.0.7:50051") == "encoder-1"


def test_equal_names_are_told_apart_by_their_addresses() -> None:
    keys = [("encoder", "one.lan:1"), ("encoder", "two.lan:1"), ("pd", "two.lan:2")]
    names = WorkerNames({(pool, address): worker(pool, address, "same-0") for pool, address in keys})
    names.poll()
    assert [names(address) for _, address in keys] == ["same-0 (one:1)", "same-0 (two:1)", "same-0"]


def test_names_of_workers_that_have_gone_are_bounded() -> None:
    workers: dict[tuple[str, str], Worker] = {}
    names = WorkerNames(workers)
    for index in range(MAX_NAMES + 10):
        workers.clear()
        workers["pd", f"10.0.0.1:{index}"] = worker("pd", f"10.0.0.1:{index}", f"pd-{index}")
        names.poll()
    assert names("10.0.0.1:0") == "10.0.0.1:0"
    assert names(f"10.0.0.1:{MAX_NAMES + 9}") == f"pd-{MAX_NAMES + 9}"


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
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values, percent, wanted):
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
