"""The bodies of OpenAI's chat API that clients send, with vLLM's extras. Unknown fields do not fail."""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ChatBody(msgspec.Struct):
    """POST /v1/chat/completions. Messages are decoded one by one, so that errors name their index."""

    messages: list[Any]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    logprobs: bool | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    triptych_timings: bool | None = None


class MessageBody(msgspec.Struct):
    role: str
    content: Any = None
    name: str | None = None


class TextBody(msgspec.Struct):
    text: str


class ImageUrl(msgspec.Struct):
    url: str
    detail: str | None = None


class ImageUrlBody(msgspec.Struct):
    """`uuid` is a client's own name for the picture; the content alone decides the key."""

    image_url: ImageUrl | str
    uuid: str | None = None


class ImageBody(msgspec.Struct):
    image: str
    uuid: str | None = None
