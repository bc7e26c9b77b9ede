"""PD workers whose engines stand still although their processes answer: set aside, and taken back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from support.fakes.fake_pd import FakePD
from support.fakes.fake_workers import user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.proxy.pd import router, stall_watch

TEXT = user("count")
STALL = 1.0
BEAT = 0.05


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (router, stall_watch):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.2)


@contextlib.asynccontextmanager
async def beating(*workers: FakePD) -> AsyncIterator[set[FakePD]]:
    """All of them beat until the end; those in the set stand still at it."""
    hung: set[FakePD] = set()

    async def beat() -> None:
        count = 0
        while True:
            count += 1
            for worker in workers:
                worker.beat(1 if worker in hung else count)
            await asyncio.sleep(BEAT)

    task = asyncio.create_task(beat())
    try:
        yield hung
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _shown(worker: FakePD) -> int:
    return sum(event.HasField("tokens") for held in worker.requests.values() for event in held.events)


async def test_a_worker_that_stands_still_loses_its_requests_and_gets_no_new_ones_until_it_moves(store):
    async with (
        FakeCluster(store, pd_workers=2, stall_timeout=STALL) as cluster,
        beating(*cluster.pd_workers) as hung,
    ):
        for worker in cluster.pd_workers:
            worker.pause_at = 20
        asked = asyncio.create_task(cluster.stream(TEXT, max_tokens=50))
        await until(lambda: any(_shown(worker) == 20 for worker in cluster.pd_workers))
        first, second = sorted(cluster.pd_workers, key=lambda worker: -len(worker.submits))
        second.pause_at = None
        hung.add(first)
        assert await asked == whole_text(50)
        assert second.submits[-1].attempt == 2

        before = len(first.submits)
        answers = await asyncio.gather(*(cluster.stream(TEXT, max_tokens=5) for _ in range(8)))
        assert answers == [whole_text(5)] * 8
        assert len(first.submits) == before, "a worker that stands still is not asked"

        hung.clear()
        hung.add(second)
        first.pause_at = None
        first.gate.set()
        second.pause_at = 0
        asked = asyncio.create_task(cluster.stream(TEXT, max_tokens=6))
        assert await asked == whole_text(6)
        assert len(first.submits) > before, "a worker that moves again is"
        await cluster.at_rest()
