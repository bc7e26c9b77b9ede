"""What goes wrong stays with the one it belongs to, and every stream ends in an answer."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from dataclasses import replace

import pytest
from grpc import aio

from support.data.pictures import picture
from support.engine.encoder_bench import Bench, Job, bench, png
from support.waiting import within
from triptych.base.types import WorkerInfo
from triptych.encoder_worker import server as server_module
from triptych.encoder_worker.service import warn_of_mismatch
from triptych.registry.registry import Registry
from triptych.store.control import StoreUnavailable


def media(seed: int, width: int = 64, height: int = 64) -> bytes:
    return png(picture(seed, width, height))


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
        assert await asyncio.to_thread(b.tower.entered.wait, 10)
        while b.metric("triptych_encoder_tower_items_total") < 2:
            await asyncio.sleep(0.01)
        server.start()
        assert (await job.last()).WhichOneof("body") == "ready"
        assert b.tower.batches == [1, 1]
