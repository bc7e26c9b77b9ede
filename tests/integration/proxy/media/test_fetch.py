"""Fetches by URL: where they go, and what comes back."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.data.media import content, kept_bytes
from support.processes.web import PNG, WebServer, client_tls, redirect, reply, server_tls
from triptych.base.config import ProxyConfig
from triptych.base.errors import InvalidRequest, RequestError, TooLarge, Unavailable
from triptych.base.metrics import ProxyMetrics
from triptych.proxy.media.connection import LookUpHost, MediaConnections, look_up_host, parse_rules
from triptych.proxy.media.fetcher import FetchLimits, MediaFetcher
from triptych.proxy.media.source import IMAGES, VIDEOS, ImagePart, MediaKind, WebUrl
from triptych.proxy.media.spool import MediaSpool
from triptych.proxy.quotas.table import QuotaTable, quota_specs

LOOPBACK = "127.0.0.0/8"

NOT_PUBLIC = "field: the image's server has no public address: send the file in a data: URL"


LARGE = PNG + bytes(3 << 20)


class Names:
    """A resolver with answers in order, the last one repeated; it notes what it was asked."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        addresses = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [
            (socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port))
            for a in addresses
        ]


class Fetching:
    """A fetcher with a spool of its own."""

    def __init__(
        self,
        *,
        networks: str = LOOPBACK,
        hosts: str = "",
        names: LookUpHost = look_up_host,
        tls: ssl.SSLContext | bool = True,
        memory: int = 1 << 30,
        disk: int = 1 << 30,
        **limits: Any,
    ) -> None:
        self.metrics = ProxyMetrics()
        at_once = limits.pop("at_once", 64)
        config = ProxyConfig(media_memory=memory, media_disk=disk, media_fetches=at_once)
        self.quotas = QuotaTable(quota_specs(config))
        self.spool = MediaSpool(self.metrics, self.quotas)
        rules = parse_rules(hosts, networks)
        connections = MediaConnections(rules, self.quotas["look-ups"], look_up=names, tls=tls)
        places = self.quotas["fetches"]
        self.fetcher = MediaFetcher(connections, self.spool, self.metrics, FetchLimits(**limits), places)

    async def get(self, url: str, kind: MediaKind = IMAGES) -> bytes:
        source = ImagePart.of_url(url, "field").source
        assert isinstance(source, WebUrl)
        media = await self.fetcher.fetch(source, "field", kind)
        try:
            return await content(media)
        finally:
            media.release()

    def count(self, result: str) -> float:
        value = self.metrics.registry.get_sample_value("triptych_media_fetches_total", {"result": result})
        return value or 0.0


@asynccontextmanager
async def fetching(**options: Any) -> AsyncIterator[Fetching]:
    """Afterwards nothing may be left in the spool."""
    it = Fetching(**options)
    try:
        yield it
        assert kept_bytes(it.spool) == 0
    finally:
        it.fetcher.close()
        it.spool.close()


@pytest.fixture
async def it() -> AsyncIterator[Fetching]:
    async with fetching() as it:
        yield it


async def refusal(it: Fetching, url: str, kind: MediaKind = IMAGES) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await it.get(url, kind)
    assert caught.value.param == "field"
    assert caught.value.message.startswith("field: ")
    return caught.value


async def test_a_picture_is_fetched_small_and_large(it: Fetching, web: WebServer) -> None:
    assert await it.get(web.give("/a.png", reply())) == PNG
    assert await it.get(web.give("/b.png", reply(LARGE))) == LARGE
    assert it.count("ok") == 2
    fetched = it.metrics.registry.get_sample_value("triptych_media_fetched_bytes_total")
    assert fetched == len(PNG) + len(LARGE)
    assert it.metrics.registry.get_sample_value("triptych_media_fetch_seconds_count") == 2


async def test_a_video_is_fetched_as_one_and_nothing_else_is(it: Fetching, web: WebServer) -> None:
    clip = b"\0\0\0\x20ftypisom" + bytes(100)
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


async def test_a_body_shorter_than_announced_is_no_picture(it: Fetching, web: WebServer) -> None:
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
async def test_other_content_encodings_are_refused(it: Fetching, web: WebServer, encoding: str) -> None:
    error = await refusal(it, web.give("/a", reply(content_encoding=encoding)))
    assert "only gzip and deflate" in error.message


@pytest.mark.parametrize(
    "kind", ["text/html", "image/svg+xml", "application/json", "video/mp4", "image/tiff"]
)
async def test_a_wrong_content_type_is_refused_before_the_body_is_read(it, web, kind):
    error = await refusal(it, web.give("/a", reply(content_type=kind, content_length="99999999")))
    assert "content type" in error.message


@pytest.mark.parametrize("kind", ["", "application/octet-stream", "IMAGE/PNG; charset=x", "image/x-png"])
async def test_with_a_generic_content_type_the_first_bytes_decide(it, web, kind):
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


async def test_a_cancelled_fetch_leaves_nothing_in_the_spool(it: Fetching, web: WebServer) -> None:
    begun = asyncio.Event()

    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write(reply(LARGE, content_length=str(2 * len(LARGE))))
        await writer.drain()
        begun.set()
        await asyncio.sleep(3600)

    task = asyncio.create_task(it.get(web.give("/a", half)))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_request_carries_neither_cookies_nor_credentials_nor_a_proxys_words(web, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    web.give("/b", reply())
    async with fetching() as it:
        url = web.give("/a", reply(b"", 302, location="/b", set_cookie="a=b"))
        assert await it.get(url) == PNG
    for head in web.heads:
        names = {line.split(b":")[0].lower() for line in head.split(b"\r\n")[1:] if line}
        assert names == {b"host", b"accept", b"accept-encoding", b"user-agent", b"connection"}


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{}/", "http://[::1]:{}/", "http://localhost:{}/", "http://127.1.2.3:{}/"]
)
async def test_a_server_at_an_address_that_is_not_public_is_never_asked(web: WebServer, url: str) -> None:
    async with fetching(networks="") as it:
        error = await refusal(it, url.format(web.port))
        assert error.status == 400
        assert it.count("refused") == 1
    assert web.asked == []


@pytest.mark.parametrize(
    "answers",
    [
        ["169.254.169.254"],
        ["10.0.0.1"],
        ["::ffff:127.0.0.1"],
        ["64:ff9b::7f00:1"],
        ["fd00:ec2::254"],
        ["93.184.216.34", "127.0.0.1"],
        ["2606:4700::1111", "::1"],
        [],
    ],
)
async def test_refused_addresses_and_unknown_names_get_the_same_message(answers: list[str]) -> None:
    async with fetching(networks="", names=Names(answers)) as it:
        error = await refusal(it, "http://some.example/")
        assert error.message == NOT_PUBLIC


@pytest.mark.parametrize(
    ("answers", "cause"),
    [
        ([], "some.example: its name does not resolve: [Errno -2] Name or service not known"),
        (["10.0.0.1"], "some.example: 10.0.0.1 is not public: --allow-media-hosts, --allow-media-networks"),
    ],
)
async def test_why_a_host_is_refused_is_for_the_operators_log_alone_and_once_a_minute(answers, cause, caplog):
    async with fetching(networks="", names=Names(answers)) as it:
        with caplog.at_level(logging.INFO, logger="triptych.proxy.media.fetcher"):
            for _ in range(20):
                error = await refusal(it, "http://some.example/")
                assert error.message == NOT_PUBLIC
                assert error.__cause__ is None
    assert caplog.messages == [f"media by URL refused: {cause}"]


async def test_a_name_that_changes_its_address_is_reached_only_where_it_was_checked(web: WebServer) -> None:
    """DNS rebinding: the second answer would be the victim; nobody asks for it."""
    names = Names(["127.0.0.1"], ["127.0.0.2"])
    async with fetching(networks="127.0.0.1/32", names=names) as it:
        web.give("/a", reply())
        assert await it.get(web.url("/a", "rebind.example")) == PNG
        assert names.asked == ["rebind.example"]
        assert b"Host: rebind.example:" in web.heads[0]
        error = await refusal(it, web.url("/a", "rebind.example"))
        assert "no public address" in error.message
    assert web.asked == ["/a"]


async def test_a_trusted_host_may_have_any_address_and_another_host_there_may_not(web: WebServer) -> None:
    async with fetching(networks="", hosts="minio.internal", names=Names(["127.0.0.1"])) as it:
        web.give("/a", reply())
        assert await it.get(web.url("/a", "minio.internal")) == PNG
        assert (await refusal(it, web.url("/a", "other.internal"))).status == 400


async def test_a_port_of_another_service_is_refused_as_an_address_is() -> None:
    async with fetching(networks="", names=Names(["93.184.216.34"])) as it:
        for port in (22, 25, 445, 1023):
            error = await refusal(it, f"http://some.example:{port}/")
            assert error.message == NOT_PUBLIC


async def test_redirects_are_followed_up_to_the_limit(it: Fetching, web: WebServer) -> None:
    web.give("/0", reply())
    for step in range(1, 7):
        web.give(f"/{step}", redirect(f"/{step - 1}"))
    assert await it.get(web.url("/5")) == PNG
    assert "redirects more than 5 times" in (await refusal(it, web.url("/6"))).message
    assert it.count("redirects") == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_every_kind_of_redirect_is_checked_again(web: WebServer, status: int) -> None:
    names = Names(["127.0.0.1"], ["127.0.0.2"])
    async with fetching(networks="127.0.0.1/32", names=names) as it:
        web.give("/victim", reply())
        web.give("/a", redirect(web.url("/victim", "inside.example"), status))
        error = await refusal(it, web.url("/a", "outside.example"))
        assert error.message == NOT_PUBLIC
    assert web.asked == ["/a"]


@pytest.mark.parametrize(
    "target", ["http://169.254.169.254/latest/meta-data/", "http://[::ffff:127.0.0.2]/", "http://127.0.0.2/"]
)
async def test_a_redirect_into_the_operators_network_is_refused(web: WebServer, target: str) -> None:
    async with fetching(networks="127.0.0.1/32") as it:
        error = await refusal(it, web.give("/a", redirect(target)))
        assert "no public address" in error.message


@pytest.mark.parametrize(
    "target",
    [
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
        "ftp://127.0.0.1/",
        "data:image/png;base64,AAAA",
        "javascript:alert(1)",
        "http://user@127.0.0.1/",
        "//user:pw@127.0.0.1/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http:\\\\127.0.0.1\\",
        "http://127.0.0.1/a\x00b",
        "http:///",
        "",
    ],
)
async def test_a_redirect_to_another_scheme_or_in_odd_spelling_is_not_followed(web, target):
    async with fetching() as it:
        error = await refusal(it, web.give("/a", redirect(target)))
        assert error.status == 400
        assert "passwd" not in error.message
    assert web.asked == ["/a"]


async def test_https_asks_for_the_hosts_own_certificate_at_the_pinned_address() -> None:
    seen: list[str | None] = []
    context = server_tls()
    context.sni_callback = lambda connection, name, _: seen.append(name)  # type: ignore[assignment]
    async with WebServer(context) as web:
        web.give("/a", reply())
        names = Names(["127.0.0.1"])
        async with fetching(names=names, tls=client_tls()) as it:
            assert await it.get(web.url("/a", "pictures.example")) == PNG
            error = await refusal(it, web.url("/a", "other.example"))
            assert "no trusted certificate" in error.message
        async with fetching(names=names) as it:
            error = await refusal(it, web.url("/a", "pictures.example"))
            assert "no trusted certificate" in error.message
        assert seen == ["pictures.example", "other.example", "pictures.example"]
        assert web.asked == ["/a"]


async def test_https_does_not_go_on_to_http(web: WebServer) -> None:
    async with WebServer(server_tls()) as secure:
        secure.give("/a", redirect(web.give("/b", reply())))
        async with fetching(names=Names(["127.0.0.1"]), tls=client_tls()) as it:
            error = await refusal(it, secure.url("/a", "pictures.example"))
            assert "not followed" in error.message
        assert (secure.asked, web.asked) == (["/a"], [])


@pytest.mark.parametrize(
    ("code", "kind"),
    [(socket.EAI_AGAIN, Unavailable), (socket.EAI_NONAME, InvalidRequest)],
    ids=["busy", "none"],
)
async def test_only_an_answer_that_there_is_no_such_name_blames_the_url(code, kind):
    def look_up(host, port):
        raise socket.gaierror(code, "no address")

    async with fetching(names=look_up) as it:
        with pytest.raises(kind, match="field: "):
            await it.get("http://some.test/")
