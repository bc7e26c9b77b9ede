"""The spool: bytes come back as they went in, budgets hold, and the last holder frees them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.data.media import content, kept_bytes
from triptych.base.config import ProxyConfig
from triptych.base.errors import InternalError, Overloaded
from triptych.base.hashing import framed_digest
from triptych.base.metrics import ProxyMetrics
from triptych.proxy.media import spool as media_spool
from triptych.proxy.media.spool import MediaSpool
from triptych.proxy.quotas.table import QuotaTable, quota_specs

SMALL = b"s" * 1000
LARGE = bytes(range(256)) * 12_345


def quotas(memory: int, disk: int) -> QuotaTable:
    return QuotaTable(quota_specs(ProxyConfig(media_memory=memory, media_disk=disk)))


@pytest.fixture
def metrics() -> ProxyMetrics:
    return ProxyMetrics()


@pytest.fixture
def spool(tmp_path: Path, metrics: ProxyMetrics) -> Iterator[MediaSpool]:
    it = MediaSpool(metrics, quotas(4 << 20, 8 << 20), folder=str(tmp_path))
    yield it
    it.close()


def gauge(metrics: ProxyMetrics, place: str) -> float | None:
    return metrics.registry.get_sample_value("triptych_media_bytes", {"place": place})


async def test_small_media_stay_in_memory_and_large_ones_go_to_a_file_without_a_name(
    spool: MediaSpool, metrics: ProxyMetrics, tmp_path: Path
) -> None:
    small, large = await spool.keep(SMALL), await spool.keep(LARGE)
    assert (small.on_disk, large.on_disk) == (False, True)
    assert (spool.memory_bytes, spool.disk_bytes) == (len(SMALL), len(LARGE))
    assert (gauge(metrics, "memory"), gauge(metrics, "disk")) == (len(SMALL), len(LARGE))
    assert list(tmp_path.iterdir()) == []
    assert await content(small) == SMALL
    assert await content(large) == LARGE
    small.release()
    large.release()
    assert (gauge(metrics, "memory"), gauge(metrics, "disk")) == (0, 0)


async def test_media_written_in_pieces_are_whole_and_hash_as_one(spool: MediaSpool) -> None:
    writer = spool.writer()
    for at in range(0, len(LARGE), 100_000):
        await writer.write(LARGE[at : at + 100_000])
    media = await writer.finish()
    assert media.nbytes == len(LARGE)
    with media.view() as view:
        assert framed_digest((("x", view),)) == framed_digest((("x", LARGE),))
    frames = [len(frame) async for frame in media.frames(256 << 10)]
    assert max(frames) <= 256 << 10
    assert sum(frames) == len(LARGE)
    media.release()


async def test_a_writer_that_is_abandoned_gives_everything_back(spool: MediaSpool) -> None:
    for data in (SMALL, LARGE):
        writer = spool.writer()
        await writer.write(data)
        await writer.write(SMALL)
        assert kept_bytes(spool) > 0
        writer.abandon()
        assert kept_bytes(spool) == 0


async def test_the_last_of_several_holders_frees_the_bytes(spool: MediaSpool) -> None:
    media = await spool.keep(LARGE)
    media.retain()
    media.release()
    assert await content(media) == LARGE
    media.release()
    assert kept_bytes(spool) == 0
    with pytest.raises(InternalError):
        media.retain()


async def test_a_file_stays_open_under_a_reader_whose_request_has_gone(spool, monkeypatch):
    """Else its descriptor could be another picture's by the time that the thread reads."""
    media = await spool.keep(LARGE)
    begun, go_on = threading.Event(), threading.Event()
    pread = os.pread

    def slow(*args: int) -> bytes:
        begun.set()
        assert go_on.wait(10)
        return pread(*args)

    monkeypatch.setattr(media_spool.os, "pread", slow)
    frames = media.frames(1000)
    reading = asyncio.ensure_future(anext(frames))
    await asyncio.to_thread(begun.wait, 10)
    media.release()
    assert spool.disk_bytes == len(LARGE)
    go_on.set()
    assert await reading == LARGE[:1000]
    await frames.aclose()
    async with asyncio.timeout(10):
        while spool.disk_bytes:
            await asyncio.sleep(0.001)


async def test_budgets_of_memory_and_disk_are_429s_and_leave_nothing(spool: MediaSpool) -> None:
    held = [await spool.keep(bytes(1 << 20)) for _ in range(4)]
    assert spool.full
    with pytest.raises(Overloaded) as caught:
        await spool.keep(SMALL)
    assert caught.value.retry_after
    for media in held:
        media.release()
    with pytest.raises(Overloaded):
        await spool.keep(bytes(9 << 20))
    first = await spool.keep(bytes(3 << 20))
    second = await spool.keep(bytes(3 << 20))
    with pytest.raises(Overloaded):
        await spool.keep(bytes(3 << 20))
    for media in (first, second):
        media.release()
    assert kept_bytes(spool) == 0


async def test_a_disk_that_fails_is_our_error_and_leaves_nothing(spool, monkeypatch):
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(media_spool.os, "write", full)
    with pytest.raises(InternalError) as caught:
        await spool.keep(LARGE)
    assert "space" not in caught.value.message
    async with asyncio.timeout(10):
        while kept_bytes(spool):
            await asyncio.sleep(0.001)
