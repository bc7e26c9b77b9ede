"""Jobs of an encoder worker, and how they fail."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch
from grpc import aio

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.engine.encoder_bench import Bench, Job, bench, png, stored_rows
from support.waiting import within
from triptych.base.types import WorkerInfo
from triptych.ec_connector.int8_rows import packed
from triptych.encoder_worker import server as server_module
from triptych.encoder_worker.media.formats import decode_image
from triptych.encoder_worker.service import warn_of_mismatch
from triptych.protos.convert import plan_from_proto
from triptych.registry.registry import Registry
from triptych.store import keys
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore


def media(seed: int, width: int = 64, height: int = 64) -> bytes:
    return png(picture(seed, width, height))


async def exists(store: EmbeddingStore, key: str) -> bool:
    return bool(await store.control.execute("EXISTS", keys.embedding(key)))


async def at_rest(b: Bench, store: EmbeddingStore) -> None:
    for name in ("jobs", "queue_items", "planned_items", "inflight", "leases_held", "prepared_bytes"):
        await b.until(f"triptych_encoder_{name}", 0)
    async with asyncio.timeout(45):
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
    assert (plan.rows, plan.length, plan.grid_thw) == (prepared.rows, prepared.length, prepared.grid_thw)
    await at_rest(b, store)


async def test_rows_in_8_bits_take_a_quarter_of_float32(open_bench, store, encoder):
    path = str(build_checkpoint("qwen3_vl"))
    async with open_bench(model=path, ec_store_rows="int8") as b:
        job = await Job(b, media(1, 96, 64)).planned()
        ready = (await job.finished()).ready
        plan, rows = await stored_rows(store, job)
        assert plan_from_proto(ready.plan) == plan and plan.dtype == "int8" and plan.scales > 1
        prepared = encoder.preprocess(decode_image(job.media, max_pixels=10**6), {})
        with torch.inference_mode():
            [expected] = encoder.encode([prepared])
        assert torch.equal(rows, packed(expected, plan.scales))
        assert plan.nbytes == expected.numel() + 4 * plan.scales * plan.rows
        assert b.metric("triptych_ec_save_bytes_total") == plan.nbytes


async def test_jobs_of_several_requests_share_a_batch(open_bench, store, encoder):
    async with open_bench(encoder_batch_patches=16384) as b:
        sizes = [(64, 64), (128, 64)]
        first = await Job(b, media(99)).planned()
        b.tower.open.clear()
        await first.run()
        assert await asyncio.to_thread(b.tower.entered.wait, 45)
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


async def test_an_embedding_is_counted_for_the_tenant_of_its_job(b: Bench, store: EmbeddingStore) -> None:
    job = await Job(b, media(8), changes={"tenant": "a" * 16}).planned()
    assert (await job.finished()).WhichOneof("body") == "ready"
    # As an older proxy sends it.
    other = await Job(b, media(9)).planned()
    assert (await other.finished()).WhichOneof("body") == "ready"
    usage, _ = keys.usage("0", "", "")
    counted: dict[bytes, bytes] = {}
    async with asyncio.timeout(45):
        while not counted:
            await asyncio.sleep(0.02)
            counted = await store.control.execute("HGETALL", usage)
    plan, _ = await stored_rows(store, job)
    assert counted == {b"aaaaaaaaaaaaaaaa:embedding": str(plan.nbytes).encode()}


async def test_media_go_with_the_plan_and_pixels_with_the_rows(b: Bench, store: EmbeddingStore) -> None:
    stream = await Job(b, media(7)).planned()
    [job] = b.worker.jobs.open_jobs()
    assert job.media is None
    assert job.prepared is not None
    assert (await stream.finished()).WhichOneof("body") == "ready"
    assert job.prepared is None
    await at_rest(b, store)


JOBS = 50


async def _ready(job: Job) -> Job:
    """The job of an item that is stored already, after its ready event."""
    await job.start()
    await job.event()  # the plan
    assert (await job.event()).ready.already_stored
    return job


async def _ended(job: Job) -> None:
    """The server has ended the stream."""
    assert await within("the stream's end", job.call.read()) is aio.EOF


def _streams() -> Counter[str]:
    """Objects of a gRPC server's streams that are in memory, by their type."""
    kinds = (type(thing).__name__ for thing in gc.get_objects())
    return Counter(kind for kind in kinds if "MessageReceiver" in kind or kind == "async_generator")


async def test_ended_jobs_leave_nothing_to_the_garbage_collector(b: Bench) -> None:
    media = png(picture(1, 64, 64))
    await (await Job(b, media).planned()).finished()
    gc.collect()
    gc.disable()
    try:
        before = _streams()
        for _ in range(JOBS):
            job = await _ready(Job(b, media))
            await job.call.done_writing()
            await _ended(job)
        left = _streams() - before
    finally:
        gc.enable()
    assert sum(left.values()) < JOBS / 5, left


async def test_a_client_that_does_not_close_the_stream_cannot_keep_it(b, monkeypatch):
    monkeypatch.setattr(server_module, "CLOSING_SECONDS", 0.1)
    media = png(picture(1, 64, 64))
    await (await Job(b, media).planned()).finished()
    await _ended(await _ready(Job(b, media)))


KEY, OTHER = "a" * 64, "c" * 64
PD = WorkerInfo("10.0.0.1:1", "pd", "i", KEY, "qwen", capacity={"row_width": 8192})
ENCODER = WorkerInfo(
    "10.0.0.2:1", "encoder", "i", KEY, "qwen", namespaces=("b" * 64,), capacity={"row_width": 8192}
)


async def test_it_names_its_key_and_the_one_that_is_served(store, caplog):
    registry = Registry(store)
    await registry.register(PD)
    await warn_of_mismatch(registry, replace(ENCODER, model_key=OTHER))
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert KEY[:12] in line and OTHER[:12] in line and "--model-revision" in line


@pytest.mark.parametrize("workers", [(), (PD,), (PD, replace(PD, address="10.0.0.3:1", model_key=OTHER))])
async def test_it_says_nothing_where_it_fits_or_comes_first(store, caplog, workers):
    registry = Registry(store)
    for info in workers:
        await registry.register(info)
    await warn_of_mismatch(registry, ENCODER)
    assert not caplog.records


async def test_a_store_that_is_away_ends_no_start(caplog: pytest.LogCaptureFixture) -> None:
    class Away:
        async def workers(self) -> list[WorkerInfo]:
            raise StoreUnavailable("away")

    await warn_of_mismatch(Away(), ENCODER)  # type: ignore[arg-type]
    assert "not compared with the PD workers" in caplog.text


async def test_an_item_is_saved_when_the_store_has_come_back(encoder, server, own_store):
    async with bench(encoder, own_store, server.url) as b:
        await (await Job(b, png(picture(1))).planned()).finished()
        job = await Job(b, png(picture(2))).planned()
        server.stop()
        await job.run()
        assert await asyncio.to_thread(b.tower.entered.wait, 45)
        while b.metric("triptych_encoder_tower_items_total") < 2:
            await asyncio.sleep(0.01)
        server.start()
        assert (await job.last()).WhichOneof("body") == "ready"
        assert b.tower.batches == [1, 1]
