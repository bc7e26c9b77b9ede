"""What one proxy counts of its pools and of the store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.base.metrics import ProxyMetrics
from triptych.base.types import WorkerInfo
from triptych.proxy.scaling.upkeep import PoolMetrics
from triptych.proxy.workers import KnownWorkers, Worker
from triptych.store.results import StoreMemory


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
