"""Media on their way through the proxy: a loader of its own for a test, requests split with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from triptych.base.config import ProxyConfig
from triptych.base.metrics import ProxyMetrics
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.media.loader import MediaLoader, make_loader
from triptych.proxy.media.source import ItemMedia
from triptych.proxy.media.spool import MediaSpool, SpooledMedia
from triptych.proxy.splitter import SplitRequest, VideoSegments, split


@asynccontextmanager
async def media_loader(**flags: Any) -> AsyncIterator[MediaLoader]:
    """A loader with these flags of the proxy."""
    loader = make_loader(ProxyConfig(**flags), ProxyMetrics())
    try:
        yield loader
    finally:
        loader.close()


async def content(media: SpooledMedia) -> bytes:
    """All bytes, as an encoder would get them."""
    return b"".join([frame async for frame in media.frames(256 << 10)])


def _spooled(media: ItemMedia) -> SpooledMedia:
    assert isinstance(media, SpooledMedia)
    return media


async def split_with(
    loader: MediaLoader, call: ChatCall, namespace: str = "n", videos: VideoSegments | None = None
) -> tuple[SplitRequest, list[bytes]]:
    """The request split, and its items' bytes; nothing of it stays in the spool."""
    call.media.join()
    try:
        request = await split(call, namespace, loader, videos)
        return request, [await content(_spooled(item.media)) for item in request.items]
    finally:
        call.media.leave()


async def split_alone(
    call: ChatCall, namespace: str = "n", videos: VideoSegments | None = None
) -> tuple[SplitRequest, list[bytes]]:
    """`split_with` a loader of its own that fetches nothing."""
    async with media_loader(media_urls=False) as loader:
        return await split_with(loader, call, namespace, videos)


def kept_bytes(spool: MediaSpool) -> int:
    return spool.memory_bytes + spool.disk_bytes
