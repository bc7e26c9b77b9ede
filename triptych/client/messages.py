"""Questions and files as OpenAI's messages."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

from triptych.client.fields import File, JsonObject, Messages
from triptych.errors import InvalidRequest

_URL_SCHEMES = ("http://", "https://", "data:", "file://")
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)


def conversation(messages: Messages, files: Iterable[File]) -> list[JsonObject]:
    """The messages to send: a question becomes one user message with the files in front of its text.

    InvalidRequest when a file is no picture, or when files come beside a list of messages; OSError when a
    file cannot be read.
    """
    pictures = [image_part(file) for file in files]
    if isinstance(messages, str):
        content = [*pictures, {"type": "text", "text": messages}] if pictures else messages
        return [{"role": "user", "content": content}]
    if pictures:
        raise InvalidRequest(
            "files can only be given with a question; in a list of messages an image is a part of a "
            "message's content",
            param="files",
        )
    return list(messages)


def image_part(file: File) -> JsonObject:
    """The picture as a content part."""
    if isinstance(file, bytes):
        url = data_url(file, "files")
    elif isinstance(file, str) and file.lower().startswith(_URL_SCHEMES):
        url = file
    else:
        path = Path(file)
        url = data_url(path.read_bytes(), str(path))
    return {"type": "image_url", "image_url": {"url": url}}


def file_bytes(file: File) -> bytes:
    """The content of a path, or the bytes themselves. OSError when it cannot be read."""
    return file if isinstance(file, bytes) else Path(file).read_bytes()


def data_url(data: bytes, name: str) -> str:
    """`data` as a data: URL with the media type of its first bytes; `name` is for the error."""
    return f"data:{media_type(data, name)};base64,{base64.b64encode(data).decode()}"


def media_type(data: bytes, name: str) -> str:
    """The picture's media type. InvalidRequest when it is none that a cluster could read."""
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    raise InvalidRequest(f"{name}: not an image of a known format (PNG, JPEG, WebP, GIF, BMP)")
