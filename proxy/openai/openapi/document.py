"""The OpenAPI document, made of the Structs that bodies are decoded into."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triptych import __version__
from triptych.base.request.limits import Temperature
from triptych.proxy.call.validation import MAX_SALT
from triptych.proxy.openai.audio.request import FORMATS
from triptych.proxy.openai.chat.request import ChatBody
from triptych.proxy.openai.completions.request import CompletionBody
from triptych.proxy.openai.fields.schemas import MESSAGE
from triptych.proxy.openai.openapi import replies
from triptych.proxy.openai.responses.request import ResponsesBody
from triptych.proxy.openai.tokenize import DetokenizeBody, TokenizeBody
from triptych.proxy.page.endpoint import DOCS, SECURITY_HEADERS, page_files


class TranscriptUsage(msgspec.Struct):
    type: str
    seconds: int


class TranscriptReply(msgspec.Struct):
    """`verbose_json` has more fields; srt, vtt and text are text."""

    text: str
    usage: TranscriptUsage


def _text(description: str, **limits: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **limits}


_COMMON: dict[str, Any] = {
    "file": _text("An audio file: WAV, FLAC, MP3 or Ogg.", format="binary"),
    "model": _text("A name from GET /v1/models; optional when only one model is served."),
    "prompt": _text("Text that the model takes as said before."),
    "response_format": _text("The form of the reply; json by default.", enum=list(FORMATS)),
    "stream": {
        "type": "boolean",
        "description": "Send the text as server-sent events while it is generated.",
    },
    "temperature": {
        **msgspec.json.schema(Temperature),
        "description": "0 takes the likeliest token; the checkpoint's own default where none is given.",
    },
    "seed": {"type": "integer", "description": "Equal requests with equal seeds get equal answers."},
    "cache_salt": _text("Keeps caches apart.", maxLength=MAX_SALT),
}
_TRANSCRIPTION = {
    **_COMMON,
    "language": _text("The spoken language's code, such as en; heard where it is left out.", maxLength=40),
    "timestamp_granularities[]": {
        "type": "array",
        "items": {"enum": ["segment"]},
        "description": "Only with response_format verbose_json.",
    },
}

#: Component name to schema.
FORMS: dict[str, dict[str, Any]] = {
    "TranscriptionForm": {"type": "object", "required": ["file"], "properties": _TRANSCRIPTION},
    "TranslationForm": {"type": "object", "required": ["file"], "properties": _COMMON},
}


Schema = dict[str, Any]
REFERENCE = "#/components/schemas/"
_PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEklEQVR4nGP4z8CAFWEX"
    "HbQSACj/P8Fu7N9hAAAAAElFTkSuQmCC"
)
_HELLO = [{"role": "user", "content": "Hello!"}]
_LOOK = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": _PIXEL}},
            {"type": "text", "text": "What is in the image?"},
        ],
    }
]
_ASK = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": _PIXEL},
            {"type": "input_text", "text": "What is in the image?"},
        ],
    }
]


@dataclass(frozen=True, slots=True)
class Operation:
    """One path. `body` and `reply` are Structs; `form` names a form; `events`: it streams on demand."""

    method: str
    path: str
    summary: str
    reply: type[msgspec.Struct] | str
    body: type[msgspec.Struct] | None = None
    examples: dict[str, dict[str, Any]] | None = None
    events: bool = False
    needs_key: bool = True
    statuses: tuple[int, ...] = ()
    form: str = ""
    #: Examples that want an encoder-decoder model; by name as `examples`.
    encoder_decoder: dict[str, dict[str, Any]] | None = None


_BODY_STATUSES = (400, 404, 413, 429, 503, 504)
OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answers a conversation with text and pictures",
        replies.ChatReply,
        ChatBody,
        {
            "text": {"messages": _HELLO, "max_tokens": 16},
            "picture": {"messages": _LOOK, "max_tokens": 16, "temperature": 0},
        },
        events=True,
        statuses=_BODY_STATUSES,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Goes on from a raw prompt",
        replies.TextReply,
        CompletionBody,
        {
            "text": {"prompt": "Once upon a time", "max_tokens": 16},
            "several": {"prompt": ["One", "Two"], "max_tokens": 4, "n": 2},
        },
        events=True,
        statuses=_BODY_STATUSES,
        encoder_decoder={
            "two prompts": {"encoder_prompt": "A long article …", "decoder_prompt": "In short:"},
            "picture to text": {"multi_modal_data": {"image": {"url": _PIXEL}}, "max_tokens": 16},
        },
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answers in the shapes of OpenAI's Responses API, without its memory",
        replies.ResponseReply,
        ResponsesBody,
        {
            "text": {"input": "Hello!", "max_output_tokens": 16},
            "picture": {"input": _ASK, "instructions": "Be short.", "max_output_tokens": 16},
        },
        events=True,
        statuses=_BODY_STATUSES,
    ),
    Operation(
        "post",
        "/tokenize",
        "The token ids of a text or of a conversation",
        replies.TokenizeReply,
        TokenizeBody,
        {"text": {"prompt": "Hello!"}, "messages": {"messages": _HELLO}},
        statuses=(400, 404, 413, 429, 503),
    ),
    Operation(
        "post",
        "/detokenize",
        "The text of token ids",
        replies.DetokenizeReply,
        DetokenizeBody,
        {"ids": {"tokens": [1, 2, 3]}},
        statuses=(400, 404, 413, 429, 503),
    ),
    Operation("get", "/v1/models", "Models that can be asked", replies.ModelsReply),
    Operation("get", "/v1/models/{model}", "One model", replies.ModelReply, statuses=(404, 503)),
    Operation("get", "/version", "The server's version", replies.VersionReply),
    Operation("get", "/health", "Whether the process lives", replies.StatusReply, needs_key=False),
    Operation(
        "get",
        "/ready",
        "Whether requests can be answered",
        replies.StatusReply,
        needs_key=False,
        statuses=(503,),
    ),
    Operation("get", "/openapi.json", "This document", "application/json"),
    Operation("get", "/docs", "This document for people", "text/html", needs_key=False),
)
FORM_OPERATIONS = (
    Operation(
        "post",
        "/v1/audio/transcriptions",
        "Writes speech down",
        TranscriptReply,
        examples={
            "text": {"file": "@speech.wav"},
            "subtitles": {"file": "@speech.wav", "language": "en", "response_format": "srt"},
        },
        form="TranscriptionForm",
        events=True,
        statuses=_BODY_STATUSES,
    ),
    Operation(
        "post",
        "/v1/audio/translations",
        "Writes speech down in English",
        TranscriptReply,
        examples={"text": {"file": "@speech.wav", "response_format": "text"}},
        form="TranslationForm",
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


def make_openapi(*, max_choices: int = 16, page: bool = True) -> dict[str, Any]:
    """The whole document (OpenAPI 3.1). `page`: whether /docs is served."""
    operations = [op for op in (*OPERATIONS, *FORM_OPERATIONS) if page or op.path != "/docs"]
    bodies = [op.body for op in operations if op.body is not None]
    shapes = [op.reply for op in operations if not isinstance(op.reply, str)]
    _, components = msgspec.json.schema_components(
        [*bodies, *shapes, replies.ErrorReply], ref_template=REFERENCE + "{name}", schema_hook=_any_json
    )
    for body in bodies:
        _complete(components[body.__name__], max_choices)
    components |= {"MessageBody": MESSAGE, **FORMS}
    paths: dict[str, Any] = {}
    for op in operations:
        paths.setdefault(op.path, {})[op.method] = _operation(op)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Triptych",
            "version": __version__,
            "description": "Multimodal models behind OpenAI's API. Unknown fields are ignored.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _any_json(kind: type) -> Schema:
    """The schema of a value whose type is `object`; msgspec wants it to say something."""
    return {"title": "Any JSON"}


def _complete(schema: Schema, max_choices: int) -> None:
    """Leaves out the fields without a description, which are refused or have another name here."""
    properties = {name: field for name, field in schema["properties"].items() if "description" in field}
    for field in properties.values():
        field.pop("default", None)  # always null: "not given"
    if "n" in properties:
        properties["n"] |= {"minimum": 1, "maximum": max_choices}
    schema["properties"] = properties


def _operation(op: Operation) -> dict[str, Any]:
    """One operation of the document."""
    ok: dict[str, Any] = {"description": "The answer", "content": _content(op)}
    found = {"200": ok}
    for status in sorted({*op.statuses, 500, *((401,) if op.needs_key else ())}):
        shape = replies.StatusReply if op.path == "/ready" and status == 503 else replies.ErrorReply
        found[str(status)] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": _reference(shape)}},
        }
    body: dict[str, Any] = {}
    named = (op.examples or {}) | (op.encoder_decoder or {})
    examples = {name: {"value": value} for name, value in named.items()}
    if op.body is not None:
        content = {"application/json": {"schema": _reference(op.body), "examples": examples}}
        body["requestBody"] = {"required": True, "content": content}
    elif op.form:
        content = {"multipart/form-data": {"schema": {"$ref": REFERENCE + op.form}, "examples": examples}}
        body["requestBody"] = {"required": True, "content": content}
    return {
        "operationId": re.sub(r"\W+", "_", op.path).strip("_"),
        "summary": op.summary,
        **_path_parameters(op.path),
        **body,
        "responses": found,
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
    if op.form:
        content["text/plain"] = {"schema": {"type": "string"}}
    if op.events:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content


def _reference(struct: type[msgspec.Struct]) -> Schema:
    return {"$ref": REFERENCE + struct.__name__}


class DocsEndpoints:
    """Endpoints of the documentation, each generated once. `page`: whether there is a page to describe."""

    def __init__(self, *, max_choices: int, page: bool = True) -> None:
        self._max_choices = max_choices
        self._with_page = page

    @cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(make_openapi(max_choices=self._max_choices, page=self._with_page))

    @cached_property
    def _page(self) -> bytes:
        # As data for the page's script: nothing in it ends the element that it stands in.
        return page_files()[DOCS].data.replace(b"OPENAPI", self._document.replace(b"<", b"\\u003c"))

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def document(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def page(self, request: Request) -> Response:
        headers = {**SECURITY_HEADERS, "cache-control": "no-cache"}
        return Response(self._page, media_type="text/html", headers=headers)
