"""A ChatRequest of gRPC turned into a ChatCall, or into an error that names the field."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from triptych.base.errors import InvalidRequest
from triptych.base.request import MAX_TEXT, FunctionCall, MessageToolCall, Role, TextPart
from triptych.base.types import OutputFormat, SamplingParams
from triptych.protos import common_pb2, proxy_pb2
from triptych.protos.convert import sampling_from_proto
from triptych.proxy.call.chat import ROLES, ChatCall, ChatMessage
from triptych.proxy.call.json_text import MAX_OPTIONS_TEXT, MAX_TOOLS_TEXT, decode_text
from triptych.proxy.call.output_formats import JSON_OBJECT, choice_format, regex_format, schema_format
from triptych.proxy.call.tools import FunctionChoice, FunctionName, ToolChoice, ToolUse, tool_use
from triptych.proxy.call.validation import (
    check_image_count,
    check_options,
    check_parts,
    check_salt,
    check_sampling,
    check_text,
    in_range,
    seed_of,
    template_options,
)
from triptych.proxy.http.json_body import convert_field
from triptych.proxy.media.source import AudioPart, ImagePart, ItemPart, VideoPart

T = TypeVar("T")


def call_of(
    request: proxy_pb2.ChatRequest, *, max_images: int, timeout: float, max_choices: int
) -> tuple[ChatCall, ToolUse]:
    """The request, and how calls stand in its output; InvalidRequest names the field at fault."""
    if not request.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    in_range("timeout", request.timeout, 0, 86400)
    in_range("n", request.n, 0, max_choices)
    check_parts(sum(1 + len(message.parts) + len(message.tool_calls) for message in request.messages))
    tools = _tools(request.tools)
    messages = tuple(_message(index, message) for index, message in enumerate(request.messages))
    sampling = sampling_of_message(request.sampling)
    if tools.forced is not None:
        sampling = replace(sampling, output_format=tools.forced)
    call = ChatCall(
        label=uuid.uuid4().hex,
        model=request.model,
        messages=messages,
        sampling=sampling,
        timeout=min(request.timeout or timeout, timeout),
        cache_salt=check_salt(request.cache_salt),
        processor_options=processor_options(request.mm_processor_kwargs),
        n=request.n or 1,
        priority=request.priority,
        template=template_options(
            messages[-1],
            tools=tools.tools,
            variables=_json(request.chat_template_kwargs, dict[str, object], "chat_template_kwargs") or {},
            generation_prompt=False if request.no_generation_prompt else None,
            continue_final_message=request.continue_final_message,
        ),
    )
    check_text(call.text_length, "messages")
    check_image_count(len(call.items()), max_images)
    return call, tools


def processor_options(text: str) -> Mapping[str, object]:
    """The options that a JSON object holds; none of an empty text."""
    return check_options(_json(text, dict[str, object], "mm_processor_kwargs") or {})


def _tools(tools: proxy_pb2.ChatTools) -> ToolUse:
    choice: ToolChoice = FunctionChoice(FunctionName(tools.function)) if tools.function else None
    if choice is None:
        choice = convert_field(tools.choice or None, cast("type[Any]", ToolChoice), "tool_choice")
    return tool_use(_json(tools.tools, list[object], "tools", MAX_TOOLS_TEXT), choice, not tools.single_call)


def _message(index: int, message: proxy_pb2.ChatMessage) -> ChatMessage:
    path = f"messages[{index}]"
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(f"{path}.role must be one of {', '.join(ROLES)}", param=f"{path}.role")
    calls = _tool_calls(message, role, path)
    if not message.parts and not calls:
        raise InvalidRequest(f"{path}.parts must hold at least one part", param=f"{path}.parts")
    content = content_of(message.parts, path)
    reasoning = message.reasoning or None
    return ChatMessage(role, content, message.name or None, calls, message.tool_call_id or None, reasoning)


def content_of(given: Sequence[proxy_pb2.ChatPart], path: str) -> str | tuple[TextPart | ItemPart, ...]:
    """What parts say: a text alone, or texts, pictures, videos and sounds."""
    parts: list[TextPart | ItemPart] = []
    for at, part in enumerate(given):
        kind = part.WhichOneof("body")
        if kind is None:
            raise InvalidRequest(f"{path}.parts[{at}] is empty", param=f"{path}.parts[{at}]")
        parts.append(_part(part, kind, f"{path}.parts[{at}].{kind}"))
    if not parts:
        return ""
    only = parts[0] if len(parts) == 1 else None
    return only.text if isinstance(only, TextPart) else tuple(parts)


def _tool_calls(message: proxy_pb2.ChatMessage, role: Role, path: str) -> tuple[MessageToolCall, ...]:
    """The calls of an earlier answer, their arguments as the objects that chat templates print."""
    path = f"{path}.tool_calls"
    if message.tool_calls and role != "assistant":
        raise InvalidRequest(f"{path}: only assistant messages have them", param=path)
    calls = []
    for at, call in enumerate(message.tool_calls):
        arguments = _json(call.arguments, dict[str, object], f"{path}[{at}].arguments", MAX_TEXT) or {}
        calls.append(MessageToolCall(FunctionCall(call.name, arguments), call.id))
    return tuple(calls)


_FILES: dict[str, type[ItemPart]] = {"image": ImagePart, "video": VideoPart, "audio": AudioPart}


def _part(part: proxy_pb2.ChatPart, kind: str, param: str) -> TextPart | ItemPart:
    value = getattr(part, kind)
    if kind == "text":
        return TextPart(value)
    name, is_url, _ = kind.partition("_")
    return _FILES[name].of_url(value, param) if is_url else _FILES[name](value, param)


def _json(text: str, kind: type[T], param: str, most: int = MAX_OPTIONS_TEXT) -> T | None:
    """None for an empty text."""
    return decode_text(text, kind, param, most) if text else None


def sampling_of_message(sampling: common_pb2.SamplingParams) -> SamplingParams:
    """The values in range, with a seed drawn where none is given; InvalidRequest names the field."""
    if sampling.choice:
        raise InvalidRequest("sampling.choice must be 0: set n instead", param="choice")
    given = sampling_from_proto(sampling)
    return check_sampling(
        replace(given, seed=given.seed or seed_of(None), output_format=_format(sampling.output_format))
    )


def _format(form: common_pb2.OutputFormat) -> OutputFormat | None:
    kind = form.WhichOneof("body")
    if kind == "json_schema":
        return replace(schema_format(form.json_schema, "output_format.json_schema"), open=form.open)
    if kind == "regex":
        return regex_format(form.regex, "output_format.regex")
    if kind == "choices":
        return choice_format(list(form.choices.texts), "output_format.choices")
    return JSON_OBJECT if kind == "json_object" and form.json_object else None
