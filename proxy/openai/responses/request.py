"""A body of OpenAI's Responses API turned into a ChatCall, by way of the chat API's body."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest
from triptych.base.request import MAX_PARTS, MAX_TOOLS, FunctionCall, MessageToolCall, check_tools_size
from triptych.base.types import (
    OutputTokens,
)
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.call.output_formats import (
    NamedSchema,
    ObjectFormat,
    ResponseFormat,
    SchemaFormat,
    TextFormat,
)
from triptych.proxy.call.tools import (
    AllowedChoice,
    AllowedTools,
    FunctionBody,
    FunctionChoice,
    FunctionName,
    ToolChoice,
)
from triptych.proxy.call.validation import check_parts
from triptych.proxy.http.json_body import convert_field, decode_body
from triptych.proxy.openai.chat.request import (
    ChatBody,
    ChatReplyOptions,
    ImageUrl,
    ImageUrlBody,
    InputAudioBody,
    MediaUrl,
    MessageBody,
    PartBody,
    ReasoningEffort,
    RefusalBody,
    TextBody,
    VideoUrlBody,
    call_of,
)
from triptych.proxy.openai.fields.sampling import (
    FieldNames,
    ModelName,
    Name,
    ParallelCalls,
    ProcessorOptions,
    Salt,
    SamplingBody,
    Stream,
    TemplateVariables,
    TimingsWanted,
    TopLogprobs,
    late,
)

#: Names of chat fields and what they are called here, in the order in which they are looked for.
_NAMES = (
    (re.compile(r"\.(image_url|video_url)\.url\b"), r".\1"),
    (re.compile(r"\bresponse_format\.json_schema\b"), "text.format"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\b(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\bmessages\b"), "input"),
)


class InputText(msgspec.Struct, tag="input_text"):
    """A text of the user."""

    text: str


class EarlierText(msgspec.Struct, tag="output_text"):
    """A text of an earlier answer."""

    text: str


class InputImage(msgspec.Struct, tag="input_image"):
    """A picture by its URL."""

    image_url: str | None = None
    detail: str | None = None
    file_id: object = None


class InputVideo(msgspec.Struct, tag="input_video"):
    """A video by its URL."""

    video_url: str


InputPart = InputText | EarlierText | TextBody | RefusalBody | InputImage | InputVideo | InputAudioBody
InputContent = str | Annotated[list[InputPart], Meta(min_length=1, max_length=MAX_PARTS)]


class MessageItem(msgspec.Struct, tag="message"):
    """A message of the conversation; its `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: InputContent


class CallItem(msgspec.Struct, tag="function_call"):
    """A call of an earlier answer."""

    call_id: str
    name: str
    arguments: str


class CallOutputItem(msgspec.Struct, tag="function_call_output"):
    """What a called function has returned."""

    call_id: str
    output: InputContent


class ReasoningText(msgspec.Struct):
    """A part of the reasoning."""

    text: str = ""


class ReasoningItem(msgspec.Struct, tag="reasoning"):
    """Reasoning of an earlier answer, of its message or call that comes next; a summary alone is ignored."""

    content: Annotated[list[ReasoningText], Meta(max_length=MAX_PARTS)] | None = None


InputItem = MessageItem | CallItem | CallOutputItem | ReasoningItem


class Conversation:
    """Collects items; `messages` are those of a chat request, `places` the path of each."""

    def __init__(self) -> None:
        self.messages: list[MessageBody] = []
        self.places: dict[str, str] = {}
        self._parts = 0
        #: The last message is an assistant's, of which there is only its reasoning yet.
        self._reasoned = False

    def add(self, message: MessageBody, place: str) -> None:
        self.places[f"messages[{len(self.messages)}]"] = place
        self.messages.append(message)

    def add_item(self, value: dict[str, object], place: str) -> None:
        """One input item. InvalidRequest when it is of a kind that is not served."""
        if "role" in value:
            value = {"type": "message", **value}
        item = convert_field(value, cast("type[InputItem]", InputItem), place)
        self._parts += _parts(item)
        check_parts(self._parts, "input")
        reasoned, self._reasoned = self._reasoned, False
        match item:
            case MessageItem():
                content = _content(item.content, f"{place}.content", flat=item.role != "user")
                if item.role == "assistant" and reasoned:
                    self.messages[-1].content = content
                else:
                    self.add(MessageBody(item.role, content), place)
            case CallItem():
                self._call(item, place)
            case CallOutputItem():
                content = _content(item.output, f"{place}.output", flat=True)
                self.places[f"messages[{len(self.messages)}].content"] = f"{place}.output"
                self.add(MessageBody("tool", content, tool_call_id=item.call_id), place)
            case ReasoningItem():
                if text := "".join(part.text for part in item.content or ()):
                    self.add(MessageBody("assistant", "", reasoning_content=text), place)
                    self._reasoned = True

    def _call(self, item: CallItem, place: str) -> None:
        """Calls belong to the assistant's message before them."""
        if not (self.messages and self.messages[-1].role == "assistant"):
            self.add(MessageBody("assistant", ""), place)
        last = self.messages[-1]
        call = MessageToolCall(FunctionCall(item.name, item.arguments), item.call_id)
        if last.tool_calls is None:
            last.tool_calls = []
        last.tool_calls.append(call)


def _parts(item: InputItem) -> int:
    """The item's parts, and itself."""
    content = item.output if isinstance(item, CallOutputItem) else getattr(item, "content", None)
    return 1 + (len(content) if isinstance(content, list) else 0)


def _content(content: InputContent, place: str, *, flat: bool) -> str | list[PartBody]:
    """A message's content; `flat`: texts alone become one string, as templates expect of these roles."""
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{place}[{at}]") for at, part in enumerate(content)]
    texts = [part.text for part in parts if isinstance(part, TextBody)]
    return "".join(texts) if flat and len(texts) == len(parts) else parts


def _part(part: InputPart, place: str) -> PartBody:
    match part:
        case InputAudioBody():
            return part
        case InputVideo(video_url=url):
            return VideoUrlBody(MediaUrl(url))
        case InputImage(image_url=str(url), file_id=None):
            return ImageUrlBody(ImageUrl(url, part.detail))
        case InputImage():
            wrong = f"{place}.{'image_url' if part.file_id is None else 'file_id'}"
            raise InvalidRequest(f"{wrong}: send the image as image_url", param=wrong)
        case RefusalBody():
            return TextBody(part.refusal)
    return TextBody(part.text)


class FlatTool(FunctionBody, tag="function"):
    """A function in the Responses API's shape."""


class FlatChoice(FunctionName, tag="function"):
    """The function that has to be called."""


class FlatAllowed(msgspec.Struct, tag="allowed_tools"):
    """A choice among some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


class FlatSchema(NamedSchema, tag="json_schema"):
    """JSON that fits a schema."""

    schema: object


class TextConfig(msgspec.Struct, omit_defaults=True):
    """The form that the answer has to have; `verbosity` changes nothing."""

    format: TextFormat | ObjectFormat | FlatSchema | None = None
    verbosity: Name | None = None


LOGPROBS = "message.output_text.logprobs"
_MAX_INCLUDED = 64
#: As much as OpenAI takes.
_Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
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
        str | Annotated[list[Annotated[dict[str, object], late(InputItem)]], Meta(max_length=MAX_PARTS)],
        Meta(description="A text, or items: messages, function calls and their outputs."),
    ]
    model: ModelName = None
    instructions: Annotated[str | None, Meta(description="A system message in front of the input.")] = None
    stream: Stream = None
    max_output_tokens: Annotated[OutputTokens | None, Meta(description="Most output tokens.")] = None
    text: Annotated[TextConfig | None, Meta(description="format: the form that the answer has to have.")] = (
        None
    )
    tools: Annotated[
        Annotated[list[Annotated[dict[str, object], late(FlatTool)]], Meta(max_length=MAX_TOOLS)] | None,
        Meta(description="Functions that the model may call."),
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | FlatChoice | FlatAllowed | None,
        Meta(description="none, auto, required, or the function that has to be called."),
    ] = None
    parallel_tool_calls: ParallelCalls = None
    top_logprobs: TopLogprobs = None
    include: Annotated[
        Annotated[list[str], Meta(max_length=_MAX_INCLUDED)] | None,
        Meta(
            description='"message.output_text.logprobs" reports log-probabilities; other values are ignored.'
        ),
    ] = None
    metadata: Annotated[_Metadata | None, Meta(description="Repeated in the response, and nothing else.")] = (
        None
    )
    store: Annotated[bool | None, Meta(description="Ignored: nothing is stored.")] = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: object = None
    prompt: object = None
    max_tokens: int | None = None
    response_format: Any = None
    user: Annotated[Name | None, Meta(description="Repeated in the response, and nothing else.")] = None
    cache_salt: Salt = None
    mm_processor_kwargs: ProcessorOptions = None
    chat_template_kwargs: TemplateVariables = None
    reasoning: Annotated[
        ReasoningConfig | None, Meta(description="effort: how much the model reasons; see reasoning_effort.")
    ] = None
    triptych_timings: TimingsWanted = None


_decoder = msgspec.json.Decoder(ResponsesBody)
#: What the reply repeats; the others may be large.
_REPEATED = (
    *("instructions", "max_output_tokens", "parallel_tool_calls", "temperature", "top_p"),
    *("text", "tool_choice", "tools", "user", "metadata"),
)


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """`body` has what the reply repeats, and nothing else; `names` leads back to the client's fields."""

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
    # They are repeated as they came.
    check_tools_size(len(msgspec.json.encode(body.tools or ())))
    conversation = _conversation(body)
    names = FieldNames(conversation.places, _NAMES)
    chat = _chat_body(body, conversation)
    try:
        call, options = call_of(chat, request_id, max_images=max_images, timeout=timeout)
    except InvalidRequest as error:
        raise names.translated(error) from None
    repeated = {name: getattr(body, name) for name in _REPEATED}
    return ResponsesRequest(call, options, ResponsesBody(input="", **repeated), names)


def _conversation(body: ResponsesBody) -> Conversation:
    conversation = Conversation()
    if body.instructions:
        conversation.add(MessageBody("system", body.instructions), "instructions")
    if isinstance(body.input, str):
        conversation.add(MessageBody("user", body.input), "input")
        return conversation
    for index, item in enumerate(body.input):
        conversation.add_item(item, f"input[{index}]")
    if len(conversation.messages) == bool(body.instructions):
        raise InvalidRequest("input must hold at least one message", param="input")
    return conversation


def _chat_body(body: ResponsesBody, conversation: Conversation) -> ChatBody:
    shared = {name: getattr(body, name) for name in SamplingBody.__struct_fields__}
    shared["response_format"] = _response_format(body.text.format if body.text else None)
    logprobs = LOGPROBS in (body.include or ())
    return ChatBody(
        **shared,
        messages=conversation.messages,
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


def _response_format(form: TextFormat | ObjectFormat | FlatSchema | None) -> ResponseFormat | None:
    if not isinstance(form, FlatSchema):
        return form
    return SchemaFormat(NamedSchema(name=form.name, schema=form.schema, strict=form.strict))


def _tool(tool: dict[str, object]) -> dict[str, object]:
    """The chat API's form of a function; any other tool is left to be refused there."""
    if tool.get("type") != "function":
        return tool
    names = FunctionBody.__struct_fields__
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


def _tool_choice(choice: str | FlatChoice | FlatAllowed | None) -> ToolChoice:
    match choice:
        case FlatChoice():
            return FunctionChoice(FunctionName(choice.name))
        case FlatAllowed():
            tools = [FunctionChoice(FunctionName(tool.name)) for tool in choice.tools]
            return AllowedChoice(AllowedTools(choice.mode, tools))
    return cast("ToolChoice", choice)
