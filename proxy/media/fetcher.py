"""Fetches images over HTTP: redirects, each checked, and retries, within one timeout."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import aiohttp
from yarl import URL

from triptych.base.config import format_size
from triptych.base.errors import RETRY_AFTER, InvalidRequest, TooLarge, Unavailable
from triptych.base.metrics import ProxyMetrics
from triptych.proxy.http.refusals import PeriodicLog
from triptych.proxy.media.connection import AddressRefused, MediaConnections, NameUnanswered
from triptych.proxy.media.source import IMAGES, MAGIC_BYTES, MediaKind, WebUrl, parse_web_url
from triptych.proxy.media.spool import MediaSpool, SpooledMedia
from triptych.proxy.quotas.current_call import current_call
from triptych.proxy.quotas.quota import Quota

_CHUNK = 256 << 10
#: Accepted content types of responses; the first bytes decide, but HTML pages are refused unread.
_TYPES = {
    "",
    "application/octet-stream",
    "binary/octet-stream",
    "image/apng",
    "image/pjpeg",
    "image/x-bmp",
    "image/x-ms-bmp",
    "image/x-png",
}
_RETRYABLE = frozenset({408, 425, 429})


class FetchFailed(Exception):
    """`message` completes "the image's server …"; `result` is for metrics, `cause` for the log."""

    def __init__(self, result: str, message: str, *, retryable: bool = False, cause: str = "") -> None:
        super().__init__(message)
        self.result = result
        self.message = message
        self.retryable = retryable
        self.cause = cause


class MediaTooLarge(FetchFailed):
    """The body is larger than an image may be."""

    def __init__(self, limit: int) -> None:
        super().__init__("too_large", f"sent more than {format_size(limit)}")


def check_head(response: aiohttp.ClientResponse, max_bytes: int, media: MediaKind = IMAGES) -> None:
    """FetchFailed for a response that is not an acceptable file of this kind by its head."""
    status = response.status
    if status != 200:
        retryable = status >= 500 or status in _RETRYABLE
        raise FetchFailed("status", f"answered with status {status}", retryable=retryable)
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind not in _TYPES | media.types:
        owner = "picture" if media is IMAGES else media.noun
        raise FetchFailed("type", f"sent a content type that is no {owner}'s")
    if (response.content_length or 0) > max_bytes:
        raise MediaTooLarge(max_bytes)


async def keep_body(
    response: aiohttp.ClientResponse, spool: MediaSpool, max_bytes: int, media: MediaKind = IMAGES
) -> SpooledMedia:
    """The decoded body in the spool. FetchFailed when it is too large, empty or of another kind."""
    writer = spool.writer()
    try:
        head = b""
        async for piece in _decoded(response, max_bytes):
            if writer.nbytes + len(piece) > max_bytes:
                raise MediaTooLarge(max_bytes)
            if len(head) < MAGIC_BYTES:
                head += piece[:MAGIC_BYTES]
                if len(head) >= MAGIC_BYTES:
                    _check_format(head, media)
            await writer.write(piece)
        _check_format(head, media)
        return await writer.finish()
    except BaseException:
        writer.abandon()
        raise


def _check_format(head: bytes, media: MediaKind) -> None:
    if media.format_of(head) is None:
        raise FetchFailed("type", f"sent no {media.formats} file")


async def _decoded(response: aiohttp.ClientResponse, max_bytes: int) -> AsyncIterator[bytes]:
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding in ("", "identity"):
        async for chunk in response.content.iter_chunked(_CHUNK):
            yield chunk
        return
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise FetchFailed("type", "sent an unsupported content encoding: only gzip and deflate are supported")
    inflater = Inflater()
    received = 0
    async for chunk in response.content.iter_chunked(_CHUNK):
        received += len(chunk)
        if received > max_bytes:
            raise MediaTooLarge(max_bytes)
        for piece in inflater.pieces(chunk):
            yield piece
            await asyncio.sleep(0)  # lets other tasks run between the pieces of a decompression bomb
    if not inflater.complete:
        raise FetchFailed("type", "sent a damaged body")


class Inflater:
    """A decompressor of gzip and zlib data with output of bounded size."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)

    @property
    def complete(self) -> bool:
        return self._inflate.eof

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """The decompressed `data`, at most 256 KiB at a time. FetchFailed when it is damaged."""
        while data and not self._inflate.eof:
            try:
                piece = self._inflate.decompress(data, _CHUNK)
            except zlib.error:
                raise FetchFailed("type", "sent a damaged body") from None
            data = self._inflate.unconsumed_tail
            if piece:
                yield piece


logger = logging.getLogger(__name__)

MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
MAX_TRIES = 3
FIRST_BACKOFF = 0.25
#: One message for hosts without an address and with a forbidden one, so that clients cannot probe the
#: operator's network with it.
REFUSED = "has no public address: send the file in a data: URL"


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits: bytes of one image, seconds of one fetch."""

    max_bytes: int = 64 << 20
    timeout: float = 30.0


class MediaFetcher:
    """The HTTP client of one proxy for media."""

    def __init__(
        self,
        connections: MediaConnections,
        spool: MediaSpool,
        metrics: ProxyMetrics,
        limits: FetchLimits,
        places: Quota,
    ) -> None:
        self._connections = connections
        self._spool = spool
        self._metrics = metrics
        self._limits = limits
        self._log = PeriodicLog(logger)
        self._places = places

    def close(self) -> None:
        self._connections.close()

    async def fetch(self, source: WebUrl, param: str, kind: MediaKind = IMAGES) -> SpooledMedia:
        """The image or video, with the caller as its holder.

        InvalidRequest or TooLarge (naming `param`), Overloaded; Unavailable where no name server answers.

        The timeout does not include the wait for other fetches to end.
        """
        with await self._places.wait(current_call().holder, 1):
            started = time.monotonic()
            result, cause = "given_up", str(source.url.raw_host)
            try:
                async with asyncio.timeout(self._limits.timeout):
                    media = await self._with_retries(source.url, kind)
                result = "ok"
                self._metrics.media_fetched_bytes.inc(media.nbytes)
                return media
            except TimeoutError:
                result = "timeout"
                message = f"did not send it within {self._limits.timeout:g} s"
                raise InvalidRequest(f"{param}: the {kind.noun}'s server {message}", param=param) from None
            except NameUnanswered:
                result = "unanswered"
                message = f"{param}: no name server answers for the {kind.noun}'s server; try again later"
                raise Unavailable(message, param=param, retry_after=RETRY_AFTER) from None
            except FetchFailed as error:
                result, cause = error.result, error.cause or cause
                refusal = TooLarge if isinstance(error, MediaTooLarge) else InvalidRequest
                raise refusal(f"{param}: the {kind.noun}'s server {error.message}", param=param) from None
            finally:
                self._metrics.media_fetch_seconds.observe(time.monotonic() - started)
                self._metrics.media_fetches.labels(result).inc()
                if result != "ok":
                    # It is for the operator to change; the rest is the client's or the origin's.
                    level = logging.WARNING if result == "refused" else logging.INFO
                    self._log.add(f"media by URL {result}", cause, level)

    async def _with_retries(self, url: URL, kind: MediaKind) -> SpooledMedia:
        backoff = FIRST_BACKOFF
        for _ in range(MAX_TRIES - 1):
            try:
                return await self._follow(url, kind)
            except FetchFailed as error:
                if not error.retryable:
                    raise
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
            backoff *= 3
        return await self._follow(url, kind)

    async def _follow(self, url: URL, kind: MediaKind) -> SpooledMedia:
        """Follows redirects to the image; every hop is checked like the first URL."""
        for _ in range(MAX_REDIRECTS + 1):
            step = await self._hop(url, kind)
            if isinstance(step, SpooledMedia):
                return step
            url = step
        raise FetchFailed("redirects", f"redirects more than {MAX_REDIRECTS} times")

    async def _hop(self, url: URL, kind: MediaKind) -> SpooledMedia | URL:
        try:
            async with self._connections.get(url) as response:
                if response.status in _REDIRECTS:
                    return _redirected(url, response.headers.get("Location", ""))
                check_head(response, self._limits.max_bytes, kind)
                return await keep_body(response, self._spool, self._limits.max_bytes, kind)
        except AddressRefused as error:
            raise FetchFailed("refused", REFUSED, cause=f"{url.raw_host}: {error}") from None
        except aiohttp.ClientSSLError:
            raise FetchFailed("unreachable", "has no trusted certificate") from None
        except (aiohttp.ServerTimeoutError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            raise FetchFailed("unreachable", "could not be reached or broke off", retryable=True) from None
        except (aiohttp.ClientError, aiohttp.http_exceptions.HttpProcessingError, ValueError):
            raise FetchFailed("unreachable", "sent an invalid HTTP response") from None


def _redirected(url: URL, location: str) -> URL:
    """The target of a redirect; FetchFailed for a URL that clients may not send, or from https to http."""
    refused = FetchFailed("redirects", "redirects to an address that is not followed")
    if not location or any(ord(char) <= 0x20 or char in "\\\x7f" for char in location):
        raise refused
    try:
        whole = location if _ABSOLUTE.match(location) else str(url.join(URL(location)))
        target = parse_web_url(whole, "redirect")
    except (InvalidRequest, ValueError, IndexError):
        raise refused from None
    if url.scheme == "https" and target.scheme == "http":
        raise refused
    return target
