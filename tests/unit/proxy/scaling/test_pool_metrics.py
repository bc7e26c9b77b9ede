"""What one proxy counts of its pools and of the store, cold starts, and care for its memory."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest

from triptych.base.config import ProxyConfig
from triptych.base.metrics import ProxyMetrics
from triptych.base.types import WorkerInfo
from triptych.proxy.scaling.cold_starts import ColdStarts
from triptych.proxy.scaling.upkeep import PoolMetrics, Upkeep, release_memory
from triptych.proxy.workers import KnownWorkers, Worker
from triptych.registry.leases import Leases
from triptych.registry.registry import Registry
from triptych.store.bulk import StoreMemory
from triptych.store.control import StoreUnavailable


class Workers(KnownWorkers):
    """The workers of a pool that no one polls."""

    store_ok = True

    def add(self, incarnation: str, pool: str = "pd") -> Worker:
        info = WorkerInfo("10.0.0.7:50051", pool, incarnation, "k" * 64, "m", (), {}, "image")
        worker = self.workers[pool, info.address] = Worker(info)
        self.report_change()
        return worker


class Shown:
    """The metrics of a proxy, and its workers."""

    def __init__(self) -> None:
        self.workers, self.metrics = Workers(), ProxyMetrics()
        self.pool = PoolMetrics(self.workers, self.metrics)  # type: ignore[arg-type]

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_a_registered_worker_that_stops_answering_is_a_loss(shown):
    worker = shown.workers.add("one")
    worker.alive = worker.serving = False
    shown.workers.report_loss(worker)
    assert shown.value("triptych_worker_losses_total", pool="pd") == 1
    assert shown.value("triptych_worker_losses_total", pool="encoder") == 0


def test_another_process_at_the_address_is_a_restart_and_a_first_one_is_none(shown):
    worker = shown.workers.add("one")
    assert shown.value("triptych_worker_restarts_total", pool="pd") == 0
    worker.info = replace(worker.info, incarnation="two")
    shown.workers.report_change()
    shown.workers.report_change()
    assert shown.value("triptych_worker_restarts_total", pool="pd") == 1


def test_a_worker_is_stalled_while_it_answers_and_does_not_serve(shown):
    worker = shown.workers.add("one", "encoder")
    worker.serving = False
    shown.workers.report_change()
    assert shown.value("triptych_workers_stalled", pool="encoder") == 1
    worker.registered = False
    shown.workers.report_change()
    assert shown.value("triptych_workers_stalled", pool="encoder") == 0


def test_the_store_is_up_while_it_answers(shown):
    assert shown.value("triptych_store_up") == 1
    shown.workers.store_ok = False
    assert shown.value("triptych_store_up") == 0


def test_evictions_are_counted_from_the_first_look_and_go_on_after_a_restart_of_the_store(shown):
    for evicted in (100, 130, 130, 5):
        shown.pool.store(
            StoreMemory(max_bytes=1000, used_bytes=900, policy="volatile-lru", evicted_keys=evicted)
        )
    assert shown.value("triptych_store_evictions_total") == 35
    assert shown.value("triptych_store_used_bytes") == 900
    assert shown.value("triptych_store_max_bytes") == 1000


class Node:
    """Half of a cycle."""

    other: Node


async def no_store(_: object) -> None:
    raise StoreUnavailable("the store is away")


def upkeep_without_a_store(monkeypatch: pytest.MonkeyPatch) -> Upkeep:
    for kept in (Registry, Leases):
        monkeypatch.setattr(kept, "collect_dead", no_store)
    return Upkeep(ProxyConfig(), SimpleNamespace(control=None), None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("who", ["itself", "upkeep"])
async def test_a_cycle_that_no_collection_has_seen_is_gone_once_memory_is_released(who, monkeypatch):
    release = release_memory if who == "itself" else upkeep_without_a_store(monkeypatch).collect
    gc.disable()
    try:
        one, two = Node(), Node()
        one.other, two.other = two, one
        gone = weakref.ref(one)
        del one, two
        assert gone() is not None
        await release()
        assert gone() is None
    finally:
        gc.enable()


def test_the_time_from_the_decision_to_the_registration_is_learnt_for_each_kind() -> None:
    starts = ColdStarts()
    starts.poll({"a": "cpu"}, 0.0)
    starts.asked(2, 10.0)
    starts.poll({"a": "cpu", "b": "cuda"}, 14.0)
    starts.poll({"a": "cpu", "b": "cuda", "c": "cpu"}, 18.0)
    assert starts.seconds == {"cuda": 4.0, "cpu": 8.0}
    assert (starts.expected("cuda"), starts.expected("never seen")) == (4.0, 8.0)


def test_workers_that_nobody_asked_for_say_nothing() -> None:
    starts = ColdStarts()
    starts.poll({}, 0.0)
    starts.poll({"a": "cpu"}, 5.0)
    starts.asked(1, 6.0)
    starts.withdrawn()
    starts.poll({"a": "cpu", "b": "cpu"}, 9.0)
    assert starts.expected("cpu") == 0.0


def test_a_start_that_never_comes_is_forgotten() -> None:
    starts = ColdStarts()
    starts.poll({}, 0.0)
    starts.asked(1, 0.0)
    starts.poll({"a": "cpu"}, 4000.0)
    assert starts.seconds == {}
