"""The bodies of OpenAI's chat API that clients send, with vLLM's extras. Unknown fields do not fail."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from triptych.proxy.openai.fields import schemas
from triptych.proxy.openai.fields.sampling import CacheSalt, SamplingBody
from triptych.request.chat import MessageToolCall
from triptych.request.limits import Logprobs, OutputTokens


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[
        schemas.Messages, Meta(description="The conversation. Pictures are parts of a message's content.")
    ]
    model: Annotated[
        str | None, Meta(description="A name of GET /v1/models; may be left out where only one is served.")
    ] = None
    stream: Annotated[
        bool | None, Meta(description="Send the answer as server-sent events while it is made.")
    ] = None
    stream_options: Annotated[
        StreamOptions | None, Meta(description="include_usage: a last event with the usage.")
    ] = None
    max_completion_tokens: Annotated[
        OutputTokens | None, Meta(description="Most output tokens; goes before max_tokens.")
    ] = None
    n: Annotated[int | None, Meta(description="Number of answers; at most what --max-choices says.")] = None
    logprobs: Annotated[bool | None, Meta(description="Report log-probabilities of the output tokens.")] = (
        None
    )
    top_logprobs: Annotated[
        Logprobs | None, Meta(description="Likeliest tokens reported beside each chosen one.")
    ] = None
    tools: Annotated[schemas.Tools | None, Meta(description="Functions that the model may call.")] = None
    tool_choice: Annotated[
        schemas.ToolChoice, Meta(description="none, auto, required, or the function that has to be called.")
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="Whether an answer may hold several calls; true by default.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, object] | None, Meta(description="Further variables of the chat template.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="Open the assistant's turn at the prompt's end; true by default.")
    ] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="The last message is the beginning of the answer.")
    ] = None
    return_token_ids: Annotated[bool | None, Meta(description="Report token ids of prompt and output.")] = (
        None
    )
    mm_processor_kwargs: Annotated[
        dict[str, object] | None,
        Meta(description="Options of the image processor; they change embeddings and their keys."),
    ] = None
    cache_salt: Annotated[
        CacheSalt | None,
        Meta(
            description="Keeps caches apart: requests with other salts share no embeddings and no KV blocks."
        ),
    ] = None
    triptych_timings: Annotated[bool | None, Meta(description="Report where the request's time went.")] = None


class MessageBody(msgspec.Struct):
    role: str
    content: object = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: object = None
    audio: object = None


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
