"""The bodies of OpenAI's chat API that clients send, with vLLM's extras. Unknown fields do not fail."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from triptych.base.request.chat import MessageToolCall
from triptych.base.request.limits import OutputTokens
from triptych.proxy.openai.fields import schemas
from triptych.proxy.openai.fields.body_fields import (
    ChatMessages,
    ChatTools,
    ChoiceCount,
    ContinueFinal,
    GenerationPrompt,
    ModelName,
    ParallelCalls,
    ProcessorOptions,
    ReturnTokenIds,
    Salt,
    Stream,
    StreamUsage,
    TemplateVariables,
    TimingsWanted,
    TopLogprobs,
)
from triptych.proxy.openai.fields.sampling import SamplingBody


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: ChatMessages
    model: ModelName = None
    stream: Stream = None
    stream_options: StreamUsage = None
    max_completion_tokens: Annotated[
        OutputTokens | None, Meta(description="Most output tokens; goes before max_tokens.")
    ] = None
    n: ChoiceCount = None
    logprobs: Annotated[bool | None, Meta(description="Report log-probabilities of the output tokens.")] = (
        None
    )
    top_logprobs: TopLogprobs = None
    tools: ChatTools = None
    tool_choice: Annotated[
        schemas.ToolChoice, Meta(description="none, auto, required, or the function that has to be called.")
    ] = None
    parallel_tool_calls: ParallelCalls = None
    chat_template_kwargs: TemplateVariables = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: ContinueFinal = None
    return_token_ids: ReturnTokenIds = None
    mm_processor_kwargs: ProcessorOptions = None
    cache_salt: Salt = None
    triptych_timings: TimingsWanted = None


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
