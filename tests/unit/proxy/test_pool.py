"""A proxy whose event loop has stood still judges nobody by what it could not read meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from support.beats import StandingLoop
from triptych.proxy.pool import HEALTH_TIMEOUT, STORE_TIMEOUT, WorkerPool, _Watch
from triptych.proxy.workers import Worker
from triptych.registry.registry import RegistrySnapshot


class Answers:
    """A store and a worker that answer when the test says so."""

    def __init__(self) -> None:
        self.given = asyncio.Event()

    async def poll(self, proxy_id: str, term: float, *, mark: str) -> RegistrySnapshot:
        await self.given.wait()
        return RegistrySnapshot(workers=(), proxies=1, epoch="", mark="")

    async def health(self, channel: object, service: str, *, wait_for_ready: bool = False) -> Any:
        await self.given.wait()
        return True, True, None, ""


@pytest.fixture
async def answers() -> Answers:
    return Answers()


def watching(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerPool, Any]:
    pool = WorkerPool(answers, "proxy")  # type: ignore[arg-type]
    monkeypatch.setattr(pool, "_ask", answers.health)
    info: Any = SimpleNamespace(pool="pd", address="w", incarnation="i", namespaces=())
    return pool, _Watch(Worker(info), SimpleNamespace(channel=None))  # type: ignore[arg-type]


async def test_a_worker_whose_answer_was_not_read_is_neither_silent_nor_dead(answers, monkeypatch):
    pool, watch = watching(answers, monkeypatch)
    standing = StandingLoop(monkeypatch)
    checked = asyncio.create_task(pool._check(watch))
    for _ in range(2):
        await standing.turn(5)
        standing.stand_still(10 * HEALTH_TIMEOUT)
        await standing.turn(20)
        assert not checked.done() and not watch.worker.silent
    answers.given.set()
    await checked
    assert watch.worker.alive and watch.worker.serving and not watch.worker.silent


async def test_a_worker_that_does_not_answer_a_loop_that_turns_is_silent_and_then_dead(answers, monkeypatch):
    pool, watch = watching(answers, monkeypatch)
    standing = StandingLoop(monkeypatch)
    checked = asyncio.create_task(pool._check(watch))
    seen = []
    while not checked.done():
        await standing.turn(10)
        standing.stand_still(0.05)
        seen.append((watch.worker.silent, watch.worker.alive))
    assert list(dict.fromkeys(seen))[:2] == [(False, True), (True, True)]
    assert not watch.worker.alive


async def test_a_store_whose_answer_was_not_read_is_not_away(answers, monkeypatch, caplog):
    pool, _ = watching(answers, monkeypatch)
    pool.store_ok = True
    standing = StandingLoop(monkeypatch)
    polled = asyncio.create_task(pool.poll())
    await standing.turn(5)
    standing.stand_still(10 * STORE_TIMEOUT)
    await standing.turn(20)
    assert not polled.done()
    answers.given.set()
    await polled
    assert pool.store_ok and not caplog.records


async def test_a_store_that_does_not_answer_a_loop_that_turns_is_away(answers, monkeypatch):
    pool, _ = watching(answers, monkeypatch)
    pool.store_ok = True
    standing = StandingLoop(monkeypatch)
    polled = asyncio.create_task(pool.poll())
    while not polled.done():
        await standing.turn(10)
        standing.stand_still(0.05)
    assert not pool.store_ok
