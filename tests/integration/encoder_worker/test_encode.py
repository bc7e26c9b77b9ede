"""Encode streams against a real store and a tiny checkpoint: what is stored, when, and how often."""

from __future__ import annotations

import asyncio
import hashlib

import torch

from support.data.pictures import picture
from support.engine.encoder_bench import Bench, Job, png, stored_rows
from triptych.encoder_worker.media.formats import decode_image
from triptych.store import keys
from triptych.store.embedding_store import EmbeddingStore


def media(seed: int, width: int = 64, height: int = 64) -> bytes:
    return png(picture(seed, width, height))


async def exists(store: EmbeddingStore, key: str) -> bool:
    return bool(await store.control.execute("EXISTS", keys.embedding(key)))


async def at_rest(b: Bench, store: EmbeddingStore) -> None:
    for name in ("jobs", "queue_items", "planned_items", "inflight", "leases_held", "prepared_bytes"):
        await b.until(f"triptych_encoder_{name}", 0)
    async with asyncio.timeout(5):
        while await store.control.execute("HKEYS", keys.LEASES):
            await asyncio.sleep(0.01)


async def test_stored_rows_are_what_the_encoder_side_puts_out(b, store, encoder):
    job = await Job(b, media(1, 96, 64)).planned()
    assert not await exists(store, job.key)
    event = await job.finished()
    assert event.WhichOneof("body") == "ready"
    assert not event.ready.already_stored
    plan, rows = await stored_rows(store, job)
    prepared = encoder.preprocess(decode_image(job.media, max_pixels=10**6), {})
    with torch.inference_mode():
        [expected] = encoder.encode([prepared])
    assert torch.equal(rows, expected)
    assert (plan.rows, plan.length, plan.grid_thw) == (
        prepared.rows,
        prepared.length,
        prepared.grid_thw,
    )
    await at_rest(b, store)


async def test_jobs_of_several_requests_share_a_batch(open_bench, store, encoder):
    async with open_bench(encoder_batch_patches=16384) as b:
        sizes = [(64, 64), (128, 64)]
        first = await Job(b, media(99)).planned()
        b.tower.open.clear()
        await first.run()
        assert await asyncio.to_thread(b.tower.entered.wait, 10)
        jobs = await asyncio.gather(*(Job(b, media(n, *sizes[n % 2])).planned() for n in range(8)))
        await asyncio.gather(*(job.run() for job in jobs))
        await b.until("triptych_encoder_queue_items", 8)
        b.tower.open.set()
        events = await asyncio.gather(first.last(), *(job.last() for job in jobs))
        assert [event.WhichOneof("body") for event in events] == ["ready"] * 9
        assert b.tower.batches == [1, 8]
        assert b.metric("triptych_encoder_batch_items_sum") == 9
        for job in jobs:
            _, rows = await stored_rows(store, job)
            prepared = encoder.preprocess(decode_image(job.media, max_pixels=10**6), {})
            with torch.inference_mode():
                [alone] = encoder.encode([prepared])
            torch.testing.assert_close(rows, alone, atol=1e-5, rtol=1e-4)


async def test_a_second_job_for_a_stored_key_costs_no_tower_call(b: Bench) -> None:
    first = await Job(b, media(1)).planned()
    await first.finished()
    second = await Job(b, media(1)).start()
    planned, ready = await second.event(), await second.event()
    assert planned.planned.rows == ready.ready.plan.rows > 0
    assert ready.ready.already_stored
    assert b.tower.batches == [1]
    assert b.metric("triptych_encoder_already_stored_total") == 1
    other = await Job(b, media(1), salt="tenant").planned()
    assert not (await other.finished()).ready.already_stored


async def test_a_flushed_store_is_filled_again_without_the_tower(b: Bench, store: EmbeddingStore) -> None:
    await (await Job(b, media(7)).planned()).finished()
    await store.control.execute("FLUSHALL")
    again = await Job(b, media(7)).planned()
    event = await again.finished()
    assert not event.ready.already_stored
    assert await exists(store, again.key)
    assert b.tower.batches == [1]


async def test_a_damaged_value_is_replaced_by_the_job_that_names_it(b: Bench, store: EmbeddingStore) -> None:
    await (await Job(b, media(8)).planned()).finished()
    stored = await Job(b, media(8)).start()
    key = stored.key
    _, good = await stored_rows(store, stored)
    await store.control.execute(
        "SETRANGE",
        keys.embedding(key),
        -1 + await store.control.execute("STRLEN", keys.embedding(key)),
        b"\xff",
    )
    value = await store.control.execute("GETRANGE", keys.embedding(key), 0, 4095)
    digest = hashlib.sha1(value).hexdigest()
    job = await Job(b, media(8), changes={"damaged_digest": digest, "re_encode": True}).planned()
    assert (await job.finished()).WhichOneof("body") == "ready"
    _, rows = await stored_rows(store, stored)
    assert torch.equal(rows, good)


async def test_media_go_with_the_plan_and_pixels_with_the_rows(b: Bench, store: EmbeddingStore) -> None:
    stream = await Job(b, media(7)).planned()
    [job] = b.worker.jobs.open_jobs()
    assert job.media is None
    assert job.prepared is not None
    assert (await stream.finished()).WhichOneof("body") == "ready"
    assert job.prepared is None
    await at_rest(b, store)
