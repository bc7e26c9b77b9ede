"""Unexpected errors in a proxy's upkeep of its workers: one look is lost, the next one follows."""

from __future__ import annotations

import pytest

from support.fakes.fake_workers import user
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.proxy import pool
from triptych.registry.registry import Registry, RegistrySnapshot
from triptych.store.embedding_store import EmbeddingStore


class FaultyRegistry:
    """The registry, whose looks may fail as nobody expects."""

    def __init__(self, store: EmbeddingStore) -> None:
        self._registry = Registry(store)
        self.faults = 0

    async def poll(self, proxy_id: str, term: float, *, mark: str) -> RegistrySnapshot:
        if self.faults:
            self.faults -= 1
            raise ZeroDivisionError("nobody expects this")
        return await self._registry.poll(proxy_id, term, mark=mark)


async def test_a_look_at_the_registry_that_fails_is_followed_by_others(
    store: EmbeddingStore, caplog: pytest.LogCaptureFixture
) -> None:
    registry = FaultyRegistry(store)
    async with FakeCluster(store, encoders=2, registry_view=registry) as cluster:
        registry.faults = 2
        await until(lambda: not registry.faults, "two failed looks")
        gone = cluster.encoders[1]
        await cluster.registry.withdraw(gone.info)
        await gone.kill()
        await until(lambda: ("encoder", gone.address) not in cluster.pool.workers, "the worker's going")
    assert "the registry could not be read" in caplog.text


async def test_a_health_check_that_fails_by_itself_is_followed_by_others(
    store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "HEALTH_INTERVAL", 0.05)
    async with FakeCluster(store) as cluster:
        checked = cluster.pd_workers[0].health
        check, faults = pool.WorkerPool._check, 3

        async def faulty(self: pool.WorkerPool, *args: object, **options: object) -> tuple[bool, bool]:
            nonlocal faults
            if faults:
                faults -= 1
                raise ZeroDivisionError("nobody expects this")
            return await check(self, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(pool.WorkerPool, "_check", faulty)
        await until(lambda: not faults, "three failed checks")
        before = checked.checked
        await until(lambda: checked.checked > before, "further checks")
        assert (await cluster.ask(user("?"))).choices
    assert "could not be checked" in caplog.text
