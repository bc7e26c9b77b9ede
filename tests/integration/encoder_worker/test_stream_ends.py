"""How Encode streams end: closed by both sides, they leave nothing to the garbage collector."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
from grpc import aio

from support.data.pictures import picture
from support.engine.encoder_bench import Job, bench, png
from support.waiting import within
from triptych.encoder_worker import server
from triptych.models.base import EncoderSide
from triptych.store.embedding_store import EmbeddingStore

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


async def test_ended_jobs_leave_nothing_to_the_garbage_collector(
    encoder: EncoderSide, store: EmbeddingStore, store_url: str
) -> None:
    async with bench(encoder, store, store_url) as b:
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


async def test_a_client_that_does_not_close_the_stream_cannot_keep_it(
    encoder: EncoderSide, store: EmbeddingStore, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CLOSING_SECONDS", 0.1)
    async with bench(encoder, store, store_url) as b:
        media = png(picture(1, 64, 64))
        await (await Job(b, media).planned()).finished()
        await _ended(await _ready(Job(b, media)))
