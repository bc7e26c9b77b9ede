"""What both clients share: bodies to send, errors and events to read, and when to try again. No IO."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.client.messages import File, Messages, conversation, file_bytes, image_part
from triptych.errors import (
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


@dataclass(frozen=True, slots=True)
class AudioForm:
    """What httpx makes a multipart form of."""

    fields: dict[str, Any]
    files: dict[str, tuple[str, bytes]]


#: Longest pause before another try, in seconds.
LONGEST_PAUSE = 10.0
_BY_STATUS: dict[int, type[RequestError]] = {
    cls.status: cls
    for cls in (InvalidRequest, Unauthorized, NotFound, TooLarge, Overloaded, Unavailable, DeadlineExceeded)
}


def chat_body(
    messages: Messages, files: Iterable[File], model: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": conversation(messages, files), **options}
    return body | ({"model": model} if model else {})


def tokenize_body(prompt: Messages, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
    return body | ({"model": model} if model else {})


def completion_body(
    prompt: Any,
    encoder_prompt: Any,
    decoder_prompt: Any,
    audio: File | None,
    image: File | None,
    model: str,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """A body of /v1/completions; what is None is left out. OSError when the file cannot be read."""
    given = {"prompt": prompt, "encoder_prompt": encoder_prompt, "decoder_prompt": decoder_prompt}
    body: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if audio is not None:
        data = base64.b64encode(file_bytes(audio)).decode()
        body["multi_modal_data"] = {"audio": {"data": data}}
    if image is not None:
        if audio is not None:
            raise InvalidRequest(
                "audio and image exclude each other: an encoder reads one thing", param="image"
            )
        body["multi_modal_data"] = {"image": image_part(image)["image_url"]}
    return {"return_token_ids": True, **body, **options} | ({"model": model} if model else {})


def audio_form(file: File, model: str, options: Mapping[str, Any]) -> AudioForm:
    """A form of the audio endpoints: fields, and the file. Lists repeat their field."""
    fields: dict[str, Any] = {"response_format": "verbose_json"}
    for name, value in options.items():
        if value is not None:
            fields[name] = str(value).lower() if isinstance(value, bool) else value
    if model:
        fields["model"] = model
    name = "audio" if isinstance(file, bytes) else Path(file).name
    return AudioForm(fields, {"file": (name, file_bytes(file))})


def error_of(status: int, body: bytes, retry_after: str | None = None) -> RequestError:
    """The error that a reply means: by its code, else by its status."""
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
    """The lines of an SSE reply turned into its events."""

    def __init__(self) -> None:
        self.done = False

    def take(self, line: str) -> Mapping[str, Any] | None:
        """The event of a line; None for a line without one. Raises what an error event says."""
        if not line.startswith("data:"):
            return None
        data = line[5:].strip()
        if data == "[DONE]":
            self.done = True
            return None
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise InternalError("the server's stream holds an event that is no JSON") from None
        if not isinstance(event, dict):
            raise InternalError("the server's stream holds an event that is no object")
        if "error" in event:
            raise error_of(500, data.encode())
        return event

    def check_end(self) -> None:
        """Unavailable when the stream broke off before its end."""
        if not self.done:
            raise Unavailable("the server's stream broke off before the answer's end")
