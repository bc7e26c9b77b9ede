"""The bodies of OpenAI's chat API that clients send, with vLLM's extras. Unknown fields do not fail."""

from __future__ import annotations

from typing import Any

import msgspec

from triptych.chat import MessageToolCall
from triptych.proxy.openai.fields.sampling import SamplingBody


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions. Messages are decoded one by one, so that errors name their index."""

    messages: list[Any]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_ids: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    triptych_timings: bool | None = None


class MessageBody(msgspec.Struct):
    role: str
    content: Any = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None


class TextBody(msgspec.Struct):
    text: str


class RefusalBody(msgspec.Struct):
    refusal: str


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
