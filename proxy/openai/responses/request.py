"""A body of OpenAI's Responses API turned into a ChatCall, by way of the chat API's body."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest, RequestError
from triptych.base.request.limits import OutputTokens
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.http.json_body import decode_body
from triptych.proxy.openai.chat.request import ChatBody, ChatReplyOptions, ReasoningEffort, call_of
from triptych.proxy.openai.fields import schemas
from triptych.proxy.openai.fields.sampling import (
    ModelName,
    ParallelCalls,
    ProcessorOptions,
    Salt,
    SamplingBody,
    Stream,
    TemplateVariables,
    TimingsWanted,
    TopLogprobs,
)

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_MESSAGE = re.compile(r"messages\[(\d+)\]")
#: Names of chat fields and what they are called here, in the order in which they are looked for.
_NAMES = (
    (re.compile(r"\.image_url\.url\b"), ".image_url"),
    (re.compile(r"\bresponse_format\.json_schema\b"), "text.format"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\b(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\bmessages\b"), "input"),
)


class FieldNames:
    """Names fields of the chat request by those of the client's; `places` has one path per message."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = places

    def translated(self, error: RequestError) -> RequestError:
        param = error.param and self.of(error.param)
        return type(error)(self.of(error.message), param=param, retry_after=error.retry_after)

    def of(self, text: str) -> str:
        """`text` with the paths of chat fields replaced."""
        text = _MESSAGE.sub(self._place, text)
        for pattern, name in _NAMES:
            text = pattern.sub(name, text)
        return text

    def _place(self, match: re.Match[str]) -> str:
        index = int(match[1])
        return self._places[index] if index < len(self._places) else match[0]


class Conversation:
    """Collects items; `messages` are OpenAI's chat messages, `places` the path of each."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        #: The last message is an assistant's, of which there is only its reasoning yet.
        self._thinks = False

    def add(self, message: dict[str, Any], place: str) -> None:
        self.messages.append(message)
        self.places.append(place)

    def take(self, item: Any, place: str) -> None:
        """One input item. InvalidRequest when it is of a kind that is not served."""
        if not isinstance(item, Mapping):
            raise InvalidRequest(f"{place} must be an object", param=place)
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._message(item, place)
        elif kind == "function_call":
            self._call(item, place)
        elif kind == "function_call_output":
            content = _content(item.get("output"), f"{place}.output", flat=True)
            call_id = _string(item, "call_id", place)
            self.add({"role": "tool", "tool_call_id": call_id, "content": content}, place)
        elif kind == "reasoning":
            self._reasoning(item, place)
        else:
            known = "message, function_call, function_call_output or reasoning"
            raise InvalidRequest(f"{place}.type must be {known}", param=f"{place}.type")

    def _message(self, item: Mapping[str, Any], place: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise InvalidRequest(f"{place}.role must be one of {', '.join(_ROLES)}", param=f"{place}.role")
        content = _content(item.get("content"), f"{place}.content", flat=role != "user")
        if role == "assistant" and self._thinks:
            self.messages[-1]["content"] = content
        else:
            self.add({"role": role, "content": content}, place)
        self._thinks = False

    def _reasoning(self, item: Mapping[str, Any], place: str) -> None:
        """Reasoning belongs to the assistant's message or call after it; a summary alone says nothing."""
        parts = item.get("content") or []
        if not isinstance(parts, list):
            raise InvalidRequest(f"{place}.content must be a list of parts", param=f"{place}.content")
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        if text := "".join(text for text in texts if isinstance(text, str)):
            self.add({"role": "assistant", "content": "", "reasoning_content": text}, place)
            self._thinks = True

    def _call(self, item: Mapping[str, Any], place: str) -> None:
        """Calls belong to the assistant's message before them."""
        function = {
            "name": _string(item, "name", place),
            "arguments": _string(item, "arguments", place),
        }
        call = {"id": _string(item, "call_id", place), "type": "function", "function": function}
        if not (self.messages and self.messages[-1]["role"] == "assistant"):
            self.add({"role": "assistant", "content": ""}, place)
        self.messages[-1].setdefault("tool_calls", []).append(call)
        self._thinks = False


def _string(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{place}.{name} must be a string", param=f"{place}.{name}")
    return value


def _content(content: Any, place: str, *, flat: bool) -> Any:
    """A message's content; `flat`: texts alone become one string, as templates expect of these roles."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{place} must be a string or a list of parts", param=place)
    parts = [_part(part, f"{place}[{at}]") for at, part in enumerate(content)]
    if flat and all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any, place: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and (field := _TEXT_PARTS.get(kind)):
        return {"type": "text", "text": _string(part, field, place)}
    if kind == "input_image":
        if part.get("file_id") is not None:
            raise InvalidRequest(
                f"{place}.file_id is not supported: send the image as image_url", param=f"{place}.file_id"
            )
        url = _string(part, "image_url", place)
        return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail")}}
    raise InvalidRequest(
        f"{place}.type must be input_text, input_image, output_text or refusal", param=f"{place}.type"
    )


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


class ReasoningConfig(msgspec.Struct):
    """`summary` has no effect: the reasoning itself is reported."""

    effort: ReasoningEffort | None = None
    summary: str | None = None


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
    reasoning: Annotated[
        ReasoningConfig | None, Meta(description="effort: how much the model reasons; see reasoning_effort.")
    ] = None
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
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
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
