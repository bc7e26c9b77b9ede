"""Records of calls that have ended: which are kept, and the names of workers beside them."""

from __future__ import annotations

from triptych.base.machine.worker_load import WorkerLoad
from triptych.base.types import WorkerInfo
from triptych.proxy.live.names import MAX_NAMES, WorkerNames
from triptych.proxy.live.records import KEEP_SECONDS, MAX_KEPT, MAX_NEWEST, CallRecord, CallRecords
from triptych.proxy.requests.views import RequestTimeline
from triptych.proxy.workers import Worker


def record(ended: float, seconds: float = 0.1, status: int = 200) -> CallRecord:
    return CallRecord(
        label="mine",
        tenant="",
        model="model",
        started_at=0.0,
        started=ended - seconds,
        timeline=RequestTimeline(),
        choices=1,
        prompt_tokens=1,
        completion_tokens=1,
        ended=ended,
        status=status,
    )


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
