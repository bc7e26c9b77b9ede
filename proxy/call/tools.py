"""The tools of a chat request: checked, chosen from, and turned into the form that a forced call has."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest
from triptych.base.request import MAX_TOOLS, check_tools_size
from triptych.base.types import OutputFormat
from triptych.proxy.call.json_text import check_depth
from triptych.proxy.call.output_formats import schema_format
from triptych.proxy.http.json_body import convert_field

#: Keywords beside which a function's parameters are none.
_SAY_NOTHING = frozenset(("type", "title", "description", "$schema"))


class FunctionBody(msgspec.Struct, kw_only=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, tag="function"):
    """One of a request's tools."""

    function: FunctionBody


class FunctionName(msgspec.Struct):
    """The name of one of the tools."""

    name: str


class FunctionChoice(msgspec.Struct, tag="function"):
    """The function that has to be called."""

    function: FunctionName


class AllowedTools(msgspec.Struct):
    """The functions that may be called, or of which one has to be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(msgspec.Struct, tag="allowed_tools"):
    """A choice among some of the tools."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice | None


class CallForm(enum.Enum):
    """How calls stand in the output's text."""

    #: There are none.
    NONE = enum.auto()
    #: Where the model wants one, in its own format.
    TAGGED = enum.auto()
    #: The whole output is one call, or a list of calls, as JSON.
    JSON = enum.auto()


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`tools` is the JSON array for the chat template; `forced` the form that a forced call has.

    `schemas` has every function's parameters, for models that write arguments without types.
    """

    tools: bytes = b""
    form: CallForm = CallForm.NONE
    parallel: bool = True
    forced: OutputFormat | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


NO_TOOLS = ToolUse()


def tool_use(tools: Sequence[Any] | None, choice: ToolChoice, parallel: bool | None) -> ToolUse:
    """What a request's `tools`, `tool_choice` and `parallel_tool_calls` mean together."""
    encoded = _encoded(tools) if tools else b""
    by_name = _checked(tools) if tools else {}
    mode, names = _chosen(choice)
    for name in names:
        if name not in by_name:
            raise InvalidRequest(f"tool_choice: no function {name[:64]!r} in tools", param="tool_choice")
    if not by_name:
        if mode == "required":
            raise InvalidRequest("tool_choice: tools is empty, so no tool can be called", param="tool_choice")
        return NO_TOOLS
    if mode == "none":
        return NO_TOOLS
    many = parallel is not False
    if mode == "auto":
        shown = [tool for name, tool in by_name.items() if not names or name in names]
        schemas = {name: tool["function"].get("parameters") or {} for name, tool in by_name.items()}
        told = encoded if len(shown) == len(by_name) else msgspec.json.encode(shown)
        return ToolUse(told, CallForm.TAGGED, many, schemas=schemas)
    only_one = isinstance(choice, FunctionChoice)
    allowed = {name: tool for name, tool in by_name.items() if not names or name in names}
    schema = call_schema(allowed, many=many and not only_one)
    as_written = any(tool["function"].get("strict") is False for tool in allowed.values())
    forced = replace(schema_format(schema, "tools"), open=as_written)
    return ToolUse(encoded, CallForm.JSON, many, forced)


def call_schema(tools: Mapping[str, Mapping[str, Any]], *, many: bool) -> dict[str, Any]:
    """The JSON schema of one call of one of `tools`, or of a list of calls.

    Parameters move to `$defs`, since their own references count from their own root.
    """
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for index, (name, tool) in enumerate(tools.items()):
        place = f"tool{index}"
        definitions[place] = _moved(_parameters(tool["function"]), f"#/$defs/{place}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"enum": [name]}, "arguments": {"$ref": f"#/$defs/{place}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    body = {"type": "array", "minItems": 1, "items": call} if many else call
    return {**body, "$defs": definitions}


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments; one that names none takes none."""
    schema = function.get("parameters") or {"type": "object"}
    nothing = function.get("strict") is not False and schema.keys() <= _SAY_NOTHING
    return {**schema, "properties": {}} if nothing else schema


def _moved(schema: Any, root: str) -> Any:
    """`schema` with the references to its own root led to `root`."""
    if isinstance(schema, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
            else _moved(value, root)
            for key, value in schema.items()
        }
    if isinstance(schema, list):
        return [_moved(value, root) for value in schema]
    return schema


def _encoded(tools: Sequence[Any]) -> bytes:
    """Their JSON, within its limits before anybody walks through it."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools takes at most {MAX_TOOLS} tools", param="tools")
    try:
        encoded = msgspec.json.encode(tools)
    except RecursionError:
        check_depth(tools, "tools")
        raise
    check_tools_size(len(encoded))
    return encoded


def _checked(tools: Sequence[Any]) -> dict[str, Mapping[str, Any]]:
    check_depth(tools, "tools")
    by_name: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        name = convert_field(tool, ToolBody, f"tools[{index}]").function.name
        if name in by_name:
            raise InvalidRequest(f"tools[{index}].function.name: {name} is there twice", param="tools")
        by_name[name] = tool
    return by_name


def _chosen(choice: ToolChoice) -> tuple[str, tuple[str, ...]]:
    """The mode ("none", "auto" or "required") and the functions that it is limited to."""
    match choice:
        case FunctionChoice():
            return "required", (choice.function.name,)
        case AllowedChoice(allowed_tools=allowed):
            return allowed.mode, tuple(tool.function.name for tool in allowed.tools)
    return choice or "auto", ()
