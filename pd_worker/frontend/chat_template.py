"""The checkpoint's chat template, rendered as transformers renders it."""

from __future__ import annotations

import json
import keyword
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NotRequired, TypedDict, TypeVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.request import (
    MAX_DEPTH,
    MAX_TOOLS,
    Message,
    MessageToolCall,
    Slot,
    TextPart,
    check_tools_size,
)
from triptych.base.types import prepared

T = TypeVar("T")


class TemplateMessage(TypedDict):
    """A message as chat templates read it."""

    role: str
    content: str | list[dict[str, str]]
    name: NotRequired[str]
    tool_call_id: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, object]]]
    reasoning_content: NotRequired[str]


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
    check_tools_size(len(raw))
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
    if message.reasoning_content is not None:
        shaped["reasoning_content"] = protect(message.reasoning_content)
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
    content: str | Sequence[TextPart | Slot] | None, protect: Callable[[str], str]
) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return protect(content)
    return [
        {"type": "text", "text": protect(part.text)}
        if isinstance(part, TextPart)
        else {"type": part.modality}
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
        return msgspec.json.decode(raw, type=prepared(kind))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error


logger = logging.getLogger(__name__)

#: Variables that requests may not set.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


_PAIR = ("query", "document")


class ChatTemplate:
    """Renders messages. `variables` are the special tokens that templates name, such as `bos_token`.

    An empty `source` is that of a model without a template: nothing can be rendered.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None) -> None:
        self._known = bool(source)
        self._variables = dict(variables or {})
        environment = _environment()
        self._reserved = _RESERVED | self._variables.keys() | environment.globals.keys()
        try:
            self._template = environment.from_string(source)
            named = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the checkpoint's chat template is not valid Jinja: line {error.lineno}: {error.message}"
            ) from error
        self._takes_tools = "tools" in named
        #: Whether it writes a query and a document for scoring, as messages with these roles.
        self.takes_documents = all(f"'{role}'" in source or f'"{role}"' in source for role in _PAIR)
        self._trial: tuple[list[TemplateMessage], str] = ([], "user")
        #: Whether the template reads content as a list of parts; else it only takes strings.
        self.takes_parts = self._takes_parts()
        #: The same of a tool's content.
        self._tool_parts = self.takes_parts and self._takes_tool_parts()

    def render(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
        generation_prompt: bool = True,
    ) -> str:
        """The prompt's text, up to the assistant's turn where `generation_prompt` is set.

        InvalidRequest with what the template objects to, or naming tools or variables that it cannot have.
        """
        self._check(tools, variables or {})
        try:
            return self._template.render(
                {
                    **(variables or {}),
                    **self._variables,
                    "messages": [self._shaped(at, message) for at, message in enumerate(messages)],
                    "tools": tools or None,
                    "documents": None,
                    "add_generation_prompt": generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template: {error}", param="messages") from error
        except InvalidRequest:
            raise
        except Exception as error:
            # Templates are code of the checkpoint's author: any exception of theirs ends only this request.
            logger.warning("the chat template failed with %s", type(error).__name__)
            raise InvalidRequest(
                f"the model's chat template cannot render these messages ({type(error).__name__}): "
                "check roles, their order and the kinds of content",
                param="messages",
            ) from error

    def _check(self, tools: Sequence[object], variables: Mapping[str, object]) -> None:
        if not self._known:
            raise InvalidRequest(
                "messages: this model has no chat template: send a prompt to /v1/completions, or start its "
                "PD workers with --chat-template",
                param="messages",
            )
        if tools and not self._takes_tools:
            raise InvalidRequest("this model's chat template takes no tools: leave them out", param="tools")
        if reserved := sorted(variables.keys() & self._reserved):
            raise InvalidRequest(
                f"chat_template_kwargs may not set {', '.join(reserved)}", param="chat_template_kwargs"
            )

    def _shaped(self, index: int, message: TemplateMessage) -> TemplateMessage:
        """The message with its content as the template reads it."""
        content, of_tool = message["content"], message["role"] == "tool"
        if self._tool_parts if of_tool else self.takes_parts:
            if not isinstance(content, str):
                return message
            # Beside tool calls an empty content has to stay empty: templates check for it.
            empty = not content and bool(message.get("tool_calls"))
            return {**message, "content": [] if empty else [{"type": "text", "text": content}]}
        if isinstance(content, str):
            return message
        if any(part["type"] != "text" for part in content):
            if of_tool and self.takes_parts:
                raise unwritten_items(index, "tool")
            raise InvalidRequest("this model's chat template takes text only", param="messages")
        return {**message, "content": "".join(part["text"] for part in content)}

    def _takes_parts(self) -> bool:
        """Found by a trial: a template for strings drops a list, prints it, or fails on it."""
        self.takes_parts = True
        if self._writes([], "user"):
            return True
        # A reranker's template may write no other roles.
        query: TemplateMessage = {"role": "query", "content": "x"}
        writes = self.takes_documents and bool(self._writes([query], "document"))
        if writes:
            self._trial = [query], "document"
        return writes

    def trial(self, *parts: dict[str, str]) -> list[TemplateMessage]:
        """Messages whose last one has these parts, of a role that the template writes."""
        turns, role = self._trial
        return [*turns, {"role": role, "content": list(parts)}]

    def _takes_tool_parts(self) -> bool:
        """Found in the same way; templates that fail on it either way are taken at their word for users."""
        call: dict[str, object] = {"name": "f", "arguments": {"a": 1}}
        turns: list[TemplateMessage] = [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "a23456789", "type": "function", "function": call}],
            },
        ]
        self._tool_parts = True
        if (parts := self._writes(turns, "tool")) is not None:
            return parts
        self._tool_parts = False
        return self._writes(turns, "tool") is None

    def _writes(self, turns: list[TemplateMessage], role: str) -> bool | None:
        """Whether a text among parts comes out as itself, once; None where the template fails."""
        probe = secrets.token_hex(8)
        last: TemplateMessage = {
            "role": role,
            "content": [{"type": "text", "text": probe}],
            "tool_call_id": "a23456789",
        }
        try:
            text = self.render([*turns, last])
        except InvalidRequest:
            return None
        return text.count(probe) == 1 and f"'{probe}'" not in text and f'"{probe}"' not in text


def unwritten_items(index: int, role: str) -> InvalidRequest:
    """The error of a message whose items the template does not write."""
    field = f"messages[{index}].content"
    return InvalidRequest(
        f"{field}: this model's chat template has no images and videos in messages of role {role}: "
        "send them in a user message after it",
        param=field,
    )


def read_template(path: Path, fallback: object = None) -> str:
    """The template's source: chat_template.jinja, chat_template.json, else the tokenizer's (`fallback`).

    Empty where there is none, as for a base model.
    """
    jinja, as_json = path / "chat_template.jinja", path / "chat_template.json"
    source: object = fallback
    if jinja.is_file():
        source = jinja.read_text(encoding="utf-8")
    elif as_json.is_file():
        source = json.loads(as_json.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(source, Mapping):
        source = source.get("default")
    return source if isinstance(source, str) else ""


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """Ignores `{% generation %}`, with which training marks the assistant's text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which prompts are not."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
