"""What the request Structs cannot tell of their fields: words, ranges, shapes of what is decoded late.

A test holds every range against the parsers, and every field against a description.
"""

from __future__ import annotations

from typing import Any

from triptych.chat import MAX_TOOLS
from triptych.proxy.call.output_format import MAX_CHOICE_TEXTS
from triptych.proxy.call.validation import MAX_LOGPROBS, MAX_SALT, MAX_STOP_STRINGS, MAX_TOKEN_IDS, MAX_TOKENS
from triptych.proxy.openai.completions.request import MAX_PROMPTS

Schema = dict[str, Any]
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": (1 << 32) - 1}
_NULL: Schema = {"type": "null"}

#: Limits of fields wherever they stand: laid over the type that is not null.
LIMITS: dict[str, Schema] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 1 << 31},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 10},
    "max_tokens": {"minimum": 1, "maximum": MAX_TOKENS},
    "max_completion_tokens": {"minimum": 1, "maximum": MAX_TOKENS},
    "max_output_tokens": {"minimum": 1, "maximum": MAX_TOKENS},
    "min_tokens": {"minimum": 0, "maximum": MAX_TOKENS},
    "seed": {"minimum": -(1 << 63), "maximum": (1 << 63) - 1},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "cache_salt": {"maxLength": MAX_SALT},
    "n": {"minimum": 1, "maximum": 16},
}

WORDS: dict[str, str] = {
    "add_generation_prompt": "Open the assistant's turn at the prompt's end; true by default.",
    "add_special_tokens": "Only true is served: the tokenizer's own special tokens go around a text.",
    "cache_salt": "Keeps caches apart: requests with other salts share no embeddings and no KV blocks.",
    "chat_template_kwargs": "Further variables of the chat template.",
    "continue_final_message": "The last message is the beginning of the answer.",
    "decoder_prompt": "What an encoder-decoder model's decoder begins with; else its own start.",
    "echo": "Put the prompt in front of the text; not with logprobs.",
    "encoder_prompt": "What an encoder-decoder model's encoder reads, in place of prompt.",
    "frequency_penalty": "Taken from a token's logit for each time it stands in the output.",
    "guided_choice": "The answer is one of these texts.",
    "guided_json": "A JSON schema that the answer fits.",
    "guided_regex": "A regular expression that the whole answer matches.",
    "ignore_eos": "Go on past the end-of-sequence token, up to max_tokens.",
    "include": '"message.output_text.logprobs" reports log-probabilities; other values are ignored.',
    "input": "A text, or items: messages, function calls and their outputs.",
    "instructions": "A system message in front of the input.",
    "logit_bias": "Added to the logits of token ids.",
    "logprobs": "Report log-probabilities: chat, whether; completions, of how many likeliest tokens.",
    "max_completion_tokens": "Most output tokens; goes before max_tokens.",
    "max_output_tokens": "Most output tokens.",
    "max_tokens": "Most output tokens; completions have 16 by default, chat as many as the model takes.",
    "messages": "The conversation. Pictures are parts of a message's content.",
    "metadata": "Repeated in the response, and nothing else.",
    "min_p": "Least probability of a candidate, as a share of the likeliest one's.",
    "min_tokens": "No end before this many output tokens.",
    "mm_processor_kwargs": "Options of the image processor; they change embeddings and their keys.",
    "model": "A name of GET /v1/models; may be left out where only one is served.",
    "multi_modal_data": "Audio or a picture for the encoder of an encoder-decoder model.",
    "n": "Number of answers; at most what --max-choices says.",
    "parallel_tool_calls": "Whether an answer may hold several calls; true by default.",
    "presence_penalty": "Taken once from the logit of every token that stands in the output.",
    "prompt": "A text, token ids, or a list of either.",
    "repetition_penalty": "Divides the logits of tokens that stand in prompt or output.",
    "response_format": "The form that the answer has to have.",
    "return_token_ids": "Report token ids of prompt and output.",
    "seed": "Equal requests with equal seeds get equal answers; drawn where none is given.",
    "stop": "Texts that end the answer and are not part of it.",
    "stop_token_ids": "Token ids that end the answer.",
    "store": "Ignored: nothing is stored.",
    "stream": "Send the answer as server-sent events while it is made.",
    "stream_options": "include_usage: a last event with the usage.",
    "structured_outputs": "vLLM's spelling of a form: json, regex, choice or json_object.",
    "temperature": "0 takes the likeliest token; the checkpoint's own default where none is given.",
    "text": "format: the form that the answer has to have.",
    "tokens": "Token ids.",
    "tool_choice": "none, auto, required, or the function that has to be called.",
    "tools": "Functions that the model may call.",
    "top_k": "Candidates kept; 0 and -1: all.",
    "top_logprobs": "Likeliest tokens reported beside each chosen one.",
    "top_p": "Probability mass of the candidates kept.",
    "triptych_timings": "Report where the request's time went.",
    "user": "Ignored.",
}  # fmt: skip

#: Fields of bodies that are refused or have another name: clients have no reason to send them.
HIDDEN: dict[str, frozenset[str]] = {
    "CompletionBody": frozenset({"best_of", "suffix"}),
    "TokenizeBody": frozenset({"return_token_strs"}),
    "ResponsesBody": frozenset(
        {"background", "conversation", "max_tokens", "previous_response_id", "prompt", "response_format"}
    ),
}

_JSON_SCHEMA = {"type": "object", "examples": [{"type": "object"}]}
_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
_FUNCTION: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": _NAME,
        "description": {"type": "string"},
        "parameters": {**_JSON_SCHEMA, "description": "A JSON schema."},
        "strict": {"type": ["boolean", "null"]},
    },
}
_TOOL: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
}
_FLAT_TOOL: Schema = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, **_FUNCTION["properties"]},
}
_CHOICE_WORD: Schema = {"enum": ["none", "auto", "required"]}
_NAMED = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}


def _typed(kind: str, **properties: Schema) -> Schema:
    """An object that says what it is, and has all of these properties."""
    fields = {"type": {"const": kind}, **properties}
    return {"type": "object", "required": list(fields), "properties": fields}


_BASE64 = "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{4}|[A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{2}==)"
_URL: Schema = {
    "anyOf": [
        {"type": "string", "pattern": f"^data:image/(png|jpeg|webp|gif|bmp|avif);base64,{_BASE64}$"},
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
            _typed("text", text={"type": "string"}),
            _typed("image_url", image_url=_IMAGE_URL),
            _typed("image", image=_URL),
            _typed("refusal", refusal={"type": "string"}),
        ]
    },
}
_CONTENT: Schema = {"anyOf": [{"type": "string"}, _PARTS]}
_CALL: Schema = {
    "type": "object",
    "required": ["id", "type", "function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {
                "name": {"type": "string"},
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
        _message(
            {"enum": ["tool", "function"]}, "content", content=_CONTENT, tool_call_id={"type": "string"}
        ),
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
            _typed("input_text", text={"type": "string"}),
            _typed("output_text", text={"type": "string"}),
            _typed("input_image", image_url=_URL),
        ]
    },
}
_TEXT_OR_INPUT: Schema = {"anyOf": [{"type": "string"}, _INPUT_PARTS]}
_INPUT_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": _TEXT_OR_INPUT,
    },
}
_STRING: Schema = {"type": "string"}
_JSON_OBJECT_TEXT: Schema = {
    "type": "string",
    "contentMediaType": "application/json",
    "contentSchema": {"type": "object"},
    "examples": ['{"city": "Rome"}'],
}
_INPUT_ITEMS: Schema = {
    "type": "array",
    "contains": {"not": {"required": ["type"], "properties": {"type": {"const": "reasoning"}}}},
    "items": {
        "anyOf": [
            _INPUT_MESSAGE,
            _typed("function_call", call_id=_STRING, name=_STRING, arguments=_JSON_OBJECT_TEXT),
            _typed("function_call_output", call_id=_STRING, output=_TEXT_OR_INPUT),
            _typed("reasoning"),
        ]
    },
}
_FUNCTION_CHOICE: Schema = _typed("function", function=_NAMED)
_TOOLS: Schema = {"anyOf": [{"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}, _NULL]}
_IDS: Schema = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_LONG_TEXT: Schema = {"type": "string", "minLength": 1}
_SINGLETON: Schema = {
    "anyOf": [
        _LONG_TEXT,
        _IDS,
        {"type": "object", "required": ["prompt"], "properties": {"prompt": _LONG_TEXT}},
        {"type": "object", "required": ["prompt_token_ids"], "properties": {"prompt_token_ids": _IDS}},
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

#: Fields whose Struct says Any, or less than the parser wants.
SHAPES: dict[str, dict[str, Schema]] = {
    "SamplingBody": {
        "stop": {
            "anyOf": [
                _LONG_TEXT,
                {"type": "array", "items": _LONG_TEXT, "maxItems": MAX_STOP_STRINGS},
                _NULL,
            ]
        },
        "stop_token_ids": {"anyOf": [{"type": "array", "items": _TOKEN_ID}, _NULL]},
        "logit_bias": {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
                _NULL,
            ]
        },
        "guided_choice": {
            "anyOf": [
                {"type": "array", "items": _LONG_TEXT, "minItems": 1, "maxItems": MAX_CHOICE_TEXTS},
                _NULL,
            ]
        },
        "response_format": {"anyOf": [*_FORMATS, _JSON_SCHEMA_FORMAT, _NULL]},
    },
    "ChatBody": {
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {"$ref": "#/components/schemas/MessageBody"},
        },
        "tools": _TOOLS,
        "tool_choice": {"anyOf": [_CHOICE_WORD, _FUNCTION_CHOICE, _NULL]},
    },
    "CompletionBody": {
        "prompt": {
            "anyOf": [
                _LONG_TEXT,
                {"type": "array", "items": _LONG_TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        },
        "encoder_prompt": {"anyOf": [_SINGLETON, _NULL]},
        "decoder_prompt": {"anyOf": [_SINGLETON, _NULL]},
        "multi_modal_data": {"anyOf": [_AUDIO, _PICTURE, _NULL]},
        "logprobs": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}, _NULL]},
        "add_special_tokens": {"enum": [True, None]},
    },
    "ResponsesBody": {
        "input": {"anyOf": [{"type": "string"}, _INPUT_ITEMS]},
        "tools": {"anyOf": [{"type": "array", "items": _FLAT_TOOL, "maxItems": MAX_TOOLS}, _NULL]},
        "tool_choice": {"anyOf": [_CHOICE_WORD, _typed("function", name=_STRING), _NULL]},
        "text": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "format": {
                            "anyOf": [*_FORMATS, _typed("json_schema", name=_STRING, schema=_JSON_SCHEMA)]
                        }
                    },
                },
                _NULL,
            ]
        },
    },
    "TokenizeBody": {
        "messages": {
            "anyOf": [
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"$ref": "#/components/schemas/MessageBody"},
                },
                _NULL,
            ]
        },
        "tools": _TOOLS,
        "add_special_tokens": {"enum": [True, None]},
    },
    "DetokenizeBody": {"tokens": {"type": "array", "items": _TOKEN_ID, "maxItems": MAX_TOKEN_IDS}},
}
