"""The form that a client wants its answer in, in OpenAI's words and in vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from triptych.base.errors import InvalidRequest, RequestError
from triptych.base.types import OutputFormat
from triptych.proxy.call.validation import check_depth

#: Characters of a schema or a regular expression.
MAX_FORMAT = 64 << 10
MAX_CHOICE_TEXTS = 1000
#: What a PD worker calls the field, whatever the client called it.
WORKERS_FIELD = "response_format"
JSON_OBJECT = OutputFormat("json_object")


class TextFormat(msgspec.Struct, tag="text"):
    """Plain text."""


class ObjectFormat(msgspec.Struct, tag="json_object"):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True):
    """A JSON schema, which is always held to, whatever `strict` says."""

    name: str = ""
    description: str | None = None
    schema: object = None
    strict: bool | None = None


class SchemaFormat(msgspec.Struct, tag="json_schema"):
    """JSON that fits a schema."""

    json_schema: NamedSchema


ResponseFormat = TextFormat | ObjectFormat | SchemaFormat


class FormatBody(Protocol):
    """The fields that name a form; at most one of them may be set."""

    response_format: ResponseFormat | None
    structured_outputs: dict[str, object] | None
    guided_json: str | dict[str, object] | bool | None
    guided_regex: str | None
    guided_choice: list[str] | None


def format_of(body: FormatBody) -> OutputFormat | None:
    """The form that the body names; None for plain text. InvalidRequest names the field."""
    found: dict[str, OutputFormat] = {}
    if body.response_format is not None and (form := response_format(body.response_format)):
        found["response_format"] = form
    if body.structured_outputs is not None and (form := structured_outputs(body.structured_outputs)):
        found["structured_outputs"] = form
    if body.guided_json is not None:
        found["guided_json"] = schema_format(body.guided_json, "guided_json")
    if body.guided_regex is not None:
        found["guided_regex"] = regex_format(body.guided_regex, "guided_regex")
    if body.guided_choice is not None:
        found["guided_choice"] = choice_format(body.guided_choice, "guided_choice")
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidRequest(f"{second} contradicts {first}: leave one of them out", param=second)
    return next(iter(found.values()), None)


def response_format(form: ResponseFormat) -> OutputFormat | None:
    """The form that OpenAI's field names."""
    if isinstance(form, TextFormat):
        return None
    if isinstance(form, ObjectFormat) or form.json_schema.schema is None:
        return JSON_OBJECT
    return schema_format(form.json_schema.schema, "response_format.json_schema.schema")


def structured_outputs(body: Mapping[str, object], param: str = "structured_outputs") -> OutputFormat | None:
    """vLLM's {"json" | "regex" | "choice" | "json_object": …}; grammars and structural tags are refused."""
    named = [key for key in ("json", "regex", "choice", "json_object") if body.get(key)]
    for key in ("grammar", "structural_tag"):
        if body.get(key):
            raise InvalidRequest(
                f"{param}.{key} is not supported: use json, regex or choice", param=f"{param}.{key}"
            )
    if not named:
        return None
    if len(named) > 1:
        raise InvalidRequest(f"{param} takes one of {', '.join(named)}", param=param)
    key, path = named[0], f"{param}.{named[0]}"
    if key == "json":
        return schema_format(body[key], path)
    if key == "regex":
        return regex_format(body[key], path)
    return choice_format(body[key], path) if key == "choice" else JSON_OBJECT


def schema_format(schema: object, param: str) -> OutputFormat:
    """A JSON schema, as an object or as the text of one. What it says is the PD worker's to judge."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise InvalidRequest(f"{param} is not valid JSON: {error}", param=param) from None
    if not isinstance(schema, Mapping) and schema is not True:
        raise InvalidRequest(f"{param} must be a JSON schema: an object", param=param)
    check_depth(schema, param)
    text = "{}" if schema is True else msgspec.json.encode(schema).decode()
    return OutputFormat("json_schema", _short(text, param), param=param)


def regex_format(pattern: object, param: str) -> OutputFormat:
    if not isinstance(pattern, str) or not pattern:
        raise InvalidRequest(f"{param} must be a regular expression", param=param)
    return OutputFormat("regex", _short(pattern, param), param=param)


def choice_format(texts: object, param: str) -> OutputFormat:
    if (
        not isinstance(texts, Sequence)
        or not all(isinstance(text, str) and text for text in texts)
        or not 1 <= len(texts) <= MAX_CHOICE_TEXTS
    ):
        raise InvalidRequest(f"{param} must be a list of 1 to {MAX_CHOICE_TEXTS} texts", param=param)
    _short("".join(texts), param)
    return OutputFormat("choices", choices=tuple(dict.fromkeys(texts)), param=param)


def name_field(error: RequestError, form: OutputFormat | None) -> RequestError:
    """A worker's complaint about the form, in the name of the field that the client sent."""
    if form is None or error.param != WORKERS_FIELD:
        return error
    message = error.message.replace(WORKERS_FIELD, form.param, 1)
    return type(error)(message, param=form.param, retry_after=error.retry_after)


def _short(text: str, param: str) -> str:
    if len(text) > MAX_FORMAT:
        raise InvalidRequest(f"{param} must be at most {MAX_FORMAT} characters long", param=param)
    return text
