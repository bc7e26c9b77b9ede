"""JSON over HTTP: bodies of requests, replies with errors, server-sent events."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from typing import TypeVar, get_type_hints

import msgspec
import msgspec.inspect
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from triptych.base.errors import InvalidRequest, RequestError, TooLarge
from triptych.base.request import limits_of, out_of_limits
from triptych.base.types import prepared

#: The event after the last one.
DONE = b"data: [DONE]\n\n"
to_json = msgspec.json.Encoder().encode


def event(body: object) -> bytes:
    """One event."""
    return b"data: " + to_json(body) + b"\n\n"


def named_event(body: Mapping[str, object]) -> bytes:
    """One event under the name of its type, as APIs stream without a mark at the end."""
    return b"event: " + str(body["type"]).encode() + b"\ndata: " + to_json(body) + b"\n\n"


#: The root of Anthropic's Messages API, and what it calls errors by status.
MESSAGES_PATH = "/v1/messages"
_MESSAGES_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: RequestError, path: str = "") -> dict[str, object]:
    """An error in the shape of the API that `path` belongs to: Anthropic's, else OpenAI's."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    if error.status == 429:
        kind = "rate_limit_error"
    body = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    if not path.startswith(MESSAGES_PATH):
        return {"error": body}
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    return {"type": "error", "error": {**body, "type": _MESSAGES_ERRORS.get(error.status, kind)}}


def error_json(error: RequestError, path: str = "") -> bytes:
    return to_json(error_body(error, path))


def error_event(error: RequestError, path: str = "") -> bytes:
    """The end of a stream that has failed."""
    body = error_body(error, path)
    return named_event(body) if "type" in body else event(body) + DONE


def retry_after(error: RequestError) -> str | None:
    return None if error.retry_after is None else str(max(math.ceil(error.retry_after), 1))


def closing_reply(error: RequestError) -> bytes:
    """A whole reply of HTTP/1.1, after which the connection is closed."""
    body = error_json(error)
    head = [STATUS_LINE[error.status], b"content-type: application/json\r\nconnection: close\r\n"]
    if wait := retry_after(error):
        head.append(b"retry-after: %s\r\n" % wait.encode())
    head.append(b"content-length: %d\r\n\r\n" % len(body))
    return b"".join([*head, body])


T = TypeVar("T")
#: Values of one body, counted before it is parsed, since small ones then take 50 times their bytes. The
#: largest body that is of use holds 262,144 token ids.
MAX_VALUES = 1 << 20
#: Values of a body that is parsed on the event loop.
FEW_VALUES = 1 << 12

_AT = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_LIMIT = re.compile(r"Expected `\w+` [<>]")
_LENGTH = re.compile(r"Expected `(?P<kind>\w+)` of length (?P<sign>[<>])= (?P<bound>[0-9]+)")
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")


def decode_body(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    """InvalidRequest names the field, or the body when it is no JSON object."""
    check_values(raw)
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        complaint = invalid_field(error, "", decoder.type)
        raise _out_of_limits(complaint, decoder.type) or complaint from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the request body is not a JSON object: {error}", param="body") from None


def count_values(raw: bytes | str) -> int:
    """An upper bound of the lists, objects and members of JSON: what stands within texts counts too."""
    if isinstance(raw, str):
        return raw.count(",") + raw.count("[") + raw.count("{")
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def check_values(raw: bytes | str, param: str = "body") -> None:
    """TooLarge for JSON with too many values."""
    if count_values(raw) > MAX_VALUES:
        what = "the request body" if param == "body" else param
        raise TooLarge(f"{what} holds more than {MAX_VALUES} values: send less", param=param)


_MAX_TEXT = 400
#: Parts of messages that other servers take.
_AUDIO = "sound is not a part here (chats take it as input_audio or audio_url)"
_FILES = "files are not read here (images are)"
_EMBEDDINGS = "embeddings are computed here, never taken: send the picture"
_UNSERVED_PARTS = {
    "video_url": "videos are not served here",
    **dict.fromkeys(("input_audio", "audio_url", "audio"), _AUDIO),
    **dict.fromkeys(("file", "input_file"), _FILES),
    **dict.fromkeys(("image_embeds", "audio_embeds", "prompt_embeds"), _EMBEDDINGS),
}


def convert_field(value: object, kind: type[T], path: str, *, strict: bool = True) -> T:
    """A part of a body as a Struct; `path` leads to it. Not `strict`: numbers and flags are texts."""
    try:
        return msgspec.convert(value, prepared(kind), strict=strict)
    except msgspec.ValidationError as error:
        raise invalid_field(error, path, kind) from None


def invalid_field(error: msgspec.ValidationError, prefix: str, kind: object = object) -> InvalidRequest:
    """msgspec's message with the path of the field in front, and the values that the field takes."""
    text = str(error)
    at = _AT.search(text)
    path = prefix
    if at:
        text = text[: at.start()]
        path += at["path"]
    if text.startswith("Invalid ") and (allowed := _allowed(kind, at["path"] if at else "")):
        quoted = text.partition("'")[2].rpartition("'")[0]
        text = f"{_UNSERVED_PARTS.get(quoted, text)}: send {' or '.join(map(str, allowed))}"
    if length := _LENGTH.search(text):
        bound = f"{length['bound']} {'characters' if length['kind'] == 'str' else 'entries'}"
        few = f"takes at least {bound}: send more, or leave it out"
        text = few if length["sign"] == ">" else f"takes at most {bound}: send less"
    if missing := _MISSING.search(text):
        path += f".{missing['name']}"
        allowed = _allowed(kind, f"{at['path'] if at else ''}.{missing['name']}")
        said = f"{path.lstrip('.')} is missing: send {' or '.join(map(str, allowed)) or 'it'}"
        return InvalidRequest(said, param=path.lstrip("."))
    path = path.lstrip(".") or "body"
    # msgspec repeats a client's text that is none of an enum's values.
    return InvalidRequest(f"{path}: {text[:_MAX_TEXT]}", param=path)


def _allowed(kind: object, path: str) -> list[object]:
    """The values of the field at `path` in the type `kind`, where they can be listed."""
    types = [_type_info(kind)]
    for name in filter(None, re.split(r"\[[^]]*\]|\.", path)):
        structs = [it for it in _members(types) if isinstance(it, msgspec.inspect.StructType)]
        if tags := [struct.tag for struct in structs if struct.tag_field == name]:
            return list(tags)
        types = [field.type for struct in structs for field in struct.fields if field.encode_name == name]
    return [
        value for it in _members(types) if isinstance(it, msgspec.inspect.LiteralType) for value in it.values
    ]


#: Both walk a whole body's type, 5 to 30 ms for one of a client's errors: of each type once.
_type_info = cache(msgspec.inspect.type_info)
_type_hints = cache(partial(get_type_hints, include_extras=True))


def _members(types: Iterable[msgspec.inspect.Type]) -> Iterator[msgspec.inspect.Type]:
    """The types that a value may have: members of unions, and elements of lists."""
    for kind in types:
        if isinstance(kind, msgspec.inspect.Metadata):
            yield from _members([kind.type])
        elif isinstance(kind, msgspec.inspect.UnionType):
            yield from _members(kind.types)
        elif isinstance(kind, msgspec.inspect.ListType):
            yield from _members([kind.item_type])
        else:
            yield kind


def _out_of_limits(error: InvalidRequest, body: object) -> InvalidRequest | None:
    """The same with both limits in place of the one that was not kept; None when the type was wrong."""
    name = re.split(r"[.\[]", error.param or "", maxsplit=1)[0]
    limits = limits_of(_type_hints(body).get(name))
    return out_of_limits(name, limits) if limits is not None and _LIMIT.search(error.message) else None
