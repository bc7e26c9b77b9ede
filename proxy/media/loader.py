"""Loader of media: of data URLs, of URLs that it fetches, and of files below a folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pybase64

from triptych.base.config import ProxyConfig, format_size
from triptych.base.errors import ConfigError, InvalidRequest, TooLarge
from triptych.base.metrics import ProxyMetrics
from triptych.proxy.media.connection import MediaConnections, parse_rules
from triptych.proxy.media.fetcher import FetchLimits, MediaFetcher
from triptych.proxy.media.source import (
    MAGIC_BYTES,
    AudioPart,
    FileUrl,
    ImagePart,
    ItemPart,
    LiftedFile,
    MediaKind,
    VideoPart,
    WebUrl,
)
from triptych.proxy.media.spool import MediaHold, MediaSpool, SpooledMedia
from triptych.proxy.quotas.table import QuotaTable, quota_specs


def checked_folder(folder: str) -> str:
    """The folder's real path; empty stays empty. ConfigError when it is not a folder that may be served."""
    if not folder:
        return ""
    real = os.path.realpath(folder)
    if not os.path.isdir(real) or real == "/":
        raise ConfigError(f"--allowed-media-folder {folder!r} is no folder to serve: name another, not /")
    return real


class MediaFolder:
    """The files below `folder` (a real path; empty: none), of at most `max_bytes` each."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder = checked_folder(folder)
        self._max_bytes = max_bytes

    def read(self, path: str, param: str) -> bytes:
        """The regular file's bytes. Blocks: call it in a thread.

        InvalidRequest with one message for all files that may not or cannot be read, so that clients learn
        nothing about files outside the folder.
        """
        if not self._folder:
            raise InvalidRequest(
                f"{param}: file: URLs are not served here (--allowed-media-folder): send a data: URL",
                param=param,
            )
        refusal = InvalidRequest(f"{param}: no such file below the folder that is served", param=param)
        try:
            real = os.path.realpath(path)
            if not Path(real).is_relative_to(self._folder):
                raise refusal
            # NOFOLLOW: the last part may be a link by now. NONBLOCK: a pipe would wait for a writer.
            descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            raise refusal from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not self._holds(descriptor):
                raise refusal
            data = _read(descriptor, self._max_bytes + 1)
        except OSError:
            raise refusal from None
        finally:
            os.close(descriptor)
        if len(data) > self._max_bytes:
            raise TooLarge(f"{param}: the file is above {format_size(self._max_bytes)}", param=param)
        return data

    def _holds(self, descriptor: int) -> bool:
        """Whether the opened file lies below the folder: a part of the path may be a link by now."""
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(self._folder)


def _read(descriptor: int, limit: int) -> bytes:
    pieces: list[bytes] = []
    while limit and (piece := os.read(descriptor, min(limit, 1 << 20))):
        pieces.append(piece)
        limit -= len(piece)
    return b"".join(pieces)


_NAMES = {ImagePart: "the picture", VideoPart: "the video", AudioPart: "the audio file"}
#: Largest item that encoder workers accept.
LARGEST_MEDIA = 64 << 20
#: The longest line of base64 that is broken into lines, and the text that is joined at once.
_LINE_BYTES = 256
_PIECE = 1 << 20


class MediaLoader:
    """The loader of one proxy's media. Without a `fetcher` http(s) URLs are refused."""

    def __init__(
        self, spool: MediaSpool, folder: MediaFolder, fetcher: MediaFetcher | None, max_bytes: int
    ) -> None:
        self.spool = spool
        self._folder = folder
        self._fetcher = fetcher
        self._max_bytes = max_bytes

    @property
    def full(self) -> bool:
        """Whether the media of the requests in flight fill their budget."""
        return self.spool.full

    @property
    def held_bytes(self) -> int:
        """Bytes of all media in memory and on disk."""
        return self.spool.memory_bytes + self.spool.disk_bytes

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
        self.spool.close()

    async def load(self, part: ItemPart, hold: MediaHold) -> SpooledMedia:
        """The part's bytes, which `hold` keeps. InvalidRequest or TooLarge names the part's field."""
        source = part.source
        # Two parts may name one URL; inline content is each part's own.
        key = (type(part), source) if isinstance(source, WebUrl | FileUrl) else id(part)
        return await hold.get(key, partial(self._load, part, hold))

    async def keep_text(self, text: object, encoded: Callable[[], bytes], hold: MediaHold) -> SpooledMedia:
        """The bytes of a text item, made by `encoded` once per request and `text`."""
        return await hold.get(id(text), lambda: self.spool.keep(encoded()))

    async def _load(self, part: ItemPart, hold: MediaHold) -> SpooledMedia:
        kind = part.kind
        async with hold.load_slots:
            match part.source:
                case WebUrl() as url:
                    return await self._fetch(url, part.param, kind)
                case FileUrl(path):
                    return await self._read(path, part.param, kind)
                case content:
                    return await self._decode(content, part, hold)

    async def _fetch(self, source: WebUrl, param: str, kind: MediaKind) -> SpooledMedia:
        if self._fetcher is None:
            raise InvalidRequest(
                f"{param}: this server does not fetch URLs; send the {kind.noun} as a data: URL", param=param
            )
        return await self._fetcher.fetch(source, param, kind)

    async def _read(self, path: str, param: str, kind: MediaKind) -> SpooledMedia:
        data = await self.spool.in_thread(lambda: self._folder.read(path, param))
        if kind.format_of(data[:MAGIC_BYTES]) is None:
            raise InvalidRequest(f"{param}: no {kind.formats} file", param=param)
        return await self.spool.keep(data)

    async def _decode(
        self, source: str | memoryview | bytes | LiftedFile, part: ItemPart, hold: MediaHold
    ) -> SpooledMedia:
        """Decodes an inline `source`, whose own bytes count too, since the request keeps them."""
        what = f"{part.param}: {_NAMES[type(part)]}"
        hold.count(self.spool, len(source))
        content: bytes | memoryview
        match source:
            case LiftedFile(view):
                content = view
            case bytes():
                content = source
            case text:
                content = await self.spool.in_thread(lambda: decode_base64(text, part.param))
        if not content:
            raise InvalidRequest(f"{what} is empty", param=part.param)
        if len(content) > self._max_bytes:
            raise TooLarge(f"{what} is above {format_size(self._max_bytes)}", param=part.param)
        return await self.spool.keep(content)


def make_loader(config: ProxyConfig, metrics: ProxyMetrics, quotas: QuotaTable | None = None) -> MediaLoader:
    """The loader that the flags configure. ConfigError for invalid flags."""
    if not 0 < config.max_media_bytes <= LARGEST_MEDIA:
        raise ConfigError(f"--max-media-bytes must be above 0 and at most {format_size(LARGEST_MEDIA)}")
    if config.media_timeout <= 0 or config.media_fetches < 1:
        raise ConfigError("--media-timeout must be above 0 and --media-fetches at least 1")
    rules = parse_rules(config.allow_media_hosts, config.allow_media_networks)
    folder = MediaFolder(config.allowed_media_folder, config.max_media_bytes)
    quotas = quotas or QuotaTable(quota_specs(config))
    spool = MediaSpool(metrics, quotas, folder=config.spool_folder)
    fetcher = None
    if config.media_urls:
        limits = FetchLimits(config.max_media_bytes, config.media_timeout)
        connections = MediaConnections(rules, quotas["look-ups"])
        fetcher = MediaFetcher(connections, spool, metrics, limits, quotas["fetches"])
    return MediaLoader(spool, folder, fetcher, config.max_media_bytes)


def decode_base64(text: str | memoryview, param: str) -> bytes:
    """The bytes of base64, in one line or in many; InvalidRequest names `param`."""
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError as error:
        if "\n" in (start := _text(text[:_LINE_BYTES])):
            return decode_base64(_one_line(text), param)
        url_safe = "-" in start or "_" in start
        advice = ": the URL-safe alphabet is not read, send + and / in place of - and _" if url_safe else ""
        raise InvalidRequest(f"{param}: bad base64 content: {error}{advice}", param=param) from None


def _text(text: str | memoryview) -> str:
    return text if isinstance(text, str) else bytes(text).decode("ascii", "replace")


def _one_line(text: str | memoryview) -> str:
    """The text without line breaks, which base64(1) and MIME put after 76 characters."""
    # A piece at a time: others have the interpreter's lock in between.
    pieces = (_text(text[at : at + _PIECE]) for at in range(0, len(text), _PIECE))
    return "".join(piece.replace("\n", "").replace("\r", "") for piece in pieces)
