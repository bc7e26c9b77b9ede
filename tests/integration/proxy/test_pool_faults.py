"""Unexpected errors in a proxy's upkeep of its workers: one look is lost, the next one follows."""

from __future__ import annotations

import pytest

from support.fakes.fake_workers import user
from support.fakes.proxy_fakes import FakeCluster
from support.stores.commands import commands
from support.waiting import until
from triptych.proxy import pool
from triptych.proxy.pool import CHECKS_PER_SECOND, health_interval
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore


def failing(work, failures):
    """The work, which fails so often first as nobody expects; and how often it has failed."""
    failed = []

    async def faulty(*args, **options):
        if len(failed) < failures:
            failed.append(args)
            raise ZeroDivisionError("nobody expects this")
        return await work(*args, **options)

    return faulty, failed


async def test_a_look_at_the_registry_that_fails_is_followed_by_others(store, monkeypatch, caplog):
    async with FakeCluster(store, encoders=2) as cluster:
        poll, failed = failing(cluster.registry.poll, 2)
        monkeypatch.setattr(cluster.registry, "poll", poll)
        await until(lambda: len(failed) == 2, "two failed looks")
        gone = cluster.encoders[1]
        await cluster.registry.withdraw(gone.info)
        await gone.kill()
        await until(lambda: ("encoder", gone.address) not in cluster.pool.workers, "the worker's going")
    assert "the registry could not be read" in caplog.text


async def test_a_health_check_that_fails_by_itself_is_followed_by_others(store, monkeypatch, caplog):
    monkeypatch.setattr(pool, "HEALTH_INTERVAL", 0.05)
    async with FakeCluster(store) as cluster:
        checked = cluster.pd_workers[0].health
        check, failed = failing(cluster.pool._check, 3)
        monkeypatch.setattr(cluster.pool, "_check", check)
        await until(lambda: len(failed) == 3, "three failed checks")
        before = checked.checked
        await until(lambda: checked.checked > before, "further checks")
        assert (await cluster.ask(user("?"))).choices
    assert "could not be checked" in caplog.text


LOOKS = 5


async def test_a_poll_of_the_registry_is_one_command(store, monkeypatch):
    monkeypatch.setattr(pool, "POLL_SECONDS", 60.0)
    async with FakeCluster(store, encoders=2, pd_workers=2) as cluster:
        before = await commands(store)
        for _ in range(LOOKS):
            await cluster.pool.poll()
        spent = await commands(store) - before
        assert spent["eval"] == LOOKS
        # All else is of the scripts, and the same for any number of workers.
        assert sum(spent.values()) - spent["info"] <= 8 * LOOKS
        assert spent["hgetall"] == spent["hvals"] == spent["hget"] == spent["scan"] == 0
        assert len(cluster.pool.workers) == 4


@pytest.mark.parametrize("workers", [1, 2, 16, 17, 100, 1000])
def test_a_proxy_makes_no_more_health_checks_a_second_for_more_workers(workers: int) -> None:
    interval = health_interval(workers)
    assert interval >= pool.HEALTH_INTERVAL
    assert workers / interval <= CHECKS_PER_SECOND


async def test_a_worker_whose_registration_is_gone_is_checked_at_once_however_many_workers_there_are(
    store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "health_interval", lambda workers: 3600.0)
    async with FakeCluster(store, encoders=2) as cluster:
        first, second = cluster.encoders
        await until(lambda: first.health.checked == second.health.checked == 1, "the first checks")
        await first.kill()
        await cluster.registry.withdraw(first.info)
        await until(lambda: ("encoder", first.address) not in cluster.pool.workers, "the worker's going")
        assert second.health.checked == 1


async def test_all_workers_are_checked_at_once_when_the_store_goes_away(store, monkeypatch):
    monkeypatch.setattr(pool, "health_interval", lambda workers: 3600.0)

    async def down(*_, **__):
        raise StoreUnavailable("switched off")

    async with FakeCluster(store, encoders=2) as cluster:
        workers = (*cluster.encoders, *cluster.pd_workers)
        await until(lambda: all(worker.health.checked == 1 for worker in workers), "the first checks")
        monkeypatch.setattr(cluster.registry, "poll", down)
        await until(
            lambda: all(worker.health.checked > 1 for worker in workers), "checks by the proxy itself"
        )
