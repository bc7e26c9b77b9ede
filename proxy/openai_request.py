"""A request body of OpenAI's chat API turned into a ChatCall, or into an error that names the field."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from triptych.errors import InvalidRequest
from triptych.proxy.chat import ChatCall, ChatMessage, ImagePart, TextPart
from triptych.proxy.openai_types import ChatBody, ImageBody, ImageUrlBody, MessageBody, TextBody
from triptych.proxy.validation import (
    check_image_count,
    check_options,
    check_salt,
    check_sampling,
    in_range,
    seed_of,
)
from triptych.types import SamplingParams

T = TypeVar("T")

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif", "image/bmp"})
_AT = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")
_DATA_HEAD = 256
_decoder = msgspec.json.Decoder(ChatBody)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What of a request concerns only the form of the reply."""

    stream: bool
    include_usage: bool
    return_token_ids: bool
    timings: bool


def parse_body(
    raw: bytes, request_id: str, *, max_images: int, timeout: float
) -> tuple[ChatCall, ChatOptions]:
    """The request that `raw` (JSON) holds. InvalidRequest names what is wrong with it."""
    body = _decode(raw)
    if body.n not in (None, 1):
        raise InvalidRequest("n: only 1 is served yet; send the request n times", param="n")
    if body.logprobs:
        raise InvalidRequest("logprobs: not yet; leave it out", param="logprobs")
    if not body.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    messages = tuple(_message(index, item) for index, item in enumerate(body.messages))
    call = ChatCall(
        request_id=request_id,
        model=body.model or "",
        messages=messages,
        sampling=_sampling(body),
        timeout=timeout,
        cache_salt=check_salt(body.cache_salt or ""),
        processor_options=check_options(body.mm_processor_kwargs or {}),
    )
    check_image_count(len(call.images()), max_images)
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    options = ChatOptions(
        bool(body.stream), include_usage, bool(body.return_token_ids), bool(body.triptych_timings)
    )
    return call, options


def _decode(raw: bytes) -> ChatBody:
    try:
        return _decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _invalid(error, "") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the request body is no JSON object: {error}", param="body") from None


def _invalid(error: msgspec.ValidationError, prefix: str) -> InvalidRequest:
    """msgspec's words with the path of the field in front."""
    text = str(error)
    at = _AT.search(text)
    path = prefix
    if at:
        text = text[: at.start()]
        path += at["path"]
    if missing := _MISSING.search(text):
        path += f".{missing['name']}"
    path = path.lstrip(".") or "body"
    return InvalidRequest(f"{path}: {text}", param=path)


def _convert(value: Any, kind: type[T], path: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _invalid(error, path) from None


def _message(index: int, value: Any) -> ChatMessage:
    path = f"messages[{index}]"
    body = _convert(value, MessageBody, path)
    role = _ROLES.get(body.role)
    if role is None:
        known = ", ".join(_ROLES)
        raise InvalidRequest(f"{path}.role: {body.role[:40]!r} is none of {known}", param=f"{path}.role")
    param = f"{path}.content"
    if isinstance(body.content, str):
        return ChatMessage(role, body.content)
    if not isinstance(body.content, list) or not body.content:
        raise InvalidRequest(f"{param} must be a string or a list of parts", param=param)
    return ChatMessage(role, tuple(_part(f"{param}[{at}]", part) for at, part in enumerate(body.content)))


def _part(path: str, part: Any) -> TextPart | ImagePart:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return TextPart(_convert(part, TextBody, path).text)
    if kind == "image_url":
        image = _convert(part, ImageUrlBody, path)
        if isinstance(image.image_url, str):
            return _data_url(image.image_url, f"{path}.image_url")
        return _data_url(image.image_url.url, f"{path}.image_url.url")
    if kind == "image":
        return _data_url(_convert(part, ImageBody, path).image, f"{path}.image")
    raise InvalidRequest(f'{path}.type must be "text", "image_url" or "image"', param=f"{path}.type")


def _data_url(url: str, param: str) -> ImagePart:
    scheme = url[:16].split(":", 1)[0].strip().lower()
    if scheme in ("http", "https"):
        raise InvalidRequest(f"{param}: not yet: send the picture as a data: URL", param=param)
    if scheme != "data":
        raise InvalidRequest(f"{param} must be a data: URL with base64 content", param=param)
    head, comma, _ = url[:_DATA_HEAD].partition(",")
    words = head[len("data:") :].strip().lower().split(";")
    if not comma or words[-1] != "base64":
        raise InvalidRequest(f"{param} must read data:image/png;base64,…", param=param)
    if words[0] not in _IMAGE_TYPES:
        known = ", ".join(sorted(_IMAGE_TYPES))
        raise InvalidRequest(f"{param}: the media type must be one of {known}", param=param)
    return ImagePart(url[len(head) + 1 :], param)


def _sampling(body: ChatBody) -> SamplingParams:
    stop = body.stop
    limit = body.max_completion_tokens
    in_range("max_completion_tokens", limit, 1, 1 << 24)
    in_range("top_k", body.top_k, -1, 1 << 31)
    return check_sampling(
        SamplingParams(
            max_tokens=body.max_tokens if limit is None else limit,
            min_tokens=body.min_tokens or 0,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=0 if body.top_k == -1 else body.top_k,
            seed=seed_of(body.seed),
            stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
        )
    )
