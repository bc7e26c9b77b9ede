"""Reads an HTTP response into the spool; checks status, type, size, encoding and first bytes."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator

import aiohttp

from triptych.base.config import format_size
from triptych.proxy.media.source import IMAGE_TYPES, MAGIC_BYTES, image_format
from triptych.proxy.media.spool import MediaSpool, SpooledMedia

_CHUNK = 256 << 10
#: Accepted content types of responses; the first bytes decide, but HTML pages are refused unread.
_TYPES = IMAGE_TYPES | {
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
    """`words` complete "the image's server …"; `result` names the outcome in metrics, `cause` in the log."""

    def __init__(self, result: str, words: str, *, retryable: bool = False, cause: str = "") -> None:
        super().__init__(words)
        self.result = result
        self.words = words
        self.retryable = retryable
        self.cause = cause


class MediaTooLarge(FetchFailed):
    """The body is larger than an image may be."""

    def __init__(self, limit: int) -> None:
        super().__init__("too_large", f"sent more than {format_size(limit)}")


def check_head(response: aiohttp.ClientResponse, max_bytes: int) -> None:
    """FetchFailed for a response that is not an acceptable image by its head."""
    status = response.status
    if status != 200:
        retryable = status >= 500 or status in _RETRYABLE
        raise FetchFailed("status", f"answered with status {status}", retryable=retryable)
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind not in _TYPES:
        raise FetchFailed("type", "sent a content type that is no picture's")
    if (response.content_length or 0) > max_bytes:
        raise MediaTooLarge(max_bytes)


async def keep_body(response: aiohttp.ClientResponse, spool: MediaSpool, max_bytes: int) -> SpooledMedia:
    """The decoded body in the spool. FetchFailed when it is too large, empty or not an image."""
    writer = spool.writer()
    try:
        head = b""
        async for piece in _decoded(response, max_bytes):
            if writer.nbytes + len(piece) > max_bytes:
                raise MediaTooLarge(max_bytes)
            if len(head) < MAGIC_BYTES:
                head += piece[:MAGIC_BYTES]
                if len(head) >= MAGIC_BYTES:
                    _check_format(head)
            await writer.write(piece)
        _check_format(head)
        return await writer.finish()
    except BaseException:
        writer.abandon()
        raise


def _check_format(head: bytes) -> None:
    if image_format(head) is None:
        raise FetchFailed("type", "sent no PNG, JPEG, WebP, GIF or BMP file")


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
