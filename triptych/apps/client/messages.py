"""Questions and files as OpenAI's messages."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable
from pathlib import Path

from triptych.apps.client.fields import AudioFile, File, Files, JsonObject, Messages, Picture
from triptych.base.errors import InvalidRequest

_URL_SCHEMES = ("http://", "https://", "data:", "file://")
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)


def conversation(messages: Messages, files: Files) -> list[JsonObject]:
    """The messages to send: a question becomes one user message with the files in front of its text.

    InvalidRequest when a file is no picture, or when files come beside a list of messages; OSError when a
    file cannot be read.
    """
    pictures = [image_part(file) for file in _listed(files)]
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


def _listed(files: Files) -> Iterable[File]:
    if isinstance(files, (str, bytes, os.PathLike)) or not isinstance(files, Iterable):
        return (files,)
    return files


def image_part(file: File) -> JsonObject:
    """The picture as a content part."""
    if isinstance(file, bytes):
        url = data_url(file, "files")
    elif isinstance(file, str) and file.lower().startswith(_URL_SCHEMES):
        url = file
    elif isinstance(file, (str, os.PathLike)):
        url = data_url(file_bytes(file), os.fspath(file))
    elif hasattr(file, "save"):
        url = data_url(_png(file), "files")
    else:
        raise InvalidRequest(
            f"files takes a path, a URL, bytes, a PIL picture, or a list of these, not {type(file).__name__}",
            param="files",
        )
    return {"type": "image_url", "image_url": {"url": url}}


def file_bytes(file: AudioFile) -> bytes:
    """The content of a path, or the bytes themselves. OSError when it cannot be read."""
    if not isinstance(file, (bytes, str, os.PathLike)):
        raise InvalidRequest(f"file takes a path or bytes, not {type(file).__name__}", param="file")
    return file if isinstance(file, bytes) else Path(file).read_bytes()


def _png(picture: Picture) -> bytes:
    data = io.BytesIO()
    try:
        picture.save(data, "PNG")
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"files: a picture cannot be sent as PNG ({error}): convert it", param="files"
        ) from error
    return data.getvalue()


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
