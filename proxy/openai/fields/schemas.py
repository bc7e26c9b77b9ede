"""Types of request fields that are decoded late, with their JSON schemas for the OpenAPI page."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from triptych.request.limits import MAX_TOKEN_ID, MAX_TOOLS

#: Prompts of one completions request.
MAX_PROMPTS = 64
Schema = dict[str, object]
_STRING: Schema = {"type": "string"}
_TEXT: Schema = {"type": "string", "minLength": 1}
_NULL: Schema = {"type": "null"}
_TOKEN_IDS: Schema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID},
    "minItems": 1,
}
_JSON_SCHEMA: Schema = {"type": "object", "examples": [{"type": "object"}]}
_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
_FUNCTION_PROPERTIES: Schema = {
    "name": _NAME,
    "description": _STRING,
    "parameters": {**_JSON_SCHEMA, "description": "A JSON schema."},
    "strict": {"type": ["boolean", "null"]},
}
_FUNCTION: Schema = {"type": "object", "required": ["name"], "properties": _FUNCTION_PROPERTIES}
_TOOL: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
}
_FLAT_TOOL: Schema = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, **_FUNCTION_PROPERTIES},
}
_CHOICE_WORD: Schema = {"enum": ["none", "auto", "required"]}
_NAMED: Schema = {"type": "object", "required": ["name"], "properties": {"name": _STRING}}


def _typed(kind: str, **properties: Schema) -> Schema:
    """An object that says what it is, and has all of these properties."""
    fields = {"type": {"const": kind}, **properties}
    return {"type": "object", "required": list(fields), "properties": fields}


_BASE64 = "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{4}|[A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{2}==)"
_URL: Schema = {
    "anyOf": [
        {"type": "string", "pattern": f"^data:image/(png|jpeg|webp|gif|bmp);base64,{_BASE64}$"},
        {
            "type": "string",
            "pattern": "^https?://[a-z0-9]([a-z0-9-]{0,60}[a-z0-9])?(:[1-9][0-9]{0,3})?/[!-~]*$",
        },
    ]
}
_IMAGE_URL: Schema = {
    "anyOf": [
        {
            "type": "object",
            "required": ["url"],
            "properties": {"url": _URL, "detail": {"type": ["string", "null"]}},
        },
        _URL,
    ]
}
_PARTS: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _typed("text", text=_STRING),
            _typed("image_url", image_url=_IMAGE_URL),
            _typed("image", image=_URL),
            _typed("refusal", refusal=_STRING),
        ]
    },
}
_CONTENT: Schema = {"anyOf": [_STRING, _PARTS]}
_CALL: Schema = {
    "type": "object",
    "required": ["id", "type", "function"],
    "properties": {
        "id": _STRING,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {
                "name": _STRING,
                "arguments": {
                    "anyOf": [
                        {"type": "object"},
                        {
                            "type": "string",
                            "contentMediaType": "application/json",
                            "contentSchema": {"type": "object"},
                        },
                    ]
                },
            },
        },
    },
}


def _message(role: Schema, *required: str, **properties: Schema) -> Schema:
    fields = {"role": role, "name": {"type": ["string", "null"]}, **properties}
    return {"type": "object", "required": ["role", *required], "properties": fields}


#: One schema for what MessageBody takes, by role.
MESSAGE: Schema = {
    "anyOf": [
        _message({"enum": ["system", "developer", "user"]}, "content", content=_CONTENT),
        _message({"enum": ["tool", "function"]}, "content", content=_CONTENT, tool_call_id=_STRING),
        _message({"const": "assistant"}, "content", content=_CONTENT),
        _message(
            {"const": "assistant"},
            "tool_calls",
            content={"anyOf": [_CONTENT, _NULL]},
            tool_calls={"type": "array", "items": _CALL, "minItems": 1},
        ),
    ],
}
_FORMATS: list[Schema] = [_typed("text"), _typed("json_object")]
_INPUT_PARTS: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _typed("input_text", text=_STRING),
            _typed("output_text", text=_STRING),
            _typed("input_image", image_url=_URL),
        ]
    },
}
_TEXT_OR_INPUT: Schema = {"anyOf": [_STRING, _INPUT_PARTS]}
_INPUT_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": _TEXT_OR_INPUT,
    },
}
_JSON_OBJECT_TEXT: Schema = {
    "type": "string",
    "contentMediaType": "application/json",
    "contentSchema": {"type": "object"},
    "examples": ['{"city": "Rome"}'],
}
_INPUT_ITEM: Schema = {
    "anyOf": [
        _INPUT_MESSAGE,
        _typed("function_call", call_id=_STRING, name=_STRING, arguments=_JSON_OBJECT_TEXT),
        _typed("function_call_output", call_id=_STRING, output=_TEXT_OR_INPUT),
        _typed("reasoning"),
    ]
}
_FILE: Schema = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "pattern": f"^{_BASE64}$", "minLength": 4}},
}
_AUDIO: Schema = {"type": "object", "required": ["audio"], "properties": {"audio": _FILE}}
_PICTURE: Schema = {
    "type": "object",
    "required": ["image"],
    "properties": {
        "image": {
            "anyOf": [
                _FILE,
                {"type": "object", "required": ["url"], "properties": {"url": _URL}},
                _URL,
            ]
        }
    },
}
_JSON_SCHEMA_FORMAT: Schema = _typed(
    "json_schema",
    json_schema={
        "type": "object",
        "required": ["name", "schema"],
        "properties": {"name": _STRING, "schema": _JSON_SCHEMA, "strict": {"type": ["boolean", "null"]}},
    },
)

#: A text that the parsers want not to be empty.
Text = Annotated[str, Meta(extra_json_schema={"minLength": 1})]
OnlyTrue = Annotated[bool | None, Meta(extra_json_schema={"enum": [True, None]})]
#: Each message is decoded by itself, so that errors name its index.
Messages = Annotated[
    list[Annotated[object, Meta(extra_json_schema={"$ref": "#/components/schemas/MessageBody"})]],
    Meta(extra_json_schema={"minItems": 1}),
]
Tools = Annotated[
    list[Annotated[object, Meta(extra_json_schema=_TOOL)]], Meta(extra_json_schema={"maxItems": MAX_TOOLS})
]
ToolChoice = Annotated[
    object, Meta(extra_json_schema={"anyOf": [_CHOICE_WORD, _typed("function", function=_NAMED), _NULL]})
]
ResponseFormat = Annotated[
    dict[str, object], Meta(extra_json_schema={"anyOf": [*_FORMATS, _JSON_SCHEMA_FORMAT]})
]
#: A text, token ids, or a list of either.
Prompts = Annotated[
    object,
    Meta(
        extra_json_schema={
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
#: One prompt in any of its forms.
Singleton = Annotated[
    object,
    Meta(
        extra_json_schema={
            "anyOf": [
                _TEXT,
                _TOKEN_IDS,
                {"type": "object", "required": ["prompt"], "properties": {"prompt": _TEXT}},
                {
                    "type": "object",
                    "required": ["prompt_token_ids"],
                    "properties": {"prompt_token_ids": _TOKEN_IDS},
                },
                _NULL,
            ]
        }
    ),
]
MultiModalData = Annotated[object, Meta(extra_json_schema={"anyOf": [_AUDIO, _PICTURE, _NULL]})]
#: The Responses API's spelling of messages, tools, tool choice and response format.
InputItems = Annotated[
    list[Annotated[object, Meta(extra_json_schema=_INPUT_ITEM)]],
    Meta(extra_json_schema={"contains": {"not": _typed("reasoning")}}),
]
FlatTools = Annotated[
    list[Annotated[object, Meta(extra_json_schema=_FLAT_TOOL)]],
    Meta(extra_json_schema={"maxItems": MAX_TOOLS}),
]
FlatToolChoice = Annotated[
    object, Meta(extra_json_schema={"anyOf": [_CHOICE_WORD, _typed("function", name=_STRING), _NULL]})
]
TextConfig = Annotated[
    dict[str, object],
    Meta(
        extra_json_schema={
            "properties": {
                "format": {"anyOf": [*_FORMATS, _typed("json_schema", name=_STRING, schema=_JSON_SCHEMA)]}
            }
        }
    ),
]
