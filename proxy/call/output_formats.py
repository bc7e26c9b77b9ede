"""Forms that a request asks its output to have, as both front doors read them; errors name the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest, RequestError
from triptych.base.request import (
    MAX_CHOICE_TEXTS,
    MAX_DESCRIPTION,
    MAX_FORMAT,
    MAX_NAME,
)
from triptych.base.types import (
    OutputFormat,
)
from triptych.proxy.call.json_text import check_depth, decode_text

#: What a PD worker calls the field, whatever the client called it.
WORKERS_FIELD = "response_format"
JSON_OBJECT = OutputFormat("json_object")


class TextFormat(msgspec.Struct, tag="text"):
    """Plain text."""


class ObjectFormat(msgspec.Struct, tag="json_object"):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True):
    """A JSON schema, which is always held to; `strict` false: as it is written, with nothing closed."""

    name: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION)] | None = None
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
    formats: dict[str, OutputFormat] = {}
    if body.response_format is not None and (form := response_format(body.response_format)):
        formats["response_format"] = form
    if body.structured_outputs is not None and (form := structured_outputs(body.structured_outputs)):
        formats["structured_outputs"] = form
    if body.guided_json is not None:
        formats["guided_json"] = schema_format(body.guided_json, "guided_json")
    if body.guided_regex is not None:
        formats["guided_regex"] = regex_format(body.guided_regex, "guided_regex")
    if body.guided_choice is not None:
        formats["guided_choice"] = choice_format(body.guided_choice, "guided_choice")
    if len(formats) > 1:
        first, second, *_ = formats
        raise InvalidRequest(f"{second} contradicts {first}: leave one of them out", param=second)
    return next(iter(formats.values()), None)


def response_format(form: ResponseFormat) -> OutputFormat | None:
    """The form that OpenAI's field names."""
    if isinstance(form, TextFormat):
        return None
    if isinstance(form, ObjectFormat):
        return JSON_OBJECT
    named = form.json_schema
    param = "response_format.json_schema.schema"
    return replace(schema_format(named.schema, param), open=named.strict is False)


def structured_outputs(body: Mapping[str, object], param: str = "structured_outputs") -> OutputFormat | None:
    """vLLM's {"json" | "regex" | "choice" | "json_object": …}; grammars and structural tags are refused."""
    # What is empty is named all the same: `{}` is a schema, and no text is among no choices.
    named = [
        key
        for key in ("json", "regex", "choice", "json_object")
        if body.get(key) is not None and not (key == "json_object" and body[key] is False)
    ]
    for key in ("grammar", "structural_tag"):
        if body.get(key):
            raise InvalidRequest(
                f"{param}.{key} is not supported: use json, regex or choice", param=f"{param}.{key}"
            )
    if not named:
        return None
    if len(named) > 1:
        raise InvalidRequest(
            f"{param}.{named[1]} contradicts {param}.{named[0]}: leave one of them out",
            param=f"{param}.{named[1]}",
        )
    key, path = named[0], f"{param}.{named[0]}"
    if key == "json":
        return schema_format(body[key], path)
    if key == "regex":
        return regex_format(body[key], path)
    return choice_format(body[key], path) if key == "choice" else JSON_OBJECT


def schema_format(schema: object, param: str) -> OutputFormat:
    """A JSON schema, as an object or as the text of one. What it says is the PD worker's to judge."""
    if schema is None or schema == "":
        remedy = "send a JSON schema, or the type json_object"
        raise InvalidRequest(f"{param} is missing: {remedy}", param=param)
    if isinstance(schema, str):
        # White space and escapes in it are gone once it is encoded again.
        schema = decode_text(schema, object, param, 4 * MAX_FORMAT)
    if not isinstance(schema, Mapping) and schema is not True:
        raise InvalidRequest(f"{param} must be a JSON schema: an object", param=param)
    try:
        text = "{}" if schema is True else msgspec.json.encode(schema).decode()
    except RecursionError:
        check_depth(schema, param)
        raise
    _short(text, param)
    check_depth(schema, param)
    return OutputFormat("json_schema", text, param=param)


def regex_format(pattern: object, param: str) -> OutputFormat:
    if not isinstance(pattern, str) or not pattern:
        raise InvalidRequest(f"{param} must be a regular expression", param=param)
    return OutputFormat("regex", _short(pattern, param), param=param)


def choice_format(texts: object, param: str) -> OutputFormat:
    if (
        not isinstance(texts, list | tuple)
        or not 1 <= len(texts) <= MAX_CHOICE_TEXTS
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise InvalidRequest(
            f"{param} must be a list of 1 to {MAX_CHOICE_TEXTS} texts, none of them empty: send what the "
            "answer may be, or leave it out",
            param=param,
        )
    _short("".join(texts), param)
    return OutputFormat("choices", choices=tuple(dict.fromkeys(texts)), param=param)


def name_field(error: RequestError, form: OutputFormat | None) -> RequestError:
    """A worker's complaint about the form, in the name of the field that the client sent."""
    if form is None or error.param != WORKERS_FIELD:
        return error
    message = error.message.replace(WORKERS_FIELD, form.param, 1)
    return type(error)(message, param=form.param, retry_after=error.retry_after)


def _short(text: str, param: str, limit: int = MAX_FORMAT) -> str:
    if len(text) > limit:
        raise InvalidRequest(f"{param} must be at most {limit} characters long", param=param)
    return text
