"""A request body of OpenAI's chat API turned into a ChatCall, or into an error that names the field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest
from triptych.base.request import MAX_PARTS, MAX_TEXT, FunctionCall, MessageToolCall, Role, TextPart
from triptych.base.types import (
    OutputTokens,
)
from triptych.proxy.call.chat import ROLES, ChatCall, ChatMessage
from triptych.proxy.call.json_text import check_depth, decode_text
from triptych.proxy.call.tools import NO_TOOLS, CallForm, ToolChoice, ToolUse, tool_use
from triptych.proxy.call.validation import (
    check_image_count,
    check_options,
    check_parts,
    check_salt,
    check_text,
    in_range,
    template_options,
)
from triptych.proxy.http.json_body import decode_body
from triptych.proxy.media.source import AudioPart, ImagePart, ItemPart, VideoPart
from triptych.proxy.openai.fields.sampling import (
    ChatTools,
    ChoiceCount,
    ContinueFinal,
    GenerationPrompt,
    ModelName,
    Name,
    ParallelCalls,
    ProcessorOptions,
    ReturnTokenIds,
    Salt,
    SamplingBody,
    Stream,
    StreamUsage,
    TemplateVariables,
    TimingsWanted,
    TopLogprobs,
    chat_logprobs,
    refuse_unserved,
    sampling_of,
)

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextBody(msgspec.Struct, tag="text"):
    """A text among a message's parts."""

    text: str


class RefusalBody(msgspec.Struct, tag="refusal"):
    """An earlier answer's refusal."""

    refusal: str


class ImageUrl(msgspec.Struct):
    """An http(s) or data: URL."""

    url: str
    detail: Name | None = None


class ImageUrlBody(msgspec.Struct, tag="image_url"):
    """A picture. `uuid` is a client's own name for it; the content alone decides the key."""

    image_url: ImageUrl | str
    uuid: Name | None = None


class ImageBody(msgspec.Struct, tag="image"):
    """A picture by its URL."""

    image: str
    uuid: Name | None = None


class MediaUrl(msgspec.Struct):
    """An http(s), data: or file: URL of a video or a sound."""

    url: str


class VideoUrlBody(msgspec.Struct, tag="video_url"):
    """A video. `uuid` as of a picture."""

    video_url: MediaUrl | str
    uuid: Name | None = None


class InputAudio(msgspec.Struct):
    """An audio file in base64."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "m4a", "mp4", "aac", "webm"] = "wav"


class InputAudioBody(msgspec.Struct, tag="input_audio"):
    """A sound. `uuid` as of a picture; the bytes decide the format."""

    input_audio: InputAudio
    uuid: Name | None = None


class AudioUrlBody(msgspec.Struct, tag="audio_url"):
    """A sound by its URL. `uuid` as of a picture."""

    audio_url: MediaUrl | str
    uuid: Name | None = None


PartBody = TextBody | RefusalBody | ImageUrlBody | ImageBody | VideoUrlBody | InputAudioBody | AudioUrlBody
Content = str | tuple[TextPart | ItemPart, ...]
Parts = Annotated[list[PartBody], Meta(max_length=MAX_PARTS)]


class MessageBody(msgspec.Struct):
    """One message of the conversation; an assistant's may have calls in place of content."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Parts | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Meta(max_length=MAX_PARTS)] | None = None
    tool_call_id: str | None = None
    function_call: object = None
    audio: object = None
    #: What an earlier answer had in the same field, or in vLLM's.
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def parts(self) -> int:
        """Its parts and its calls, and itself."""
        parts = 0 if self.content is None or isinstance(self.content, str) else len(self.content)
        return 1 + parts + len(self.tool_calls or ())


Messages = Annotated[list[MessageBody], Meta(max_length=MAX_PARTS)]


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[
        Messages, Meta(description="The conversation. Images are parts of a message's content.")
    ]
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
        ToolChoice, Meta(description="none, auto, required, or the function that has to be called.")
    ] = None
    parallel_tool_calls: ParallelCalls = None
    chat_template_kwargs: TemplateVariables = None
    reasoning_effort: Annotated[
        ReasoningEffort | None,
        Meta(description="For the chat template: reasoning_effort, and enable_thinking, false with none."),
    ] = None
    include_reasoning: Annotated[
        bool | None, Meta(description="Report the model's reasoning; true where it is not given.")
    ] = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: ContinueFinal = None
    return_token_ids: ReturnTokenIds = None
    mm_processor_kwargs: ProcessorOptions = None
    cache_salt: Salt = None
    triptych_timings: TimingsWanted = None


_ROLES: dict[str, Role] = {**ROLES, "function": "tool"}
_decoder = msgspec.json.Decoder(ChatBody)


@dataclass(frozen=True, slots=True)
class ChatReplyOptions:
    """The options of a request that only shape its reply."""

    stream: bool
    include_usage: bool
    return_token_ids: bool
    timings: bool
    n: int = 1
    logprobs: bool = False
    tools: ToolUse = NO_TOOLS
    reasoning: bool = True

    @property
    def plain(self) -> bool:
        """One choice of text and nothing else: the short way through the reply's rendering."""
        return self.n == 1 and not self.logprobs and self.tools.form is CallForm.NONE


def parse_body(
    raw: bytes, request_id: str, *, max_images: int, timeout: float, max_choices: int = 16
) -> tuple[ChatCall, ChatReplyOptions]:
    """The request that `raw` (JSON) holds. InvalidRequest names what is wrong with it."""
    return call_of(
        decode_body(_decoder, raw),
        request_id,
        max_images=max_images,
        timeout=timeout,
        max_choices=max_choices,
    )


def call_of(
    body: ChatBody, request_id: str, *, max_images: int, timeout: float, max_choices: int = 1
) -> tuple[ChatCall, ChatReplyOptions]:
    """The request that a decoded body means."""
    refuse_unserved(body)
    in_range("n", body.n, 1, max_choices)
    if not body.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    check_parts(sum(message.parts for message in body.messages))
    messages = tuple(_message(index, item) for index, item in enumerate(body.messages))
    tools = NO_TOOLS
    if body.tools or body.tool_choice is not None:
        tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    sampling = sampling_of(
        body,
        max_tokens=body.max_completion_tokens,
        logprobs=chat_logprobs(body.logprobs, body.top_logprobs),
        output_format=tools.forced,
    )
    call = ChatCall(
        label=request_id,
        model=body.model or "",
        messages=messages,
        sampling=sampling,
        timeout=timeout,
        cache_salt=check_salt(body.cache_salt or ""),
        processor_options=check_options(body.mm_processor_kwargs or {}),
        n=body.n or 1,
        priority=body.priority or 0,
        template=template_options(
            messages[-1],
            tools=tools.tools,
            variables=_variables(body),
            generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
        ),
        whole=not body.stream,
    )
    check_text(call.text_length, "messages")
    check_image_count(len(call.items()), max_images)
    options = ChatReplyOptions(
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        timings=bool(body.triptych_timings),
        n=call.n,
        logprobs=sampling.logprobs is not None,
        tools=tools,
        reasoning=body.include_reasoning is not False,
    )
    return call, options


def _variables(body: ChatBody) -> dict[str, object]:
    """The template's variables. Templates have different names for thinking: the request's own go first."""
    if body.reasoning_effort is None:
        return body.chat_template_kwargs or {}
    thinking = body.reasoning_effort != "none"
    by_effort = {"reasoning_effort": body.reasoning_effort, "enable_thinking": thinking, "thinking": thinking}
    return by_effort | (body.chat_template_kwargs or {})


def _message(index: int, body: MessageBody) -> ChatMessage:
    path = f"messages[{index}]"
    for name, advice in (("function_call", "send tool_calls"), ("audio", "send its text as content")):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{path}.{name} is not supported: {advice}", param=f"{path}.{name}")
    calls = _tool_calls(body, path)
    content = _content(body, f"{path}.content", default=body.refusal or ("" if calls else None))
    role, reasoning = _ROLES[body.role], body.reasoning_content or body.reasoning
    return ChatMessage(role, content, body.name or None, calls, body.tool_call_id or None, reasoning)


def _content(body: MessageBody, path: str, default: str | None) -> Content:
    """A message's content; an assistant's may be left out where there is a `default` in its place."""
    content = body.content
    if content in (None, []) and body.role == "assistant" and default is not None:
        return default
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest(f"{path} must be a string or a list of parts", param=path)
    return tuple(part_of(f"{path}[{at}]", part) for at, part in enumerate(content))


def _tool_calls(body: MessageBody, path: str) -> tuple[MessageToolCall, ...]:
    """The calls of an earlier answer, their arguments as the objects that chat templates print."""
    if body.tool_calls and body.role != "assistant":
        raise InvalidRequest(
            f"{path}.tool_calls: only assistant messages have them", param=f"{path}.tool_calls"
        )
    calls = []
    for at, call in enumerate(body.tool_calls or ()):
        param = f"{path}.tool_calls[{at}].function.arguments"
        arguments = call.function.arguments
        if isinstance(arguments, str):
            arguments = decode_text(arguments or "{}", dict[str, object], param, MAX_TEXT)
        else:
            check_depth(arguments, param)
        calls.append(MessageToolCall(FunctionCall(call.function.name, arguments), call.id))
    return tuple(calls)


def part_of(path: str, part: PartBody) -> TextPart | ItemPart:
    match part:
        case TextBody():
            return TextPart(part.text)
        case RefusalBody():
            return TextPart(part.refusal)
        case ImageBody():
            return ImagePart.of_url(part.image, f"{path}.image")
        case VideoUrlBody():
            return VideoPart.of_url(*_url(part.video_url, f"{path}.video_url"))
        case AudioUrlBody():
            return AudioPart.of_url(*_url(part.audio_url, f"{path}.audio_url"))
        case InputAudioBody():
            return AudioPart(part.input_audio.data, f"{path}.input_audio.data")
    return ImagePart.of_url(*_url(part.image_url, f"{path}.image_url"))


def _url(given: ImageUrl | MediaUrl | str, param: str) -> tuple[str, str]:
    """The URL, and the path of its field."""
    return (given, param) if isinstance(given, str) else (given.url, f"{param}.url")
