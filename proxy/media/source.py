"""Media sources of message parts: data:, http(s): and file: URLs; and the image formats that are accepted."""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, TypeVar
from urllib.parse import unquote_to_bytes

from yarl import URL

from triptych.base.errors import InvalidRequest
from triptych.proxy.media.spool import MediaHold
from triptych.proxy.parsing.lifted import lifted_bytes, lifted_text

#: Longest http(s) or file URL.
MAX_URL = 8192
#: Accepted media types of data: URLs and responses; the file's first bytes are checked in any case.
IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif", "image/bmp"})
VIDEO_TYPES = frozenset({"video/mp4", "video/webm", "video/quicktime", "image/gif"})
_SOUNDS = "wav x-wav wave vnd.wave flac x-flac mpeg mp3 ogg opus webm mp4 m4a x-m4a aac"
AUDIO_TYPES = frozenset({*(f"audio/{name}" for name in _SOUNDS.split()), "video/mp4", "video/webm"})
_DATA_HEAD = 256
#: Characters that are not allowed in URLs: parsers treat them differently.
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\\ud800-\udfff]")
#: Last labels that some resolvers read as a number: 127.1, 0x7f.1, 2130706433, 017700000001.
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)", re.IGNORECASE)
_HOST = re.compile(r"[a-z0-9_.-]{1,254}")
#: What paths of a client's machine begin with, and names of files are.
_PATH = re.compile(r"(~?/|\.{1,2}/|[A-Za-z]:\\)(?!/)|[^/:]{1,128}\.[A-Za-z0-9]{2,4}$")

#: Bytes that `image_format` and `video_format` look at.
MAGIC_BYTES = 32
_MAGIC = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF87a", "gif"), (b"GIF89a", "gif"))


@dataclass(frozen=True, slots=True)
class WebUrl:
    """An http(s) URL as the client wrote it; `url` is parsed and checked."""

    text: str
    url: URL


@dataclass(frozen=True, slots=True)
class FileUrl:
    """A file URL's absolute path."""

    path: str


@dataclass(frozen=True, slots=True)
class MediaKind:
    """What a part's bytes may be: media types of data: URLs and responses, and a look at the first bytes."""

    noun: str
    formats: str
    example: str
    types: frozenset[str]
    format_of: Callable[[bytes], str | None]


def parse_media_url(url: str, param: str, kind: MediaKind) -> str | WebUrl | FileUrl:
    """The base64 text of a data: URL, or the parsed URL. InvalidRequest names `param`."""
    scheme = url[:16].split(":", 1)[0].strip().lower()
    if scheme == "data":
        return _data_content(url, param, kind)
    if scheme in ("http", "https"):
        return WebUrl(url, parse_web_url(url, param))
    if scheme == "file":
        return FileUrl(_file_path(url, param))
    raise InvalidRequest(f"{param} must be a data:, http: or https: URL{_meant(url, kind)}", param=param)


def _meant(text: str, kind: MediaKind) -> str:
    """What a text that is no URL seems to be, and what to send in its place."""
    try:
        head = base64.urlsafe_b64decode(text[: 2 * MAGIC_BYTES].replace("+", "-").replace("/", "_"))
    except ValueError:
        head = b""
    if kind.format_of(head) is not None:
        return f": this is base64, put data:{kind.example};base64, before it"
    if _PATH.match(text[:_DATA_HEAD]):
        return f", not a path: send the file itself as data:{kind.example};base64,…"
    return ""


def _data_content(url: str, param: str, kind: MediaKind) -> str:
    head, comma, _ = url[:_DATA_HEAD].partition(",")
    fields = head[len("data:") :].strip().lower().split(";")
    if not comma or fields[-1] != "base64":
        raise InvalidRequest(f"{param} must read data:{kind.example};base64,…", param=param)
    if fields[0] not in kind.types:
        known = ", ".join(sorted(kind.types))
        raise InvalidRequest(f"{param}: the media type must be one of {known}", param=param)
    return url[len(head) + 1 :]


def parse_web_url(text: str, param: str) -> URL:
    """The parsed http(s) URL; InvalidRequest for one that parsers may read differently.

    User names, and IP addresses in unusual notation, are refused.
    """
    try:
        if len(text) > MAX_URL or _UNSAFE.search(text):
            raise ValueError
        url = URL(text)
        if url.scheme not in ("http", "https") or not url.port or not _plain_authority(text, url):
            raise ValueError
        if not _plain_host(url.raw_host or "", bracketed=text.partition("://")[2].startswith("[")):
            raise ValueError
    except (ValueError, IndexError):  # yarl raises both
        raise InvalidRequest(
            f"{param} must be an http(s) URL of at most {MAX_URL} characters with a plain host and no user",
            param=param,
        ) from None
    return url.with_fragment(None)


def _plain_authority(text: str, url: URL) -> bool:
    """Whether there is no user, and the authority has no '@' or '//' that parsers split differently."""
    authority = re.split(r"[/?#]", text.partition("://")[2], maxsplit=1)[0]
    return "@" not in authority and "%" not in authority and url.user is None and url.password is None


def _plain_host(host: str, *, bracketed: bool) -> bool:
    if bracketed or ":" in host:
        return isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address)
    if not _HOST.fullmatch(host):
        return False
    labels = host.removesuffix(".").split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return str(ipaddress.IPv4Address(host)) == host
    return all(labels)


def _file_path(url: str, param: str) -> str:
    body = url[len("file:") :]
    if body.startswith("//"):
        host, slash, rest = body[2:].partition("/")
        body = slash + rest if host in ("", "localhost") else ""
    path = unquote_to_bytes(body.encode(errors="replace"))
    if not path.startswith(b"/") or b"\x00" in path or len(url) > MAX_URL:
        raise InvalidRequest(f"{param} must read file:///absolute/path", param=param)
    return path.decode(errors="surrogateescape")


def image_format(head: bytes) -> str | None:
    """ "png", "jpeg", "webp", "gif" or "bmp"; None for everything else."""
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    if head[:2] == b"BM" and len(head) >= 14:
        return "bmp"
    return None


def video_format(head: bytes) -> str | None:
    """ "mp4", "webm" or "gif"; None for everything else."""
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mp4"
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "webm"
    return "gif" if image_format(head) == "gif" else None


def audio_format(head: bytes) -> str | None:
    """ "wav", "flac", "ogg", "mp3", "mp4" or "webm"; None for everything else."""
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "wav"
    if head[:4] in (b"fLaC", b"OggS"):
        return "flac" if head[:4] == b"fLaC" else "ogg"
    if head[:3] == b"ID3" or (len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0):
        return "mp3"
    container = video_format(head)
    return None if container == "gif" else container


IMAGES = MediaKind("image", "PNG, JPEG, WebP, GIF or BMP", "image/png", IMAGE_TYPES, image_format)
VIDEOS = MediaKind("video", "MP4, MOV, WebM or GIF", "video/mp4", VIDEO_TYPES, video_format)
AUDIOS = MediaKind("sound", "WAV, FLAC, MP3, Ogg, M4A or WebM", "audio/wav", AUDIO_TYPES, audio_format)


@dataclass(frozen=True, slots=True)
class LiftedFile:
    """A file that is a part of a large message, which nothing has copied."""

    view: memoryview

    def __len__(self) -> int:
        return len(self.view)


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file of a message: base64 text of a data: URL, the file's bytes, or a URL to load.

    A text in a large body is a part of it, which nothing has copied. `param` is the path of its field in the
    request.
    """

    kind: ClassVar[MediaKind]
    source: str | memoryview | bytes | LiftedFile | WebUrl | FileUrl
    param: str

    def __post_init__(self) -> None:
        if isinstance(self.source, str) and (text := lifted_text(self.source)) is not None:
            object.__setattr__(self, "source", text)
        if isinstance(self.source, bytes) and (file := lifted_bytes(self.source)) is not None:
            object.__setattr__(self, "source", LiftedFile(file))

    @classmethod
    def of_url(cls, url: str, param: str) -> Self:
        """The file of a data:, http(s): or file: URL. InvalidRequest names `param`."""
        return cls(parse_media_url(url, param, cls.kind), param)


class ImagePart(FilePart):
    kind = IMAGES


class VideoPart(FilePart):
    kind = VIDEOS


class AudioPart(FilePart):
    kind = AUDIOS


#: A part of a message that becomes an item.
ItemPart = ImagePart | VideoPart | AudioPart

T = TypeVar("T")


class ItemMedia(Protocol):
    """The bytes of one item, kept until the last holder releases them."""

    nbytes: int

    def retain(self) -> ItemMedia: ...
    def release(self) -> None: ...
    def frames(self, size: int) -> AsyncIterator[bytes]: ...
    def view(self) -> AbstractContextManager[bytes | memoryview]:
        """All bytes at once."""

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs `work` on the bytes in a thread."""


class MediaSource(Protocol):
    """The loader of media that requests contain or refer to."""

    @property
    def full(self) -> bool:
        """Whether no memory is left for new media."""

    @property
    def held_bytes(self) -> int: ...

    async def load(self, part: ItemPart, hold: MediaHold) -> ItemMedia:
        """The part's bytes, which `hold` keeps. InvalidRequest or TooLarge names the part's field."""

    async def keep_text(self, text: object, encoded: Callable[[], bytes], hold: MediaHold) -> ItemMedia:
        """The bytes of a text encoder's input, which `hold` keeps."""

    def close(self) -> None: ...
