"""The forms in which model families write tool calls, by vLLM's names of their parsers.

A reader turns the text of one call, or of all that an output ends with, into calls; None: it is none.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

#: The parameters' JSON schema of every function.
Schemas = Mapping[str, Mapping[str, Any]]
_MAX_PYTHON = 1 << 16
_NAME = re.compile(r"[\w.-]{1,64}")
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_GEMMA_CALL = re.compile(r"\s*call:([\w.-]+)(\{.*\})\s*", re.DOTALL)
#: A string between Gemma's quotes, or in JSON; a key; anything else.
_GEMMA_TOKEN = re.compile(r'<\|"\|>(.*?)<\|"\|>|("(?:[^"\\]|\\.)*")|([A-Za-z_]\w*)(?=\s*:)|(.)', re.DOTALL)


@dataclass(frozen=True, slots=True)
class CallText:
    """One call; `arguments` is a JSON object, as the model wrote it where it writes JSON."""

    name: str
    arguments: str


Reader = Callable[[str, Schemas], Sequence[CallText] | None]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls begin with one of `opens` and end with `close`; without `close`, with the output.

    `quoted`: `close` does not count inside of JSON strings. `first`: calls only stand at the output's begin.
    """

    opens: tuple[str, ...]
    read: Reader
    close: str = ""
    quoted: bool = False
    first: bool = False


class _JsonCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")
    parameters: msgspec.Raw = msgspec.Raw(b"")


def read_json(text: str, schemas: Schemas | None = None) -> list[CallText] | None:
    """{"name": …, "arguments": {…}}, or a list of such; Llama writes `parameters`."""
    try:
        calls = msgspec.json.decode(text, type=list[_JsonCall] | _JsonCall)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        arguments = bytes(call.parameters or call.arguments).decode().strip()
        if not call.name or not arguments.startswith("{"):
            return None
        found.append(CallText(call.name, arguments))
    return found or None


def _read_one(text: str, schemas: Schemas) -> list[CallText] | None:
    return None if text.lstrip().startswith("[") else read_json(text)


def _read_coder(text: str, schemas: Schemas) -> list[CallText] | None:
    """<function=NAME> with one <parameter=KEY> per argument."""
    if not (match := _FUNCTION.fullmatch(text)):
        return None
    return _by_schema(match[1], _PARAMETER.findall(match[2]), schemas)


def _read_glm(text: str, schemas: Schemas) -> list[CallText] | None:
    """The name, then pairs of <arg_key> and <arg_value>."""
    name = text.partition("<arg_key>")[0].strip()
    return _by_schema(name, _ARGUMENT.findall(text), schemas)


def _by_schema(name: str, pairs: Sequence[tuple[str, str]], schemas: Schemas) -> list[CallText] | None:
    """A call whose arguments are plain text: strings where the function's schema says so, else JSON."""
    if not _NAME.fullmatch(name):
        return None
    properties = schemas.get(name, {}).get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    arguments: dict[str, Any] = {}
    for key, text in pairs:
        schema = known.get(key.strip())
        is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        arguments[key.strip()] = text if is_text else _json_or_text(text)
    return [CallText(name, json.dumps(arguments, ensure_ascii=False))]


def _json_or_text(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return text


def _read_gemma(text: str, schemas: Schemas) -> list[CallText] | None:
    """call:NAME{key:value}: JSON, but for keys without quotes and strings between quotes of its own."""
    if not (match := _GEMMA_CALL.fullmatch(text)):
        return None
    parts = []
    for own, quoted, key, other in _GEMMA_TOKEN.findall(match[2]):
        parts.append(quoted or (json.dumps(key) if key else other or json.dumps(own, ensure_ascii=False)))
    arguments = "".join(parts)
    return read_json(f'{{"name": {json.dumps(match[1])}, "arguments": {arguments}}}')


def _read_mistral(text: str, schemas: Schemas) -> list[CallText] | None:
    """[TOOL_CALLS] and a JSON list; or before every call: its name, perhaps [ARGS], and its arguments."""
    found: list[CallText] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        name, brace, arguments = part.partition("{")
        if part.lstrip().startswith("["):
            calls = read_json(part)
        else:
            name = name.partition("[")[0].strip()
            calls = read_json(f'{{"name": {json.dumps(name)}, "arguments": {brace}{arguments}}}')
        if calls is None:
            return None
        found += calls
    return found or None


def _read_llama(text: str, schemas: Schemas) -> list[CallText] | None:
    """JSON objects, with semicolons between them."""
    decoder, found = json.JSONDecoder(), list[CallText]()
    text = text.strip().removeprefix("<|python_tag|>").strip()
    while text:
        try:
            _, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return None
        if (calls := read_json(text[:end])) is None:
            return None
        found += calls
        text = text[end:].lstrip("; \n")
    return found or None


def _read_pythonic(text: str, schemas: Schemas) -> list[CallText] | None:
    """[f(a=1), g(b="x")]: a Python list of calls with literal arguments."""
    if len(text) > _MAX_PYTHON:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        found = [_python_call(call) for call in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return found or None


def _python_call(call: ast.expr) -> CallText:
    """ValueError for what is no call of a name with literal arguments."""
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call by keywords")
    arguments = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}
    return CallText(ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False))


FORMATS = {
    "hermes": ToolFormat(("<tool_call>",), _read_one, "</tool_call>", quoted=True),
    "qwen3_coder": ToolFormat(("<tool_call>",), _read_coder, "</tool_call>"),
    "glm45": ToolFormat(("<tool_call>",), _read_glm, "</tool_call>"),
    "gemma4": ToolFormat(("<|tool_call>",), _read_gemma, "<tool_call|>"),
    "mistral": ToolFormat(("[TOOL_CALLS]",), _read_mistral),
    "llama3_json": ToolFormat(("<|python_tag|>", "{"), _read_llama, first=True),
    "pythonic": ToolFormat(("[",), _read_pythonic, first=True),
}
