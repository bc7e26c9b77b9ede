"""A body of Anthropic's Messages API turned into a ChatCall, by way of the chat API's body."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest
from triptych.base.request import MAX_PARTS, MAX_TOOLS, FunctionCall, MessageToolCall, Seed
from triptych.base.types import (
    MinTokens,
    OutputTokens,
    Temperature,
    TopK,
    TopP,
)
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.call.output_formats import NamedSchema, SchemaFormat
from triptych.proxy.call.tools import FunctionChoice, FunctionName, ToolChoice
from triptych.proxy.call.validation import check_parts
from triptych.proxy.http.json_body import decode_body
from triptych.proxy.openai.chat.request import (
    ChatBody,
    ChatReplyOptions,
    ImageUrlBody,
    MessageBody,
    PartBody,
    ReasoningEffort,
    TextBody,
    call_of,
)
from triptych.proxy.openai.fields.sampling import (
    FieldNames,
    ModelName,
    ProcessorOptions,
    Salt,
    StopTexts,
    Stream,
    TemplateVariables,
)


class Base64Source(msgspec.Struct, tag="base64"):
    """A picture's bytes."""

    media_type: Annotated[str, Meta(pattern=r"^image/[a-z0-9.+-]{1,32}$")]
    data: str


class UrlSource(msgspec.Struct, tag="url"):
    """A picture's URL."""

    url: str


class ImageBlock(msgspec.Struct, tag="image"):
    """A picture."""

    source: Base64Source | UrlSource


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A call of an earlier answer."""

    id: str
    name: str
    input: dict[str, object]


class ToolResultBlock(msgspec.Struct, tag="tool_result"):
    """What a called tool has returned; `is_error` changes nothing."""

    tool_use_id: str
    content: str | Annotated[list[TextBody | ImageBlock], Meta(max_length=MAX_PARTS)] = ""
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """Reasoning of an earlier answer; its signature is not checked."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking"):
    """Left out: only the service that has made it can read it."""


Block = TextBody | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
#: Blocks and their paths in the body.
Placed = Sequence[tuple[Block, str]]


class BlockMessage(msgspec.Struct):
    """A turn of the conversation; an answer at its end is gone on with."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=MAX_PARTS)]

    @property
    def parts(self) -> int:
        """Its blocks, those in the results of calls, and itself."""
        if isinstance(self.content, str):
            return 1
        results = (block.content for block in self.content if isinstance(block, ToolResultBlock))
        return 1 + len(self.content) + sum(len(inner) for inner in results if isinstance(inner, list))


class ToolDefinition(msgspec.Struct):
    """A tool of the client's own; those that Anthropic's servers run are refused."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
    input_schema: dict[str, object]
    description: str = ""
    type: Literal["custom"] = "custom"
    strict: bool | None = None


class ToolChoiceBody(msgspec.Struct):
    """`any`: one of the tools has to be called; `tool`: the one of that name."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class ThinkingBody(msgspec.Struct):
    """Whether the model reasons, and its largest number of tokens for that."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: MinTokens | None = None


class AnswerSchema(msgspec.Struct, tag="json_schema"):
    """JSON that fits a schema."""

    schema: dict[str, object]


class OutputConfig(msgspec.Struct):
    """How much the model reasons, and the form of its answer."""

    effort: ReasoningEffort | None = None
    format: AnswerSchema | None = None


class CountTokensBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[
        Annotated[list[BlockMessage], Meta(max_length=MAX_PARTS)],
        Meta(description="The conversation: texts, images, tool calls and their results."),
    ]
    model: ModelName = None
    system: Annotated[
        str | Annotated[list[TextBody], Meta(max_length=MAX_PARTS)] | None,
        Meta(description="A system message in front of the conversation."),
    ] = None
    tools: Annotated[
        Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None,
        Meta(description="Tools that the model may call."),
    ] = None
    tool_choice: Annotated[
        ToolChoiceBody | None, Meta(description="auto, any, none, or the tool that has to be called.")
    ] = None
    thinking: Annotated[
        ThinkingBody | None, Meta(description="Whether the model reasons; as its template says by default.")
    ] = None
    output_config: Annotated[
        OutputConfig | None, Meta(description="effort, and a JSON schema as format.")
    ] = None
    chat_template_kwargs: TemplateVariables = None


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[OutputTokens, Meta(description="Largest number of output tokens.")]
    stream: Stream = None
    stop_sequences: Annotated[
        StopTexts | None,
        Meta(description="Texts that end the answer and are not part of it."),
    ] = None
    temperature: Annotated[Temperature | None, Meta(description="0 takes the likeliest token.")] = None
    top_p: Annotated[TopP | None, Meta(description="Probability mass of the candidates kept.")] = None
    top_k: Annotated[TopK | None, Meta(description="Candidates kept; 0 and -1: all.")] = None
    seed: Annotated[Seed | None, Meta(description="Equal requests with equal seeds get equal answers.")] = (
        None
    )
    mm_processor_kwargs: ProcessorOptions = None
    cache_salt: Salt = None


class AnthropicConversation:
    """Collects messages as the chat API has them; `places` leads from their fields to the client's."""

    def __init__(self) -> None:
        self.messages: list[MessageBody] = []
        self.places: dict[str, str] = {}
        self._call_ids: set[str] = set()

    def add(self, message: BlockMessage, path: str) -> None:
        """A turn; in it, every result of a call is a message of its own."""
        content = [TextBody(message.content)] if isinstance(message.content, str) else message.content
        if not content:
            raise InvalidRequest(f"{path}.content must not be empty", param=f"{path}.content")
        waiting: list[tuple[Block, str]] = []
        for at, block in enumerate(content):
            place = f"{path}.content[{at}]"
            if not isinstance(block, ToolResultBlock):
                waiting.append((block, place))
                continue
            if block.tool_use_id not in self._call_ids:
                field = f"{place}.tool_use_id"
                raise InvalidRequest(f"{field}: no tool_use block before it has this id", param=field)
            if waiting:
                self._append(message.role, waiting, path)
                waiting = []
            inner = [TextBody(block.content)] if isinstance(block.content, str) else block.content
            parts = [(part, f"{place}.content[{number}]") for number, part in enumerate(inner)]
            self._append("tool", parts, place).tool_call_id = block.tool_use_id
        if waiting:
            self._append(message.role, waiting, path)

    def _append(
        self, role: Literal["user", "assistant", "system", "tool"], blocks: Placed, path: str
    ) -> MessageBody:
        name = f"messages[{len(self.messages)}]"
        self.places[name] = path
        parts, calls, reasoning = list[PartBody](), list[MessageToolCall](), list[str]()
        for block, place in blocks:
            match block:
                case TextBody():
                    parts.append(block)
                case ImageBlock(source=source):
                    self.places[f"{name}.content[{len(parts)}].image_url"] = (
                        f"{place}.source.{'url' if isinstance(source, UrlSource) else 'data'}"
                    )
                    parts.append(ImageUrlBody(_url(source)))
                case ToolUseBlock():
                    self.places[f"{name}.tool_calls[{len(calls)}].function.arguments"] = f"{place}.input"
                    calls.append(MessageToolCall(FunctionCall(block.name, block.input), block.id))
                    self._call_ids.add(block.id)
                case ThinkingBlock():
                    reasoning.append(block.thinking)
        texts = [part.text for part in parts if isinstance(part, TextBody)]
        # Templates expect strings of these roles.
        plain = len(texts) == len(parts) and (role != "user" or len(parts) == 1)
        between = "\n\n" if role == "system" else ""
        message = MessageBody(role, between.join(texts) if plain else parts, tool_calls=calls or None)
        message.reasoning_content = "".join(reasoning) or None
        self.messages.append(message)
        return message


def _url(source: Base64Source | UrlSource) -> str:
    if isinstance(source, UrlSource):
        return source.url
    return f"data:{source.media_type};base64,{source.data}"


#: What chat fields are called here.
_NAMES = (
    (re.compile(r"\b(tools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"\b(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\bmax_completion_tokens\b"), "max_tokens"),
    (re.compile(r"\bthinking_token_budget\b"), "thinking.budget_tokens"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "output_config.format"),
)
_SHARED = ("stream", "temperature", "top_p", "top_k", "seed", "mm_processor_kwargs", "cache_salt")
_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountTokensBody)


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """`names` leads from the call's fields back to the client's."""

    call: ChatCall
    options: ChatReplyOptions
    names: FieldNames


def parse_messages(raw: bytes, request_id: str, *, max_images: int, timeout: float) -> MessagesRequest:
    """The request that `raw` (JSON) holds. InvalidRequest names what is wrong with it."""
    body = decode_body(_decoder, raw)
    own = {name: getattr(body, name) for name in _SHARED}
    own |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
    own["thinking_token_budget"] = body.thinking and body.thinking.budget_tokens
    return _request(body, own, request_id, max_images, timeout)


def parse_count_tokens(raw: bytes, request_id: str, *, max_images: int) -> MessagesRequest:
    """A conversation that is not answered."""
    return _request(decode_body(_count_decoder, raw), {}, request_id, max_images, 1.0)


def _request(
    body: CountTokensBody, own: dict[str, Any], request_id: str, max_images: int, timeout: float
) -> MessagesRequest:
    conversation = _conversation(body)
    names, last = FieldNames(conversation.places, _NAMES), conversation.messages[-1]
    choice, output = body.tool_choice, body.output_config or OutputConfig()
    schema = None if output.format is None else SchemaFormat(NamedSchema(schema=output.format.schema))
    thinking = body.thinking.type if body.thinking else ""
    variables = {"enable_thinking": True, "thinking": True} if thinking == "enabled" else {}
    try:
        chat = ChatBody(
            **own,
            messages=conversation.messages,
            model=body.model,
            tools=[_tool(tool) for tool in body.tools or ()] or None,
            tool_choice=_tool_choice(choice),
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            response_format=schema,
            reasoning_effort="none" if thinking == "disabled" else output.effort,
            chat_template_kwargs=variables | (body.chat_template_kwargs or {}),
            continue_final_message=last.role == "assistant" and not last.tool_calls,
        )
        call, options = call_of(chat, request_id, max_images=max_images, timeout=timeout)
    except InvalidRequest as error:
        raise names.translated(error) from None
    return MessagesRequest(call, options, names)


def _conversation(body: CountTokensBody) -> AnthropicConversation:
    conversation = AnthropicConversation()
    if not body.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    check_parts(sum(message.parts for message in body.messages))
    if body.system:
        system: Any = body.system
        conversation.add(BlockMessage("system", system), "system")
    for at, message in enumerate(body.messages):
        conversation.add(message, f"messages[{at}]")
    return conversation


def _tool(tool: ToolDefinition) -> dict[str, object]:
    said: dict[str, object] = {"description": tool.description} if tool.description else {}
    if tool.strict is not None:
        said["strict"] = tool.strict
    return {"type": "function", "function": {"name": tool.name, **said, "parameters": tool.input_schema}}


def _tool_choice(choice: ToolChoiceBody | None) -> ToolChoice:
    match choice:
        case ToolChoiceBody(type="tool", name=name):
            return FunctionChoice(FunctionName(name))
        case ToolChoiceBody(type="none"):
            return "none"
    return "required" if choice is not None and choice.type == "any" else "auto"
