"""Types of request fields that are decoded late, with their JSON schemas for the OpenAPI page."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from triptych.base.request.limits import MAX_TOKEN_ID, MAX_TOOLS

#: Prompts of one completions request.
MAX_PROMPTS = 64
Schema = dict[str, object]
_STRING: Schema = {"type": "string"}
_TEXT: Schema = {"type": "string", "minLength": 1}
_NULL: Schema = {"type": "null"}
_FLAG: Schema = {"type": ["boolean", "null"]}


def _any_of(*kinds: Schema) -> Schema:
    return {"anyOf": list(kinds)}


def _list_of(items: Schema, **limits: int) -> Schema:
    """A list that is not empty."""
    return {"type": "array", "items": items, "minItems": 1} | limits


def _object(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _typed(kind: str, **properties: Schema) -> Schema:
    """An object that says what it is, and has all of these properties."""
    return _object("type", *properties, type={"const": kind}, **properties)


_TOKEN_IDS = _list_of({"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID})
_JSON_SCHEMA: Schema = {"type": "object", "examples": [{"type": "object"}]}
_JSON_TEXT: Schema = {
    "type": "string",
    "contentMediaType": "application/json",
    "contentSchema": {"type": "object"},
}
_FUNCTION: dict[str, Schema] = {
    "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
    "description": _STRING,
    "parameters": {**_JSON_SCHEMA, "description": "A JSON schema."},
    "strict": _FLAG,
}
_TOOL = _typed("function", function=_object("name", **_FUNCTION))
_FLAT_TOOL = _object("type", "name", type={"const": "function"}, **_FUNCTION)
_CHOICE_WORD: Schema = {"enum": ["none", "auto", "required"]}
_BASE64 = "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{4}|[A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{2}==)"
_HTTP_URL = "^https?://[a-z0-9]([a-z0-9-]{0,60}[a-z0-9])?(:[1-9][0-9]{0,3})?/[!-~]*$"
_URL = _any_of(
    {"type": "string", "pattern": f"^data:image/(png|jpeg|webp|gif|bmp);base64,{_BASE64}$"},
    {"type": "string", "pattern": _HTTP_URL},
)
_PARTS = _list_of(
    _any_of(
        _typed("text", text=_STRING),
        _typed(
            "image_url",
            image_url=_any_of(_object("url", url=_URL, detail={"type": ["string", "null"]}), _URL),
        ),
        _typed("image", image=_URL),
        _typed("refusal", refusal=_STRING),
    )
)
_CONTENT = _any_of(_STRING, _PARTS)
_CALL = _object(
    *("id", "type", "function"),
    id=_STRING,
    type={"const": "function"},
    function=_object("name", "arguments", name=_STRING, arguments=_any_of({"type": "object"}, _JSON_TEXT)),
)


def _message(role: Schema, *required: str, **properties: Schema) -> Schema:
    return _object("role", *required, role=role, name={"type": ["string", "null"]}, **properties)


#: One schema for what MessageBody takes, by role.
MESSAGE = _any_of(
    _message({"enum": ["system", "developer", "user"]}, "content", content=_CONTENT),
    _message({"enum": ["tool", "function"]}, "content", content=_CONTENT, tool_call_id=_STRING),
    _message({"const": "assistant"}, "content", content=_CONTENT),
    _message(
        {"const": "assistant"},
        "tool_calls",
        content=_any_of(_CONTENT, _NULL),
        tool_calls=_list_of(_CALL),
    ),
)
_FORMATS = (_typed("text"), _typed("json_object"))
_INPUT_PARTS = _list_of(
    _any_of(
        _typed("input_text", text=_STRING),
        _typed("output_text", text=_STRING),
        _typed("input_image", image_url=_URL),
    )
)
_TEXT_OR_INPUT = _any_of(_STRING, _INPUT_PARTS)
_INPUT_ITEM = _any_of(
    _object(
        *("role", "content"),
        type={"const": "message"},
        role={"enum": ["user", "assistant", "system", "developer"]},
        content=_TEXT_OR_INPUT,
    ),
    _typed(
        "function_call",
        call_id=_STRING,
        name=_STRING,
        arguments={**_JSON_TEXT, "examples": ['{"city": "Rome"}']},
    ),
    _typed("function_call_output", call_id=_STRING, output=_TEXT_OR_INPUT),
    _typed("reasoning"),
)
_FILE = _object("data", data={"type": "string", "pattern": f"^{_BASE64}$", "minLength": 4})
_MEDIA = (
    _object("audio", audio=_FILE),
    _object("image", image=_any_of(_FILE, _object("url", url=_URL), _URL)),
)
_JSON_SCHEMA_FORMAT = _typed(
    "json_schema",
    json_schema=_object("name", "schema", name=_STRING, schema=_JSON_SCHEMA, strict=_FLAG),
)

#: A text that the parsers want not to be empty.
Text = Annotated[str, Meta(extra_json_schema={"minLength": 1})]
OnlyTrue = Annotated[bool | None, Meta(extra_json_schema={"enum": [True, None]})]
#: Each message is decoded by itself, so that errors name its index.
Messages = Annotated[
    list[Annotated[object, Meta(extra_json_schema={"$ref": "#/components/schemas/MessageBody"})]],
    Meta(extra_json_schema={"minItems": 1}),
]
_AT_MOST_TOOLS = Meta(extra_json_schema={"maxItems": MAX_TOOLS})
Tools = Annotated[list[Annotated[object, Meta(extra_json_schema=_TOOL)]], _AT_MOST_TOOLS]
ToolChoice = Annotated[
    object,
    Meta(
        extra_json_schema=_any_of(
            _CHOICE_WORD, _typed("function", function=_object("name", name=_STRING)), _NULL
        )
    ),
]
ResponseFormat = Annotated[dict[str, object], Meta(extra_json_schema=_any_of(*_FORMATS, _JSON_SCHEMA_FORMAT))]
#: A text, token ids, or a list of either.
Prompts = Annotated[
    object,
    Meta(
        extra_json_schema=_any_of(
            _TEXT,
            _list_of(_TEXT, maxItems=MAX_PROMPTS),
            _TOKEN_IDS,
            _list_of(_TOKEN_IDS, maxItems=MAX_PROMPTS),
        )
    ),
]
#: One prompt in any of its forms.
Singleton = Annotated[
    object,
    Meta(
        extra_json_schema=_any_of(
            _TEXT,
            _TOKEN_IDS,
            _object("prompt", prompt=_TEXT),
            _object("prompt_token_ids", prompt_token_ids=_TOKEN_IDS),
            _NULL,
        )
    ),
]
MultiModalData = Annotated[object, Meta(extra_json_schema=_any_of(*_MEDIA, _NULL))]
#: The Responses API's spelling of messages, tools, tool choice and response format.
InputItems = Annotated[
    list[Annotated[object, Meta(extra_json_schema=_INPUT_ITEM)]],
    Meta(extra_json_schema={"contains": {"not": _typed("reasoning")}}),
]
FlatTools = Annotated[list[Annotated[object, Meta(extra_json_schema=_FLAT_TOOL)]], _AT_MOST_TOOLS]
FlatToolChoice = Annotated[
    object, Meta(extra_json_schema=_any_of(_CHOICE_WORD, _typed("function", name=_STRING), _NULL))
]
TextConfig = Annotated[
    dict[str, object],
    Meta(
        extra_json_schema={
            "properties": {
                "format": _any_of(*_FORMATS, _typed("json_schema", name=_STRING, schema=_JSON_SCHEMA))
            }
        }
    ),
]
