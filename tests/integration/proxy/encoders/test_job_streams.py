"""What the streams of encoder jobs leave behind in the proxy: nothing for the garbage collector."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from support.channels import connected_channel
from support.fakes.fake_encoder import FakeEncoder, fake_plan
from support.fakes.fake_workers import TOKEN
from support.processes.cluster import PATIENCE
from support.waiting import until, within
from triptych.base.config import ProxyConfig
from triptych.base.metrics import ProxyMetrics
from triptych.protos import encoder_pb2
from triptych.proxy.encoders import encoder_client
from triptych.proxy.encoders.encoder_client import EncodeStream
from triptych.proxy.media.spool import MediaSpool, SpooledMedia
from triptych.proxy.quotas.table import QuotaTable, quota_specs

JOBS = 50


class Lingering(FakeEncoder):
    """Says that the item is ready, and does not end the stream."""

    async def Encode(self, requests: Any, context: Any) -> AsyncIterator[encoder_pb2.EncodeEvent]:
        job = (await anext(aiter(requests))).job
        yield encoder_pb2.EncodeEvent(ready=encoder_pb2.ItemReady(plan=fake_plan(job.mm_hash)))
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1


class Breaking(FakeEncoder):
    """Ends every stream with an error, as a worker's end does."""

    async def Encode(self, requests: Any, context: Any) -> AsyncIterator[encoder_pb2.EncodeEvent]:
        await anext(aiter(requests))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
        yield encoder_pb2.EncodeEvent()


@contextlib.asynccontextmanager
async def _channel_to(encoder: FakeEncoder) -> AsyncIterator[aio.Channel]:
    await encoder.start()
    try:
        async with connected_channel(encoder.address, TOKEN) as channel:
            yield channel
    finally:
        await encoder.kill()


class Permits:
    """Permits the tower as soon as the item is planned."""

    stream: EncodeStream

    def planned(self, job_id: str, event: encoder_pb2.EncodeEvent) -> None:
        self.stream.run()


async def _ready(channel: aio.Channel, media: SpooledMedia, number: int) -> EncodeStream:
    job = encoder_pb2.EncodeJob(job_id=str(number), mm_hash=f"{number:064x}", media_bytes=media.nbytes)
    owner = Permits()
    owner.stream = EncodeStream(channel, job, media, owner.planned, phase_timeout=PATIENCE)
    end = await within("a job's end", owner.stream.result())
    assert end.WhichOneof("body") == "ready"
    return owner.stream


async def _run(channel: aio.Channel, media: SpooledMedia, number: int) -> None:
    stream = await _ready(channel, media, number)
    await within("its stream's end", stream.close())


def _streams() -> Counter[str]:
    """Objects of gRPC streams that are in memory, by their type."""
    kinds = (type(thing).__name__ for thing in gc.get_objects())
    return Counter(kind for kind in kinds if "StreamStreamCall" in kind or kind == "async_generator")


@pytest.fixture
async def media() -> AsyncIterator[SpooledMedia]:
    spool = MediaSpool(ProxyMetrics(), QuotaTable(quota_specs(ProxyConfig())))
    yield await spool.keep(b"pixels")
    spool.close()


async def test_ended_jobs_leave_nothing_to_the_garbage_collector(store, media):
    async with _channel_to(FakeEncoder(store)) as channel:
        await _run(channel, media, 0)
        gc.collect()
        gc.disable()
        try:
            before = _streams()
            for number in range(1, JOBS + 1):
                await _run(channel, media, number)
            left = _streams() - before
        finally:
            gc.enable()
    assert sum(left.values()) < JOBS / 5, left


async def test_a_worker_that_does_not_end_the_stream_cannot_keep_its_job(store, media, monkeypatch):
    monkeypatch.setattr(encoder_client, "CLOSING_SECONDS", 0.1)
    encoder = Lingering(store)
    async with _channel_to(encoder) as channel:
        await _run(channel, media, 1)
        await until(lambda: encoder.cancelled, "the stream to be cancelled")


async def test_a_stream_that_its_worker_breaks_leaves_no_task_behind(store, media):
    def senders() -> list[str]:
        names = (task.get_coro().__qualname__ for task in asyncio.all_tasks())
        return [name for name in names if "_consume_request_iterator" in name]

    async with _channel_to(Breaking(store)) as channel:
        stream = EncodeStream(
            channel, encoder_pb2.EncodeJob(job_id="1"), media, lambda *_: None, phase_timeout=PATIENCE
        )
        with pytest.raises(aio.AioRpcError):
            await within("a job's end", stream.result())
        await until(lambda: not senders(), "the sender of the stream to end")
