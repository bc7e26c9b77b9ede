"""A body of OpenAI's Responses API turned into a ChatCall, by way of the chat API's body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest
from triptych.base.request.limits import OutputTokens
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.http.json_body import decode_body
from triptych.proxy.openai.chat.request import ChatReplyOptions, call_of
from triptych.proxy.openai.chat.types import ChatBody
from triptych.proxy.openai.fields import schemas
from triptych.proxy.openai.fields.body_fields import (
    ModelName,
    ParallelCalls,
    ProcessorOptions,
    Salt,
    Stream,
    TemplateVariables,
    TimingsWanted,
    TopLogprobs,
)
from triptych.proxy.openai.fields.sampling import SamplingBody
from triptych.proxy.openai.responses.input import Conversation, FieldNames

LOGPROBS = "message.output_text.logprobs"
#: Fields that would need memory between requests, or that have another name here.
_REFUSED = {
    "previous_response_id": "nothing is stored: send the conversation as input",
    "conversation": "nothing is stored: send the conversation as input",
    "prompt": "prompts are not stored: send instructions and input",
    "background": "answers come with the request",
    "max_tokens": "its name is max_output_tokens here",
    "response_format": "its name is text.format here",
}


class ResponsesBody(SamplingBody, kw_only=True):
    """POST /v1/responses. Items of `input` are decoded one by one, so that errors name their index."""

    input: Annotated[
        str | schemas.InputItems,
        Meta(description="A text, or items: messages, function calls and their outputs."),
    ]
    model: ModelName = None
    instructions: Annotated[str | None, Meta(description="A system message in front of the input.")] = None
    stream: Stream = None
    max_output_tokens: Annotated[OutputTokens | None, Meta(description="Most output tokens.")] = None
    text: Annotated[
        schemas.TextConfig | None, Meta(description="format: the form that the answer has to have.")
    ] = None
    tools: Annotated[schemas.FlatTools | None, Meta(description="Functions that the model may call.")] = None
    tool_choice: Annotated[
        schemas.FlatToolChoice,
        Meta(description="none, auto, required, or the function that has to be called."),
    ] = None
    parallel_tool_calls: ParallelCalls = None
    top_logprobs: TopLogprobs = None
    include: Annotated[
        list[str] | None,
        Meta(
            description='"message.output_text.logprobs" reports log-probabilities; other values are ignored.'
        ),
    ] = None
    metadata: Annotated[
        dict[str, str] | None, Meta(description="Repeated in the response, and nothing else.")
    ] = None
    store: Annotated[bool | None, Meta(description="Ignored: nothing is stored.")] = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: object = None
    prompt: object = None
    max_tokens: int | None = None
    response_format: dict[str, object] | None = None
    user: Annotated[str | None, Meta(description="Ignored.")] = None
    cache_salt: Salt = None
    mm_processor_kwargs: ProcessorOptions = None
    chat_template_kwargs: TemplateVariables = None
    triptych_timings: TimingsWanted = None


_decoder = msgspec.json.Decoder(ResponsesBody)


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """`body` has what the reply repeats; `names` leads from the call's fields back to the client's."""

    call: ChatCall
    options: ChatReplyOptions
    body: ResponsesBody
    names: FieldNames


def parse_responses(raw: bytes, request_id: str, *, max_images: int, timeout: float) -> ResponsesRequest:
    """The request that `raw` (JSON) holds. InvalidRequest names what is wrong with it."""
    body = decode_body(_decoder, raw)
    for name, advice in _REFUSED.items():
        if getattr(body, name):
            raise InvalidRequest(f"{name} is not supported: {advice}", param=name)
    conversation = _conversation(body)
    names = FieldNames(conversation.places)
    chat = _chat_body(body, conversation)
    try:
        call, options = call_of(chat, request_id, max_images=max_images, timeout=timeout)
    except InvalidRequest as error:
        raise names.translated(error) from None
    body.input = ""  # may be large, and the reply does not repeat it
    return ResponsesRequest(call, options, body, names)


def _conversation(body: ResponsesBody) -> Conversation:
    conversation = Conversation()
    if body.instructions:
        conversation.add({"role": "system", "content": body.instructions}, "instructions")
    if isinstance(body.input, str):
        conversation.add({"role": "user", "content": body.input}, "input")
        return conversation
    for index, item in enumerate(body.input):
        conversation.take(item, f"input[{index}]")
    if len(conversation.messages) == bool(body.instructions):
        raise InvalidRequest("input must hold at least one message", param="input")
    return conversation


def _chat_body(body: ResponsesBody, conversation: Conversation) -> ChatBody:
    shared = {name: getattr(body, name) for name in SamplingBody.__struct_fields__}
    shared["response_format"] = _response_format(body.text)
    logprobs = LOGPROBS in (body.include or ())
    return ChatBody(
        **shared,
        messages=list[object](conversation.messages),
        model=body.model,
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        mm_processor_kwargs=body.mm_processor_kwargs,
        cache_salt=body.cache_salt,
        triptych_timings=body.triptych_timings,
    )


def _response_format(text: Mapping[str, object] | None) -> dict[str, object] | None:
    form = (text or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise InvalidRequest("text.format must be an object", param="text.format")
    if form.get("type") != "json_schema":
        return dict(form)
    if form.get("schema") is None:
        raise InvalidRequest("text.format.schema is missing", param="text.format.schema")
    return {"type": "json_schema", "json_schema": form}


def _tool(tool: object) -> object:
    """The chat API's form of a function; what is none is left to be refused there."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


def _tool_choice(choice: object) -> object:
    if not isinstance(choice, Mapping):
        return choice
    listed = choice.get("tools")
    if choice.get("type") == "allowed_tools" and isinstance(listed, list):
        tools = [_tool_choice(tool) for tool in listed]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice
