"""Images by URL from a real server: bodies, content types, retries and limits."""

from __future__ import annotations

import asyncio
import gzip
import zlib

import pytest

from support.processes.media_fetches import LARGE, fetching, refusal
from support.processes.web import PNG, WebServer, reply
from triptych.base.errors import TooLarge
from triptych.proxy.media.source import VIDEOS


async def test_a_picture_is_fetched_small_and_large(web: WebServer) -> None:
    async with fetching() as it:
        assert await it.get(web.give("/a.png", reply())) == PNG
        assert await it.get(web.give("/b.png", reply(LARGE))) == LARGE
        assert it.count("ok") == 2
        fetched = it.metrics.registry.get_sample_value("triptych_media_fetched_bytes_total")
        assert fetched == len(PNG) + len(LARGE)
        assert it.metrics.registry.get_sample_value("triptych_media_fetch_seconds_count") == 2


async def test_a_video_is_fetched_as_one_and_nothing_else_is(web: WebServer) -> None:
    clip = b"\0\0\0\x20ftypisom" + bytes(100)
    async with fetching() as it:
        for kind in ("video/mp4", "application/octet-stream"):
            assert await it.get(web.give(f"/{kind}", reply(clip, content_type=kind)), VIDEOS) == clip
        error = await refusal(it, web.give("/page", reply(clip, content_type="text/html")), VIDEOS)
        assert "the video's server sent a content type that is no video's" in error.message
        error = await refusal(it, web.give("/a.png", reply(content_type="video/mp4")), VIDEOS)
        assert "sent no MP4, MOV, WebM or GIF file" in error.message
        error = await refusal(it, web.give("/a.mp4", reply(clip, content_type="video/mp4")))
        assert "no picture's" in error.message


async def test_a_5xx_is_tried_again_and_a_4xx_is_not(web: WebServer) -> None:
    async with fetching() as it:
        assert await it.get(web.give("/a", reply(b"", 503), reply(b"", 500), reply())) == PNG
        error = await refusal(it, web.give("/b", reply(b"secret words", 403), reply()))
        assert "status 403" in error.message
        assert "secret" not in error.message
        error = await refusal(it, web.give("/c", reply(b"", 502)))
        assert (error.status, "status 502" in error.message) == (400, True)
    assert web.asked == ["/a", "/a", "/a", "/b", "/c", "/c", "/c"]


async def test_a_body_shorter_than_announced_is_no_picture(web: WebServer) -> None:
    async with fetching() as it:
        error = await refusal(it, web.give("/a", reply(LARGE, content_length=str(len(LARGE) + 1))))
        assert "broke off" in error.message


async def test_bytes_above_the_limit_are_refused_announced_or_not(web: WebServer) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n" % len(PNG) + PNG + b"\r\n")
        while True:
            writer.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
            await writer.drain()

    async with fetching(max_bytes=2 << 20) as it:
        for url in (web.give("/a", endless), web.give("/b", reply(LARGE))):
            error = await refusal(it, url)
            assert isinstance(error, TooLarge)
            assert "2.0 MiB" in error.message
        assert it.count("too_large") == 2


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "x-gzip"])
async def test_a_compressed_body_is_inflated_up_to_the_limit(web: WebServer, encoding: str) -> None:
    squeeze = gzip.compress if "gzip" in encoding else zlib.compress
    bomb = squeeze(PNG + bytes(60 << 20))
    async with fetching(max_bytes=4 << 20) as it:
        url = web.give("/a", reply(squeeze(LARGE), content_encoding=encoding))
        assert await it.get(url) == LARGE
        error = await refusal(it, web.give("/bomb", reply(bomb, content_encoding=encoding)))
        assert isinstance(error, TooLarge)
        cut = reply(squeeze(LARGE)[:-4], content_encoding=encoding)
        assert "damaged" in (await refusal(it, web.give("/cut", cut))).message
        noise = reply(b"no gzip", content_encoding=encoding)
        assert "damaged" in (await refusal(it, web.give("/noise", noise))).message


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress"])
async def test_other_content_encodings_are_refused(web: WebServer, encoding: str) -> None:
    async with fetching() as it:
        error = await refusal(it, web.give("/a", reply(content_encoding=encoding)))
        assert "only gzip and deflate" in error.message


@pytest.mark.parametrize(
    "kind", ["text/html", "image/svg+xml", "application/json", "video/mp4", "image/tiff"]
)
async def test_a_wrong_content_type_is_refused_before_the_body_is_read(web: WebServer, kind: str) -> None:
    async with fetching() as it:
        error = await refusal(it, web.give("/a", reply(content_type=kind, content_length="99999999")))
        assert "content type" in error.message


@pytest.mark.parametrize("kind", ["", "application/octet-stream", "IMAGE/PNG; charset=x", "image/x-png"])
async def test_with_a_generic_content_type_the_first_bytes_decide(web: WebServer, kind: str) -> None:
    async with fetching() as it:
        assert await it.get(web.give("/a", reply(content_type=kind))) == PNG
        error = await refusal(it, web.give("/b", reply(b"<svg/>" * 20, content_type=kind)))
        assert "no PNG, JPEG" in error.message


async def test_a_slow_or_silent_server_ends_at_the_fetchs_timeout(web: WebServer) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 9999\r\n\r\n" + PNG)
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    async with fetching(timeout=0.3) as it:
        for url in (web.give("/a", drip), web.give("/b", silent)):
            error = await refusal(it, url)
            assert (error.status, "within 0.3 s" in error.message) == (400, True)
        assert it.count("timeout") == 2


async def test_a_cancelled_fetch_leaves_nothing_in_the_spool(web: WebServer) -> None:
    begun = asyncio.Event()

    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write(reply(LARGE, content_length=str(2 * len(LARGE))))
        await writer.drain()
        begun.set()
        await asyncio.sleep(3600)

    async with fetching() as it:
        task = asyncio.create_task(it.get(web.give("/a", half)))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
