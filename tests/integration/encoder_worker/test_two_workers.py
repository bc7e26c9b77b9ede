"""Two encoder workers over one store: single flight, and owners that hang."""

from __future__ import annotations

import asyncio

from support.data.pictures import picture
from support.engine.encoder_bench import Bench, Job, bench, png
from triptych.models.base import EncoderSide
from triptych.store import keys
from triptych.store.embedding_store import EmbeddingStore


async def in_the_tower(b: Bench, seed: int) -> Job:
    """A job that hangs in the worker's tower."""
    job = await Job(b, png(picture(seed))).planned()
    b.tower.open.clear()
    await job.run()
    assert await asyncio.to_thread(b.tower.entered.wait, 10)
    return job


async def test_the_second_worker_is_told_the_first_and_can_join_there(
    encoder: EncoderSide, store: EmbeddingStore, store_url: str
) -> None:
    async with bench(encoder, store, store_url) as a, bench(encoder, store, store_url) as b:
        first = await in_the_tower(a, 1)
        second = await Job(b, first.media).planned()
        failed = (await second.finished()).failed
        assert (failed.owner_address, failed.retryable) == (a.address, True)
        joined = await Job(a, first.media).start()
        assert (await joined.event()).WhichOneof("body") == "planned"
        a.tower.open.set()
        events = await asyncio.gather(first.last(), joined.last())
        assert [event.WhichOneof("body") for event in events] == ["ready"] * 2
        assert (a.tower.batches, b.tower.batches) == ([1], [])


async def test_a_hung_owner_is_replaced_by_the_token_of_its_lease(
    encoder: EncoderSide, store: EmbeddingStore, store_url: str
) -> None:
    async with bench(encoder, store, store_url) as a, bench(encoder, store, store_url) as b:
        first = await in_the_tower(a, 2)
        told = (await (await Job(b, first.media).planned()).finished()).failed
        retry = await Job(b, first.media, changes={"failed_lease_token": told.owner_token}).planned()
        assert (await retry.finished()).WhichOneof("body") == "ready"
        a.tower.open.set()
        assert (await first.last()).WhichOneof("body") == "ready"
        async with asyncio.timeout(5):
            while await store.control.execute("HKEYS", keys.LEASES):
                await asyncio.sleep(0.01)


async def test_a_worker_takes_what_another_has_stored_since_the_plan(
    encoder: EncoderSide, store: EmbeddingStore, store_url: str
) -> None:
    async with bench(encoder, store, store_url) as a, bench(encoder, store, store_url) as b:
        waiting = await Job(b, png(picture(3))).planned()
        await (await Job(a, png(picture(3))).planned()).finished()
        assert (await waiting.finished()).ready.already_stored
        assert b.tower.batches == []
