"""The HTTP API without IO: request bodies, error replies, SSE events, and when to try again."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from triptych.apps.client.fields import (
    AudioFile,
    BinaryFile,
    ChatFields,
    CompletionFields,
    Content,
    EmbeddingFields,
    File,
    Files,
    JsonObject,
    Messages,
    Picture,
    Prompt,
    RerankFields,
    TokenVectorFields,
    TranscriptFields,
)
from triptych.base.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestError,
    TooLarge,
    Unauthorized,
    Unavailable,
    error_from_code,
)
from triptych.base.request import unknown_field

_URL_SCHEMES = ("http://", "https://", "data:", "file://")
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)
_VIDEOS = ((b"ftyp", 4, "video/mp4"), (b"\x1a\x45\xdf\xa3", 0, "video/webm"), (b"GIF8", 0, "image/gif"))


_SOUNDS = (
    (b"RIFF", 0, "wav"),
    (b"fLaC", 0, "flac"),
    (b"OggS", 0, "ogg"),
    (b"ftyp", 4, "m4a"),
    (b"\x1a\x45\xdf\xa3", 0, "webm"),
    (b"ID3", 0, "mp3"),
    (b"\xff", 0, "mp3"),
)


def conversation(
    messages: Messages, files: Files, videos: Sequence[str] = (), sounds: Sequence[str] = ()
) -> list[JsonObject]:
    """The messages to send: a question becomes one user message with the files in front of its text.

    `videos` and `sounds` are paths and URLs.

    InvalidRequest when a file is no picture, or when files come beside a list of messages; OSError when a
    file cannot be read.
    """
    parts = [*map(image_part, _listed(files)), *map(video_part, videos), *map(sound_part, sounds)]
    if isinstance(messages, str):
        content = [*parts, {"type": "text", "text": messages}] if parts else messages
        return [{"role": "user", "content": content}]
    if parts:
        raise InvalidRequest(
            "files can only be given with a question; in a list of messages an image is a part of a "
            "message's content",
            param="files",
        )
    given: object = messages
    if not isinstance(given, Sequence) or not all(isinstance(one, Mapping) for one in given):
        raise InvalidRequest(
            "give a question as a text, or a list of messages, each a dict", param="messages"
        )
    return list(messages)


def video_part(file: str) -> JsonObject:
    """The video of a path or URL as a content part. OSError when it cannot be read."""
    if file.lower().startswith(_URL_SCHEMES):
        return {"type": "video_url", "video_url": {"url": file}}
    kind, content = _file(file, _VIDEOS, "a video of a known format (MP4, MOV, WebM, GIF)")
    return {"type": "video_url", "video_url": {"url": f"data:{kind};base64,{content}"}}


def sound_part(file: str) -> JsonObject:
    """The audio file of a path or URL as a content part. OSError when it cannot be read."""
    if file.lower().startswith(_URL_SCHEMES):
        return {"type": "audio_url", "audio_url": {"url": file}}
    kind, content = _file(file, _SOUNDS, "a sound of a known format (WAV, FLAC, MP3, Ogg, M4A, WebM)")
    return {"type": "input_audio", "input_audio": {"data": content, "format": kind}}


def _file(file: str, kinds: Iterable[tuple[bytes, int, str]], what: str) -> tuple[str, str]:
    """The file's kind by its first bytes, and its content in base64."""
    data = Path(file).read_bytes()
    for magic, at, kind in kinds:
        if data[at : at + len(magic)] == magic:
            return kind, base64.b64encode(data).decode()
    raise InvalidRequest(f"{file}: not {what}")


def _listed(files: Files) -> Iterable[File]:
    # A file object is iterable too, by lines.
    if isinstance(files, (str, bytes, os.PathLike, BinaryFile)) or not isinstance(files, Iterable):
        return (files,)
    return files


def image_part(file: File) -> JsonObject:
    """The picture as a content part."""
    if isinstance(file, (bytes, BinaryFile)):
        url = data_url(file if isinstance(file, bytes) else _content(file, "files"), "files")
    elif isinstance(file, str) and file.lower().startswith(_URL_SCHEMES):
        url = file
    elif isinstance(file, (str, os.PathLike)):
        url = data_url(file_bytes(file), os.fspath(file))
    elif hasattr(file, "save"):
        url = data_url(_png(file), "files")
    else:
        raise InvalidRequest(
            "files takes a path, a URL, bytes, a binary file, a PIL picture, or a list of these, "
            f"not {type(file).__name__}",
            param="files",
        )
    return {"type": "image_url", "image_url": {"url": url}}


def file_bytes(file: AudioFile) -> bytes:
    """The content of a path, or the bytes themselves. OSError when it cannot be read."""
    if isinstance(file, BinaryFile):
        return _content(file, "file")
    if not isinstance(file, (bytes, str, os.PathLike)):
        raise InvalidRequest(
            f"file takes a path, bytes or a binary file, not {type(file).__name__}", param="file"
        )
    return file if isinstance(file, bytes) else Path(file).read_bytes()


def _content(file: BinaryFile, field: str) -> bytes:
    """What is left to read of an open file."""
    content = file.read()
    if not isinstance(content, bytes):
        raise InvalidRequest(f'{field}: open the file in binary mode, open(…, "rb")', param=field)
    return content


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


@dataclass(frozen=True, slots=True)
class AudioForm:
    """The fields and the file of a multipart form."""

    fields: dict[str, object]
    files: dict[str, tuple[str, bytes]]


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
POOLING = "/pooling"
RERANK = "/v1/rerank"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
#: Longest pause before another try, in seconds.
LONGEST_PAUSE = 10.0
_BY_STATUS: dict[int, type[RequestError]] = {
    cls.status: cls
    for cls in (InvalidRequest, Unauthorized, NotFound, TooLarge, Overloaded, Unavailable, DeadlineExceeded)
}


def chat_body(
    messages: Messages,
    files: Files,
    model: str,
    options: Mapping[str, object],
    *,
    stream: bool = False,
) -> JsonObject:
    """A body of /v1/chat/completions. OSError when a file cannot be read."""
    given = _checked(options, ChatFields.__optional_keys__ | {"files", "model"})
    body = {"messages": conversation(messages, files), **given} | ({"stream": True} if stream else {})
    return body | _model(model)


def _checked(options: Mapping[str, object], known: Set[str]) -> dict[str, object]:
    """The options with those of `extra_body`; InvalidRequest for a name that the clients do not know."""
    fields = dict(options)
    extra = fields.pop("extra_body", None)
    for name in sorted(fields.keys() - known):
        raise unknown_field(name, known, "what the clients do not know goes into extra_body")
    return fields | (dict(extra) if isinstance(extra, Mapping) else {})


def tokenize_body(prompt: Messages, model: str) -> JsonObject:
    """A body of /tokenize."""
    return {"prompt" if isinstance(prompt, str) else "messages": prompt} | _model(model)


def detokenize_body(tokens: Sequence[int], model: str) -> JsonObject:
    """A body of /detokenize."""
    return {"tokens": list(tokens)} | _model(model)


def _model(model: str) -> dict[str, object]:
    """The field that names the model; none for the only one served."""
    return {"model": model} if model else {}


def completion_body(
    prompt: Prompt | None,
    encoder_prompt: Prompt | None,
    decoder_prompt: Prompt | None,
    audio: AudioFile | None,
    image: File | None,
    model: str,
    options: Mapping[str, object],
) -> JsonObject:
    """A body of /v1/completions; what is None is left out. OSError when the file cannot be read."""
    options = _checked(options, CompletionFields.__optional_keys__ | {"audio", "model"})
    given = {"prompt": prompt, "encoder_prompt": encoder_prompt, "decoder_prompt": decoder_prompt}
    body: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if audio is not None:
        data = base64.b64encode(file_bytes(audio)).decode()
        body["multi_modal_data"] = {"audio": {"data": data}}
    if image is not None:
        if audio is not None:
            raise InvalidRequest(
                "audio and image exclude each other: an encoder reads one thing", param="image"
            )
        body["multi_modal_data"] = {"image": image_part(image)["image_url"]}
    return {"return_token_ids": True, **body, **options} | _model(model)


def embedding_body(
    inputs: Prompt | Messages, files: Files, model: str, options: Mapping[str, object]
) -> JsonObject:
    """A body of /v1/embeddings: of messages where there are files, or roles. OSError as above."""
    known = EmbeddingFields.__optional_keys__ | {"model"}
    return _pooled_body(inputs, files, model, _checked(options, known))


def pooling_body(
    inputs: Prompt | Messages, files: Files, model: str, options: Mapping[str, object]
) -> JsonObject:
    """A body of /pooling, as above."""
    known = TokenVectorFields.__optional_keys__ | {"model"}
    return _pooled_body(inputs, files, model, _checked(options, known))


def _pooled_body(
    inputs: Prompt | Messages, files: Files, model: str, options: Mapping[str, object]
) -> JsonObject:
    given = {"encoding_format": "base64", **options}
    pictures = list(_listed(files))
    first = inputs[0] if isinstance(inputs, Sequence) and inputs else None
    if pictures or (isinstance(first, Mapping) and "role" in first):
        return {"messages": conversation(cast("Messages", inputs), pictures), **given} | _model(model)
    return {"input": inputs, **given} | _model(model)


def rerank_body(
    query: Content, documents: Sequence[Content], model: str, options: Mapping[str, object]
) -> JsonObject:
    """A body of /v1/rerank."""
    given = _checked(options, RerankFields.__optional_keys__ | {"model"})
    body = {"query": query, "documents": list(documents), "return_documents": False}
    return {**body, **given} | _model(model)


def audio_form(
    file: AudioFile, model: str, options: Mapping[str, object], response_format: str = "verbose_json"
) -> AudioForm:
    """A form of the audio endpoints: fields, and the file. Lists repeat their field."""
    options = _checked(options, TranscriptFields.__optional_keys__ | {"model"})
    fields = {"response_format": response_format, **options, **_model(model)}
    fields = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in fields.items()
        if value is not None
    }
    name = Path(file).name if isinstance(file, (str, os.PathLike)) else "audio"
    return AudioForm(fields, {"file": (name, file_bytes(file))})


def error_of(status: int, body: bytes, retry_after: str | None = None) -> RequestError:
    """The error of a reply: by its code, else by its status."""
    try:
        wait = float(retry_after) if retry_after else None
    except ValueError:
        wait = None
    try:
        raw = json.loads(body)["error"]
        message, code, param = str(raw["message"]), raw.get("code"), raw.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        text = body[:200].decode(errors="replace").strip()
        cls = _BY_STATUS.get(status, InternalError)
        return cls(f"the server answered {status}: {text}", retry_after=wait)
    error = error_from_code(str(code), message, param=param, retry_after=wait)
    if type(error) is InternalError and status in _BY_STATUS:
        return _BY_STATUS[status](message, param=param, retry_after=wait)
    return error


def pause(error: RequestError, attempt: int, retries: int) -> float | None:
    """Seconds to wait before try `attempt` + 1; None when trying again is over, or makes no sense."""
    if attempt > retries or not isinstance(error, (Overloaded, Unavailable)):
        return None
    wait = error.retry_after if error.retry_after is not None else 0.25 * 2 ** (attempt - 1)
    return min(wait, LONGEST_PAUSE)


class EventLines:
    """A parser of the bytes of an SSE reply into its events.

    Lines end with a newline and with nothing else: JSON may hold what other readers of lines take for an end,
    such as U+2028.
    """

    def __init__(self) -> None:
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[JsonObject]:
        """The events whose lines end in `data`. Raises the error of an error event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if (event := self._parse(line)) is not None:
                yield event

    def _parse(self, line: bytes) -> JsonObject | None:
        """The event of a line; None for a line without one."""
        if not line.startswith(b"data:"):
            return None
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return None
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise InternalError("the server's stream holds an event that is not JSON") from None
        if not isinstance(event, dict):
            raise InternalError("the server's stream holds an event that is not an object")
        if "error" in event:
            raise error_of(500, data)
        return event

    def check_end(self) -> None:
        """Unavailable when the stream broke off before its end."""
        if not self.done:
            raise Unavailable("the server's stream broke off before the answer's end")
