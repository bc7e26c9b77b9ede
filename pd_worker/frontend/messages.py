"""The messages, tools and template variables of Submit, parsed and made safe for the template."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import NotRequired, TypedDict, TypeVar

import msgspec

from triptych.base.errors import InvalidRequest
from triptych.base.request.chat import ItemSlot, Message, MessageToolCall, TextPart
from triptych.base.request.limits import MAX_DEPTH, MAX_TOOLS

T = TypeVar("T")


class TemplateMessage(TypedDict):
    """A message as chat templates read it."""

    role: str
    content: str | list[dict[str, str]]
    name: NotRequired[str]
    tool_call_id: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, object]]]


def parse_messages(raw: bytes) -> list[Message]:
    """Submit's JSON array of messages; InvalidRequest names the path of what is wrong."""
    messages = _parse(raw, list[Message], "messages")
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    for index, message in enumerate(messages):
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequest(
                f"messages.{index}: only an assistant's message has tool_calls", param="messages"
            )
        if message.content is None and not message.tool_calls:
            raise InvalidRequest(f"messages.{index} has no content", param="messages")
    return messages


def parse_tools(raw: bytes) -> list[dict[str, object]]:
    """Submit's JSON array of tools."""
    if not raw:
        return []
    tools = _parse(raw, list[dict[str, object]], "tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools takes at most {MAX_TOOLS}", param="tools")
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
            raise InvalidRequest(
                f'tools.{index} must be {{"type": "function", "function": {{"name": …}}}}', param="tools"
            )
    return tools


def parse_variables(raw: bytes) -> dict[str, object]:
    """Submit's JSON object of template variables."""
    if not raw:
        return {}
    variables = _parse(raw, dict[str, object], "chat_template_kwargs")
    for name in variables:
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
            raise InvalidRequest(
                f"chat_template_kwargs: {name[:64]!r} is no variable's name", param="chat_template_kwargs"
            )
    return variables


def for_template(message: Message, index: int, protect: Callable[[str], str]) -> TemplateMessage:
    """The message as templates read it, every string of the client through `protect`."""
    shaped: TemplateMessage = {"role": message.role, "content": _content(message.content, protect)}
    if message.name is not None:
        shaped["name"] = protect(message.name)
    if message.tool_call_id is not None:
        shaped["tool_call_id"] = protect(message.tool_call_id)
    if message.tool_calls:
        where = f"messages.{index}.tool_calls"
        shaped["tool_calls"] = [_tool_call(call, where, protect) for call in message.tool_calls]
    return shaped


def protect_object(
    value: Mapping[str, object], protect: Callable[[str], str], param: str, depth: int = 0
) -> dict[str, object]:
    """A JSON object with every string in it, keys too, through `protect`."""
    return {protect(key): _protect_json(inner, protect, param, depth + 1) for key, inner in value.items()}


def _protect_json(value: object, protect: Callable[[str], str], param: str, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{param} is nested deeper than {MAX_DEPTH}", param=param)
    if isinstance(value, str):
        return protect(value)
    if isinstance(value, dict):
        return protect_object(value, protect, param, depth)
    if isinstance(value, list):
        return [_protect_json(inner, protect, param, depth + 1) for inner in value]
    return value


def _content(
    content: str | Sequence[TextPart | ItemSlot] | None, protect: Callable[[str], str]
) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return protect(content)
    return [
        {"type": "text", "text": protect(part.text)} if isinstance(part, TextPart) else {"type": "image"}
        for part in content
    ]


def _tool_call(call: MessageToolCall, where: str, protect: Callable[[str], str]) -> dict[str, object]:
    """With its arguments as an object: templates write them as JSON themselves."""
    arguments = call.function.parsed_arguments()
    if arguments is None:
        raise InvalidRequest(f"{where}: function.arguments must be a JSON object", param="messages")
    return {
        "id": protect(call.id),
        "type": call.type,
        "function": {
            "name": protect(call.function.name),
            "arguments": protect_object(arguments, protect, "messages"),
        },
    }


def _parse(raw: bytes, kind: type[T], param: str) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error
