"""Unexpected errors in a proxy's upkeep of its workers: one look is lost, the next one follows."""

from __future__ import annotations

from support.fakes.fake_workers import user
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.proxy import pool


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
