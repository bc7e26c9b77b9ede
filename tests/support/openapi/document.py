"""The OpenAPI document, made of the Structs that bodies are decoded into: `make openapi` writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from support.openapi import replies
from triptych import __version__
from triptych.base.project import links
from triptych.proxy.http.endpoint import PostEndpoint
from triptych.proxy.openai.audio.endpoint import AudioEndpoint
from triptych.proxy.openai.audio.request import TranslationForm
from triptych.proxy.openai.chat.endpoint import ChatEndpoint
from triptych.proxy.openai.completions.endpoint import CompletionsEndpoint
from triptych.proxy.openai.fields.sampling import LATE, LATE_KEY
from triptych.proxy.openai.messages.endpoint import CountTokensEndpoint, MessagesEndpoint
from triptych.proxy.openai.responses.endpoint import ResponsesEndpoint
from triptych.proxy.openai.retrieval.embeddings import EmbeddingsEndpoint
from triptych.proxy.openai.retrieval.pooling import PoolingEndpoint
from triptych.proxy.openai.retrieval.ranking import RerankEndpoint, ScoreEndpoint
from triptych.proxy.openai.tokenize import DetokenizeEndpoint, TokenizeEndpoint

_PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEklEQVR4nGP4z8CAFWEX"
    "HbQSACj/P8Fu7N9hAAAAAElFTkSuQmCC"
)
_WHAT = "What is in the image?"
_HELLO = [{"role": "user", "content": "Hello!"}]
_LOOK = [
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": _PIXEL}}, {"type": "text", "text": _WHAT}],
    }
]
_ASK = [
    {
        "role": "user",
        "content": [{"type": "input_image", "image_url": _PIXEL}, {"type": "input_text", "text": _WHAT}],
    }
]
_SEE = [
    {
        "role": "user",
        "content": [
            {"type": "image", "source": {"type": "url", "url": _PIXEL}},
            {"type": "text", "text": _WHAT},
        ],
    }
]
_SRT = {"file": "@speech.wav", "language": "en", "response_format": "srt"}
REFERENCE = "#/components/schemas/"
#: The model of an example, in whose place the page has one that is served.
MODEL = "MODEL"
Examples = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One path. `body` and `reply` are Structs; `events`: it streams on demand."""

    method: str
    path: str
    summary: str
    reply: type[msgspec.Struct] | str
    body: type[msgspec.Struct] | None = None
    examples: Examples | None = None
    events: bool = False
    needs_key: bool = True
    statuses: tuple[int, ...] = ()
    error: type[msgspec.Struct] = replies.ErrorReply
    #: Examples that want an encoder-decoder model; by name as `examples`.
    encoder_decoder: Examples | None = None

    @property
    def is_form(self) -> bool:
        return self.body is not None and issubclass(self.body, TranslationForm)


def _post(path: str, summary: str, endpoint: type[PostEndpoint[Any]], reply: Any, **rest: Any) -> Operation:
    return Operation("post", path, summary, reply, endpoint.body, statuses=_BODY_STATUSES, **rest)


_BODY_STATUSES = (400, 404, 413, 429, 503, 504)
OPERATIONS = (
    _post(
        "/v1/chat/completions",
        "Answers a conversation with text and pictures",
        ChatEndpoint,
        replies.ChatReply,
        examples={
            "text": {"messages": _HELLO, "max_tokens": 16},
            "picture": {"messages": _LOOK, "max_tokens": 16, "temperature": 0},
            "stream": {
                "messages": _HELLO,
                "max_tokens": 16,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        },
        events=True,
    ),
    _post(
        "/v1/completions",
        "Goes on from a raw prompt",
        CompletionsEndpoint,
        replies.TextReply,
        examples={
            "text": {"prompt": "Once upon a time", "max_tokens": 16},
            "several": {"prompt": ["One", "Two"], "max_tokens": 4, "n": 2},
        },
        events=True,
        encoder_decoder={
            "two prompts": {"encoder_prompt": "A long article …", "decoder_prompt": "In short:"},
            "picture to text": {"multi_modal_data": {"image": {"url": _PIXEL}}, "max_tokens": 16},
        },
    ),
    _post(
        "/v1/responses",
        "Answers in the shapes of OpenAI's Responses API, without its memory",
        ResponsesEndpoint,
        replies.ResponseReply,
        examples={
            "text": {"input": "Hello!", "max_output_tokens": 16},
            "picture": {"input": _ASK, "instructions": "Be short.", "max_output_tokens": 16},
        },
        events=True,
    ),
    _post(
        "/v1/messages",
        "Answers in the shapes of Anthropic's Messages API",
        MessagesEndpoint,
        replies.AnthropicMessage,
        examples={
            "text": {"messages": _HELLO, "max_tokens": 16},
            "picture": {"messages": _SEE, "system": "Be short.", "max_tokens": 16},
        },
        events=True,
        error=replies.AnthropicError,
    ),
    _post(
        "/v1/messages/count_tokens",
        "The tokens of a conversation, an image as one",
        CountTokensEndpoint,
        replies.AnthropicCount,
        examples={"text": {"messages": _HELLO}},
        error=replies.AnthropicError,
    ),
    _post(
        "/v1/embeddings",
        "Embeds texts, token ids, or a conversation with pictures",
        EmbeddingsEndpoint,
        replies.EmbeddingsReply,
        examples={"texts": {"input": ["A harbour", "A river"]}, "picture": {"messages": _LOOK}},
    ),
    _post(
        "/pooling",
        "A vector for each token of texts, token ids or pictures, by a late-interaction model",
        PoolingEndpoint,
        replies.PoolingReply,
        examples={
            "texts": {"input": ["A harbour", "A river"]},
            "query": {"messages": [{"role": "query", "content": "Where do ships land?"}]},
        },
    ),
    *(
        _post(
            path,
            "Sorts documents by their relevance to a query",
            RerankEndpoint,
            replies.RerankReply,
            examples={"texts": {"query": "Where do ships land?", "documents": ["A harbour", "A hill"]}},
        )
        for path in ("/v1/rerank", "/rerank")
    ),
    *(
        _post(
            path,
            "Scores pairs of texts",
            ScoreEndpoint,
            replies.ScoreReply,
            examples={"one and two": {"text_1": "Where do ships land?", "text_2": ["A harbour", "A hill"]}},
        )
        for path in ("/v1/score", "/score")
    ),
    _post(
        "/tokenize",
        "The token ids of a text or of a conversation",
        TokenizeEndpoint,
        replies.TokenizeReply,
        examples={"text": {"prompt": "Hello!"}, "messages": {"messages": _HELLO}},
    ),
    _post(
        "/detokenize",
        "The text of token ids",
        DetokenizeEndpoint,
        replies.DetokenizeReply,
        examples={"ids": {"tokens": [1, 2, 3]}},
    ),
    Operation("get", "/v1/models", "Models that can be asked", replies.ModelsReply),
    Operation("get", "/v1/models/{model}", "One model", replies.ModelReply, statuses=(404, 503)),
    Operation("get", "/version", "The server's version", replies.VersionReply),
    Operation("get", "/health", "Whether the process lives", replies.StatusReply, needs_key=False),
    Operation(
        "get", "/ready", "Whether it takes requests", replies.StatusReply, needs_key=False, statuses=(503,)
    ),
    Operation("get", "/openapi.json", "This document", "application/json"),
)
FORM_OPERATIONS = (
    _post(
        "/v1/audio/transcriptions",
        "Writes speech down",
        AudioEndpoint,
        replies.TranscriptReply,
        examples={"text": {"file": "@speech.wav"}, "subtitles": _SRT},
        events=True,
    ),
    Operation(
        "post",
        "/v1/audio/translations",
        "Writes speech down in English",
        replies.TranscriptReply,
        TranslationForm,
        {"text": {"file": "@speech.wav", "response_format": "text"}},
        events=True,
        statuses=_BODY_STATUSES,
    ),
)
_ERRORS = {
    400: "The request is wrong: `param` names the field, `message` the remedy",
    401: "The API key is missing or opens nothing",
    404: "The model is not served here",
    413: "The body is too large",
    429: "Too many requests: try again after Retry-After seconds",
    500: "A fault of the server",
    503: "Nobody can do it now: try again after Retry-After seconds",
    504: "The request's time is over",
}


def openapi_text() -> str:
    """The document as its file has it: a value in each line, for readable changes."""
    return json.dumps(make_openapi(), indent=0, ensure_ascii=False) + "\n"


def make_openapi() -> dict[str, Any]:
    """The whole document (OpenAPI 3.1)."""
    operations = (*OPERATIONS, *FORM_OPERATIONS)
    bodies = [op.body for op in operations if op.body is not None]
    shapes = [op.reply for op in operations if not isinstance(op.reply, str)]
    late = len(LATE)
    schemas, components = msgspec.json.schema_components(
        [*LATE, *bodies, *shapes, *{op.error: None for op in operations}],
        ref_template=REFERENCE + "{name}",
        schema_hook=_any_json,
    )
    components = _with_late(components, schemas[:late])
    for body in bodies:
        _complete(components[body.__name__])
    paths: dict[str, Any] = {}
    for op in operations:
        paths.setdefault(op.path, {})[op.method] = _operation(op)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Triptych",
            "version": __version__,
            "description": "Multimodal models behind OpenAI's API. Fields that are not known are named in "
            "the reply's header X-Triptych-Ignored-Fields; misspelt ones are refused.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        **({"externalDocs": {"url": documents["Documentation"]}} if (documents := links()) else {}),
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _any_json(kind: type) -> dict[str, Any]:
    """The schema of a value whose type is `object`; msgspec wants it to say something."""
    return {"title": "Any JSON"}


def _with_late(schema: Any, late: Sequence[dict[str, Any]]) -> Any:
    """The schema with those of values that are converted after their body."""
    if isinstance(schema, list):
        return [_with_late(part, late) for part in schema]
    if not isinstance(schema, dict):
        return schema
    rest = {key: _with_late(value, late) for key, value in schema.items() if key != LATE_KEY}
    return rest | _with_late(late[schema[LATE_KEY]], late) if LATE_KEY in schema else rest


def _complete(schema: dict[str, Any]) -> None:
    """Leaves out the fields without a description, which are refused or have another name here."""
    properties = {name: field for name, field in schema["properties"].items() if "description" in field}
    for field in properties.values():
        field.pop("default", None)  # always null: "not given"
    if "n" in properties:
        properties["n"]["minimum"] = 1
    schema["properties"] = properties


def _operation(op: Operation) -> dict[str, Any]:
    """One operation of the document."""
    ok: dict[str, Any] = {"description": "The answer", "content": _content(op)}
    replies_by_status = {"200": ok}
    for status in sorted({*op.statuses, 500, *((401,) if op.needs_key else ())}):
        shape = replies.StatusReply if op.path == "/ready" and status == 503 else op.error
        replies_by_status[str(status)] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": _reference(shape)}},
        }
    body: dict[str, Any] = {}
    kind = "multipart/form-data" if op.is_form else "application/json"
    named = (op.examples or {}) | (op.encoder_decoder or {})
    examples = {name: {"value": {"model": MODEL, **value}} for name, value in named.items()}
    if op.body is not None:
        content = {kind: {"schema": _reference(op.body), "examples": examples}}
        body["requestBody"] = {"required": True, "content": content}
    return {
        "operationId": re.sub(r"\W+", "_", op.path).strip("_"),
        "summary": op.summary,
        **_path_parameters(op.path),
        **body,
        "responses": replies_by_status,
        "security": [{"key": []}, {}] if op.needs_key else [],
    }


def _path_parameters(path: str) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", path)
    shape = {"in": "path", "required": True, "schema": {"type": "string"}}
    return {"parameters": [{"name": name, **shape} for name in names]} if names else {}


def _content(op: Operation) -> dict[str, Any]:
    if isinstance(op.reply, str):
        return {op.reply: {"schema": {"type": "object" if op.reply.endswith("json") else "string"}}}
    content: dict[str, Any] = {"application/json": {"schema": _reference(op.reply)}}
    if op.is_form:
        content["text/plain"] = {"schema": {"type": "string"}}
    if op.events:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content


def _reference(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": REFERENCE + struct.__name__}
