"""The store is gone for a while, or for good: items wait for it within their time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.data.pictures import picture
from support.engine.encoder_bench import Job, bench, png
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.models.base import EncoderSide
from triptych.store.embedding_store import EmbeddingStore


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedStore]:
    server = EmbeddedStore(tmp_path, 64 << 20)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def own_store(server: EmbeddedStore) -> AsyncIterator[EmbeddingStore]:
    store = await EmbeddingStore.connect(server.url, timeout=0.5)
    yield store
    await store.close()


async def test_an_item_is_saved_when_the_store_has_come_back(
    encoder: EncoderSide, server: EmbeddedStore, own_store: EmbeddingStore
) -> None:
    async with bench(encoder, own_store, server.url) as b:
        await (await Job(b, png(picture(1))).planned()).finished()
        job = await Job(b, png(picture(2))).planned()
        server.stop()
        await job.run()
        assert await asyncio.to_thread(b.tower.entered.wait, 10)
        while b.metric("triptych_encoder_tower_items_total") < 2:
            await asyncio.sleep(0.01)
        server.start()
        assert (await job.last()).WhichOneof("body") == "ready"
        assert b.tower.batches == [1, 1]


async def test_without_a_store_a_job_fails_at_its_timeout_and_says_why(
    encoder: EncoderSide, server: EmbeddedStore, own_store: EmbeddingStore
) -> None:
    async with bench(encoder, own_store, server.url) as b:
        server.stop()
        job = await Job(b, png(picture(3)), changes={"timeout": 3.0}).planned()
        failed = (await job.finished()).failed
        assert (failed.error.code, failed.retryable) == ("unavailable", True)
        assert "store" in failed.error.message
        await b.until("triptych_encoder_jobs", 0)
